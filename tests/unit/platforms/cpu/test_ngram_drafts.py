import numpy as np
import pytest

from vllm_omni.platforms.cpu.shims.ngram_drafts import find_draft, ngram_drafts_without_numba, propose_batch


def find_draft_ref(tokens: list[int], lengths: tuple[int, int], num_drafts: int) -> list[int]:
    """Tries lengths from the longest and places from the first."""
    for length in range(lengths[1], lengths[0] - 1, -1):
        for begin in range(len(tokens) - length):
            if tokens[begin : begin + length] == tokens[-length:]:
                end = begin + length
                return tokens[end : end + max(num_drafts, 0)]
    return []


@pytest.mark.parametrize("num_symbols", [2, 3, 12])
@pytest.mark.parametrize("lengths", [(1, 1), (2, 4), (3, 5)])
def test_it_finds_what_the_plain_search_finds(num_symbols: int, lengths: tuple[int, int]) -> None:
    random = np.random.default_rng(7)
    for size in (0, 1, 2, 3, 5, 8, 40):
        for _ in range(20):
            tokens = random.integers(0, num_symbols, size).astype(np.int32)
            assert find_draft(tokens, lengths, 3).tolist() == find_draft_ref(tokens.tolist(), lengths, 3)


def test_a_repeated_phrase_is_continued() -> None:
    tokens = np.array([5, 1, 2, 3, 9, 8, 7, 1, 2, 3], dtype=np.int32)
    assert find_draft(tokens, (2, 5), 2).tolist() == [9, 8]


def test_the_longest_match_wins_over_an_earlier_one() -> None:
    tokens = np.array([2, 3, 4, 1, 2, 3, 6, 1, 2, 3], dtype=np.int32)
    assert find_draft(tokens, (2, 5), 1).tolist() == [6]


def test_no_draft_goes_beyond_the_longest_sequence() -> None:
    contexts = np.array([[1, 2, 1, 2, 1, 2, 0, 0], [1, 2, 3, 4, 5, 6, 7, 0]], dtype=np.int32)
    drafts, num_drafts = np.zeros((2, 4), np.int32), np.full(2, 9, np.int32)
    propose_batch([0, 1], np.array([6, 7]), contexts, 1, 3, 8, 4, drafts, num_drafts)
    assert num_drafts.tolist() == [2, 0]
    assert drafts[0, :2].tolist() == [1, 2]


def test_the_switch_leaves_vllm_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_OMNI_SHIM_NGRAM_DRAFTS", "0")
    monkeypatch.setattr("importlib.import_module", lambda name: pytest.fail(f"{name} was imported"))
    ngram_drafts_without_numba()
