"""Against the definitions, computed one token at a time in float64."""

import math

import numpy as np
import pytest

from benchmarks.edge_harness.kl_statistics import (
    TokenScores,
    score,
    scored_positions,
    store_log_probs,
    summarize_scores,
)

ROWS, VOCABULARY = 7, 33


@pytest.fixture
def logits() -> np.ndarray:
    return (4 * np.random.default_rng(0).standard_normal((ROWS, VOCABULARY))).astype(np.float32)


def log_softmax(row: np.ndarray) -> np.ndarray:
    wide = row.astype(np.float64)
    return wide - math.log(np.exp(wide - wide.max()).sum()) - wide.max()


def test_the_second_half_of_a_chunk_is_scored_but_for_its_last_token() -> None:
    assert scored_positions(512) == range(256, 511)
    assert scored_positions(7) == range(3, 6)


def test_stored_log_probabilities_are_within_half_a_level(logits: np.ndarray) -> None:
    stored = store_log_probs(logits)
    for row, decoded, scale in zip(logits, stored.decode(), stored.scale, strict=True):
        exact = log_softmax(row)
        kept = exact > exact.max() - 15.99
        assert np.abs(decoded - exact)[kept].max() < 0.51 * scale + 2e-6


def test_what_is_far_below_the_largest_is_stored_as_the_lowest() -> None:
    stored = store_log_probs(np.array([[0.0, -3.0, -40.0]], np.float32))
    assert stored.codes[0].tolist()[::2] == [65535, 0]
    assert stored.decode()[0, 2] == pytest.approx(-16 - math.log(1 + math.exp(-3)), abs=1e-5)


def test_equal_logits_are_stored_without_a_division_by_zero() -> None:
    stored = store_log_probs(np.zeros((1, 4), np.float32))
    assert stored.decode() == pytest.approx(np.full((1, 4), -math.log(4)))


def test_scores_follow_their_definitions(logits: np.ndarray) -> None:
    judged = (logits + np.random.default_rng(1).standard_normal(logits.shape)).astype(np.float32)
    targets = np.arange(ROWS)
    base = store_log_probs(logits)
    found = score(judged, base, targets)
    for row in range(ROWS):
        base_row, judged_row = base.decode()[row].astype(np.float64), log_softmax(judged[row])
        terms = [math.exp(p) * (p - q) for p, q in zip(base_row, judged_row, strict=True) if p > -16]
        assert found.kl[row] == pytest.approx(sum(terms), abs=1e-5)
        assert found.nll[row] == pytest.approx(-judged_row[targets[row]], abs=1e-5)
        assert found.base_nll[row] == pytest.approx(-base_row[targets[row]], abs=1e-6)
        assert found.is_same_top[row] == (judged[row].argmax() == logits[row].argmax())


def test_a_model_is_close_to_itself(logits: np.ndarray) -> None:
    found = score(logits, store_log_probs(logits), np.zeros(ROWS, np.int64))
    assert np.abs(found.kl).max() < 1e-3
    assert found.is_same_top.all()


def test_the_summary_is_over_all_chunks() -> None:
    first = TokenScores(np.array([1.0, 3.0]), np.array([1.0, 1.0]), np.array([0.0, 0.2]), np.array([True, True]))
    second = TokenScores(np.array([2.0, 2.0]), np.array([1.0, 1.0]), np.array([0.4, 0.6]), np.array([True, False]))
    found = summarize_scores([first, second])
    assert found.num_tokens == 4
    assert found.perplexity == pytest.approx(math.exp(2))
    assert found.perplexity_error == pytest.approx(math.exp(2) * math.sqrt(0.5 / 3))
    assert found.base_perplexity == pytest.approx(math.e)
    assert found.mean_kl == pytest.approx(0.3)
    assert found.mean_kl_error == pytest.approx(math.sqrt(0.05 / 3))
    assert found.p99_kl == pytest.approx(0.594)
    assert found.same_top_percent == 75.0
    assert found.same_top_error == pytest.approx(25.0)
