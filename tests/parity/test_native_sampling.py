"""Sampling and log-probabilities: every arm against the reference, and bit by bit against the generic arm."""

import numpy as np
import pytest

from tests.native.arms import Arm, LibraryArm
from tests.native.cases import random_rows
from tests.parity.test_native_bits import assert_same_bits, oracle
from vllm_omni.errors import EngineError
from vllm_omni.native.reference_sampling import kept_ref, log_softmax_ref, sample_ref, top_ref, uniform_ref
from vllm_omni.native.sampling import Sampling, settings_of

WIDTHS = (1, 7, 16, 100, 5003)
SETTINGS = (
    Sampling(),
    Sampling(1.0),
    Sampling(0.7, top_p=0.9),
    Sampling(1.5, top_k=5),
    Sampling(1.0, min_p=0.05),
    Sampling(2.0, top_p=0.5, top_k=40, min_p=0.01),
    Sampling(0.3, top_p=1e-6),
    Sampling(1.0, min_p=1.0),
    Sampling(5.0, top_k=10**6, top_p=0.999),
)


def rows_of(count: int, width: int) -> np.ndarray:
    return 3 * random_rows(np.random.default_rng([count, width]), count, width)


def with_draws(settings: Sampling, count: int) -> list[Sampling]:
    """The same settings with another draw for each row."""
    fields = settings.fields()[:4]
    return [Sampling(*fields, seed=2**63 + row, step=row * 7) for row in range(count)]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_tokens_are_those_of_the_reference(arm: Arm, settings: Sampling, width: int) -> None:
    logits, rows = rows_of(40, width), with_draws(settings, 40)
    ids = arm.sample(logits, settings_of(rows))
    np.testing.assert_array_equal(ids, sample_ref(logits, rows))


@pytest.mark.parametrize("width", WIDTHS)
def test_log_probabilities(arm: Arm, width: int) -> None:
    logits = rows_of(5, width)
    actual = arm.log_softmax(logits)
    np.testing.assert_allclose(actual, log_softmax_ref(logits), rtol=1e-6, atol=1e-6)
    assert_same_bits(actual, oracle().log_softmax(logits))
    assert_same_bits(arm.log_softmax(logits[3:4])[0], actual[3])


def test_the_largest_come_first_and_the_lower_id_among_equals(arm: Arm) -> None:
    values = np.round(rows_of(4, 300))
    for count in (0, 1, 20, 300):
        np.testing.assert_array_equal(arm.top(values, count), top_ref(values, count))


def test_a_row_is_drawn_alike_alone_and_among_others(arm: Arm) -> None:
    logits = rows_of(30, 1000)
    rows = [Sampling(0.9, 0.95, 0.02 * (row % 2), 50 * (row % 3), seed=row, step=3) for row in range(30)]
    together = arm.sample(logits, settings_of(rows))
    for row in (0, 1, 13, 29):
        assert arm.sample(logits[row : row + 1], settings_of(rows[row : row + 1]))[0] == together[row]


@pytest.mark.parametrize("settings", [Sampling(), Sampling(1.0), Sampling(1.0, 0.9), Sampling(1.0, top_k=3)], ids=str)
def test_logits_that_are_hardly_any(arm: Arm, settings: Sampling) -> None:
    """Masks leave minus infinity, and a broken model what is not a number: the id stays within the vocabulary."""
    logits = np.full((6, 40), -np.inf, np.float32)
    logits[0, 17] = -3.0
    logits[1, [4, 30]] = np.inf
    logits[3] = 0.5
    logits[4], logits[4, 9] = np.nan, 1.0
    logits[5] = np.nan
    ids = arm.sample(logits, settings_of(with_draws(settings, 6)))
    assert (ids[0], ids[1], ids[2], ids[4], ids[5]) == (17, 4, 0, 9, 0)
    assert 0 <= ids[3] < (3 if settings.top_k else 40)
    assert ids[3] == 0 or settings.temperature > 0


@pytest.mark.parametrize("settings", [Sampling(1.0), Sampling(0.8, 0.9), Sampling(1.2, top_k=6)], ids=str)
def test_draws_are_distributed_as_the_probabilities(arm: Arm, settings: Sampling) -> None:
    """Chi-square over 20000 draws of fixed seeds, below what one run in a thousand exceeds."""
    logits = rows_of(1, 12)[0]
    count = 20000
    draws = [Sampling(*settings.fields()[:4], seed=11, step=step) for step in range(count)]
    ids = arm.sample(np.ascontiguousarray(np.broadcast_to(logits, (count, 12))), settings_of(draws))
    kept, probabilities = kept_ref(logits, settings)
    assert set(ids) <= set(kept)
    expected = probabilities * count
    counts = np.array([(ids == each).sum() for each in kept])
    common = expected >= 5
    statistic = ((counts - expected)[common] ** 2 / expected[common]).sum()
    assert statistic < 31.3  # 11 degrees of freedom


def test_neighbouring_steps_and_seeds_are_unrelated() -> None:
    by_step = np.array([uniform_ref(5, step) for step in range(4000)])
    by_seed = np.array([uniform_ref(seed, 0) for seed in range(4000)])
    for numbers in (by_step, by_seed):
        assert abs(numbers.mean() - 0.5) < 0.02
        assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.05


def test_settings_out_of_range_are_refused(arm: Arm) -> None:
    if not isinstance(arm, LibraryArm):
        pytest.skip("the driver ends a test at what it refuses")
    for wrong, message in (
        (Sampling(-1.0), "temperature is -1.0"),
        (Sampling(float("nan")), "temperature is -?nan"),
        (Sampling(1.0, top_p=0.0), "top_p is 0.0"),
        (Sampling(1.0, min_p=2.0), "min_p is 2.0"),
    ):
        with pytest.raises(EngineError, match=message):
            arm.sample(np.zeros((1, 5), np.float32), settings_of([wrong]))
