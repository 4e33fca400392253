"""The paged cache and attention over it: every arm against the reference."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pytest

from tests.native.arms import Arm
from tests.native.cases import UNWRITTEN, Cache, CacheShape, Sequences, empty_cache, random_rows
from vllm_omni.native.reference import AttentionOptions, attention_ref, store_kv_ref
from vllm_omni.native.spec import KV_KINDS, StepRows

CONTEXTS = (1, 15, 16, 17, 300)
HEAD_DIMS = (32, 64, 80, 128, 256)
# Query heads, KV heads.
HEADS = ((2, 2), (3, 1), (8, 2), (8, 1))
WINDOWS = (0, 1, 16, 100)

kinds = pytest.mark.parametrize("kind", KV_KINDS)
head_dims = pytest.mark.parametrize("head_dim", HEAD_DIMS)


# Storing.


@kinds
@head_dims
def test_keys_and_values_are_stored_to_the_same_bits(arm: Arm, kind: str, head_dim: int) -> None:
    rng = np.random.default_rng(head_dim)
    for rows, heads, block_size, gap in ((1, 1, 16, 0), (5, 3, 16, 8), (40, 2, 32, 0)):
        actual = empty_cache(CacheShape(6, heads, block_size, head_dim, kind, gap))
        expected = actual.copy()
        k, v = 3 * random_rows(rng, rows, heads, head_dim), random_rows(rng, rows, heads, head_dim)
        k[0, 0], v[-1, -1] = 0, 1e-3 * v[-1, -1]
        slots = rng.permutation(6 * block_size)[:rows]
        slots[rows // 2] = -1 if rows > 1 else slots[0]
        arm.store_kv(actual, k, v, slots)
        store_kv_ref(expected, k, v, slots)
        np.testing.assert_array_equal(actual.memory, expected.memory)


def test_bfloat16_goes_to_the_nearest_and_halves_to_the_even_number(arm: Arm) -> None:
    bits = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF, 0xBF808000, 0x7F7FFFFF, 0x00000001, 0], np.uint32)
    stored = empty_cache(CacheShape(1, 1, 16, 8, "bfloat16"))
    arm.store_kv(stored, bits.view(np.float32).reshape(1, 1, 8), np.zeros((1, 1, 8), np.float32), np.array([0]))
    expected = [0x3F80, 0x3F82, 0x3F81, 0x3F80, 0xBF80, 0x7F80, 0x0000, 0]
    assert stored.keys[0, 0, 0, :, 0].tolist() == expected


# Attention.


@dataclass(frozen=True)
class Case:
    """Sequences of `lengths` in the cache, of which the last `counts` rows ask."""

    lengths: tuple[int, ...]
    counts: tuple[int, ...]
    heads: int
    kv_heads: int
    head_dim: int = 64
    kind: str = "bfloat16"
    window: int = 0
    gap: int = 0

    @property
    def options(self) -> AttentionOptions:
        return AttentionOptions(self.head_dim**-0.5, self.window)


@cache
def stored(lengths: tuple[int, ...], kv_heads: int, head_dim: int, kind: str, gap: int = 0) -> tuple[StepRows, Cache]:
    """Sequences of these lengths, and a cache with random keys and values of theirs and nothing else."""
    rng = np.random.default_rng([*lengths, head_dim])
    sequences = Sequences(len(lengths), 16, max(lengths), seed=sum(lengths))
    rows = sequences.step(dict(enumerate(lengths)))
    filled = empty_cache(CacheShape(sequences.num_blocks, kv_heads, 16, head_dim, kind, gap))
    k, v = (random_rows(rng, rows.num_rows, kv_heads, head_dim) for _ in range(2))
    store_kv_ref(filled, k, v, rows.slots[0])
    return rows, filled


def queries_of(heads: int, rows: StepRows, head_dim: int) -> np.ndarray:
    return random_rows(np.random.default_rng(heads), rows.num_rows, heads, head_dim)


@cache
def expected_of(case: Case) -> np.ndarray:
    rows, filled = stored(case.lengths, case.kv_heads, case.head_dim, case.kind, case.gap)
    tail = tail_of(rows, case.counts)
    return attention_ref(queries_of(case.heads, tail, case.head_dim), filled, tail, case.options)


def tail_of(rows: StepRows, counts: Sequence[int]) -> StepRows:
    """The last rows of each sequence: as many queries, over all that is stored."""
    ends = rows.query_start[1:]
    last = np.concatenate([np.arange(end - count, end) for end, count in zip(ends, counts, strict=True)])
    return StepRows(
        positions=rows.positions[last],
        query_start=np.cumsum([0, *counts]).astype(np.int32),
        seq_lens=rows.seq_lens,
        slots=tuple(slots[last] for slots in rows.slots),
        block_tables=rows.block_tables,
    )


def assert_attends(arm: Arm, case: Case) -> None:
    rows, filled = stored(case.lengths, case.kv_heads, case.head_dim, case.kind, case.gap)
    tail = tail_of(rows, case.counts)
    actual = arm.attention(queries_of(case.heads, tail, case.head_dim), filled, tail, case.options)
    assert_close(actual, expected_of(case))


def assert_close(actual: np.ndarray, expected: np.ndarray) -> None:
    """Scores of a few units are sums over head_dim in float32; exponentials are good to 2 units in the last place."""
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-5)


@kinds
@head_dims
@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
def test_one_query_over_contexts_and_windows(arm: Arm, heads: int, kv_heads: int, head_dim: int, kind: str) -> None:
    for context in CONTEXTS:
        for window in WINDOWS:
            assert_attends(arm, Case((context,), (1,), heads, kv_heads, head_dim, kind, window))


@kinds
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
def test_several_sequences_with_several_queries(arm: Arm, heads: int, kv_heads: int, window: int, kind: str) -> None:
    lengths = (300, 1, 17, 40, 130)
    for counts in ((1, 1, 1, 1, 1), (4, 1, 17, 3, 1), (100, 1, 17, 40, 130)):
        assert_attends(arm, Case(lengths, counts, heads, kv_heads, kind=kind, window=window, gap=16))


@kinds
@pytest.mark.parametrize("count", [1, 3, 20])
def test_a_long_context_is_shared_among_threads(arm: Arm, count: int, kind: str) -> None:
    assert_attends(arm, Case((1500,), (count,), 4, 2, kind=kind))


def test_blocks_before_the_window_are_not_read(arm: Arm) -> None:
    case = Case((300,), (3,), 4, 2, window=36)
    rows, filled = stored((300,), 2, 64, "bfloat16")
    given_back = rows.block_tables[0].copy()
    given_back[0, : (300 - 40) // 16] = 0
    assert (filled.pages[0] == UNWRITTEN).all()
    tail = replace(tail_of(rows, case.counts), block_tables=(given_back,))
    actual = arm.attention(queries_of(4, tail, 64), filled, tail, case.options)
    assert_close(actual, expected_of(case))


def test_the_place_of_a_query_does_not_follow_from_its_position(arm: Arm) -> None:
    """Positions index the rope table only; which keys a query sees follows from the sequence's length."""
    case = Case((40,), (3,), 4, 2, window=10)
    rows, filled = stored((40,), 2, 64, "bfloat16")
    tail = tail_of(rows, case.counts)
    moved = replace(tail, positions=tail.positions + 100)
    assert_close(arm.attention(queries_of(4, moved, 64), filled, moved, case.options), expected_of(case))


def test_scores_far_apart(arm: Arm) -> None:
    rows, filled = stored((300,), 1, 64, "bfloat16")
    tail, options = tail_of(rows, (2,)), AttentionOptions(1.0)
    q = 100 * queries_of(4, tail, 64)
    # Scores of some thousands are known to about 1e-3 in float32.
    expected = attention_ref(q, filled, tail, options)
    np.testing.assert_allclose(arm.attention(q, filled, tail, options), expected, rtol=0, atol=2e-2)
