import math

import pytest

from benchmarks.edge_harness.score_check import (
    MAX_TOLERANCE,
    RMS_TOLERANCE,
    Scores,
    format_ids,
    parse_ids,
    require_same_scores,
    score_differences,
)
from vllm_omni.errors import EngineError

EXPECTED = Scores((5, 6, 7, 8, 9), (-1.0, -2.0, -3.0, -4.0))


def moved(*by: float) -> Scores:
    logprobs = [old + change for old, change in zip(EXPECTED.logprobs, by, strict=True)]
    return Scores(EXPECTED.token_ids, tuple(logprobs))


def test_differences_are_told_as_root_mean_square_and_largest() -> None:
    found = score_differences(moved(0.3, 0.0, -0.4, 0.0), EXPECTED)
    assert found == {"rms": pytest.approx(0.25), "max": pytest.approx(0.4)}


def test_close_scores_pass_with_their_differences() -> None:
    assert require_same_scores(moved(0.1, 0.1, -0.1, 0.1), EXPECTED)["max"] == pytest.approx(0.1)


@pytest.mark.parametrize("by", [(1.1 * RMS_TOLERANCE,) * 4, (1.1 * MAX_TOLERANCE, 0, 0, 0), (math.nan, 0, 0, 0)])
def test_scores_that_are_far_apart_end_the_run(by: tuple[float, ...]) -> None:
    with pytest.raises(EngineError, match=r"accepted are 0\.25 and 1\. "):
        require_same_scores(moved(*by), EXPECTED)


def test_one_token_far_off_ends_the_run_where_the_mean_is_small() -> None:
    many = Scores(tuple(range(1001)), (-1.0,) * 1000)
    one_off = Scores(many.token_ids, (-1.0 - 1.1 * MAX_TOLERANCE, *many.logprobs[1:]))
    assert score_differences(one_off, many)["rms"] < RMS_TOLERANCE
    with pytest.raises(EngineError, match="accepted are"):
        require_same_scores(one_off, many)


@pytest.mark.parametrize(
    "other", [Scores((5, 6, 7, 8, 1), EXPECTED.logprobs), Scores(EXPECTED.token_ids, EXPECTED.logprobs[:3])]
)
def test_scores_of_other_tokens_are_not_compared(other: Scores) -> None:
    with pytest.raises(EngineError, match="different tokens"):
        require_same_scores(other, EXPECTED)


def test_ids_come_back_from_the_command_line() -> None:
    assert parse_ids(format_ids(EXPECTED.token_ids)) == list(EXPECTED.token_ids)
