"""Every arm gives the bits of the `generic` one, with any number of threads, in any batch, for any cut of a prompt.

The tests of the single operations compare with the reference within a tolerance; these compare with one arm exactly.
What is not a number is left out: the bits of such results are not promised.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from tests.native.arms import Arm, LibraryArm, native_library
from tests.native.cases import CacheShape, Family, Sequences, empty_cache, random_matrix, random_rows
from tests.parity.test_native_attention import HEADS, Case, queries_of, stored, tail_of
from tests.parity.test_native_decoder import FAMILIES, STEPS, frozen, scenario, spec_of
from vllm_omni.native.ops import Team
from vllm_omni.native.spec import KV_KINDS, StepRows

LONG_CONTEXT = 1100

kinds = pytest.mark.parametrize("kind", KV_KINDS)


@cache
def oracle() -> Arm:
    """The generic arm with one thread."""
    return LibraryArm(Team(1, "generic", library=native_library()))


def assert_same_bits(actual: np.ndarray, expected: np.ndarray) -> None:
    assert actual.shape == expected.shape
    different = np.ascontiguousarray(actual).view(np.uint8) != np.ascontiguousarray(expected).view(np.uint8)
    assert not different.any(), f"{different.sum()} of {different.size} bytes differ"


def assert_same(arm: Arm, compute: Callable[[Arm], np.ndarray]) -> None:
    assert_same_bits(compute(arm), compute(oracle()))


@cache
def rows_of(count: int, width: int, scale: float = 1.0) -> np.ndarray:
    """Rows of every size, with zeros, numbers near the smallest and groups that vanish."""
    rng = np.random.default_rng([count, width])
    x = random_rows(rng, count, width) * np.float32(scale) * np.exp(random_rows(rng, count, 1) * 3)
    x[0, : width // 3] = 0
    x[-1, width // 2 :] *= np.float32(1e-38)
    return x.astype(np.float32)


# Single operations.


@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_quantized_rows(arm: Arm, group_size: int) -> None:
    for width in (32, 100, 1000):
        for part in range(3):
            assert_same(arm, lambda on, x=rows_of(5, width), i=part: on.quantize_rows(x, group_size)[i])


@pytest.mark.parametrize("group_size", [32, 64, 128])
@pytest.mark.parametrize("bits", [4, 8])
def test_products(arm: Arm, bits: int, group_size: int) -> None:
    for rows, columns in ((17, 33), (100, 576), (16, 2000)):
        sample = random_matrix(np.random.default_rng(rows), (rows, columns), bits, group_size)
        for count in (1, 2, 3, 7, 40):
            assert_same(arm, lambda on, m=sample.packed, x=rows_of(40, columns)[:count]: on.linear(m, x))
        ids = np.array([0, rows - 1, 3], np.int32)
        assert_same(arm, lambda on, m=sample.packed, i=ids: on.dequantize_rows(m, i))


@pytest.mark.parametrize("columns", [1, 7, 31, 33, 48, 576, 1000])
def test_normalised_rows(arm: Arm, columns: int) -> None:
    weight = random_rows(np.random.default_rng(0), columns)
    assert_same(arm, lambda on: on.rms_norm(rows_of(3, columns), weight, 1e-5))


@pytest.mark.parametrize("style", ["halves", "pairs"])
@pytest.mark.parametrize("rotary_dim", [2, 20, 64, 80])
def test_rotations(arm: Arm, rotary_dim: int, style: str) -> None:
    table = random_rows(np.random.default_rng(1), 50, rotary_dim)
    x, positions = rows_of(21, 80).reshape(7, 3, 80), np.arange(7)
    assert_same(arm, lambda on: on.rope(x, positions, table, style))


@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_gates(arm: Arm, activation: str) -> None:
    for count in (1, 17, 6661):
        gate = rows_of(1, count, 5.0)[0]
        gate[:1] = -90
        assert_same(arm, lambda on, g=gate: on.gated_activation(g, g[::-1].copy(), activation))


# Attention.


def attended(arm: Arm, case: Case) -> np.ndarray:
    rows, filled = stored(case.lengths, case.kv_heads, case.head_dim, case.kind, case.gap)
    tail = tail_of(rows, case.counts)
    return arm.attention(3 * queries_of(case.heads, tail, case.head_dim), filled, tail, case.options)


@kinds
@pytest.mark.parametrize("head_dim", [8, 24, 64, 80, 128])
@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
def test_attention(arm: Arm, heads: int, kv_heads: int, head_dim: int, kind: str) -> None:
    for window in (0, 100):
        for counts in ((1, 1, 1), (9, 1, 70)):
            case = Case((300, 1, 70), counts, heads, kv_heads, head_dim, kind, window, gap=8)
            assert_same(arm, lambda on, each=case: attended(on, each))


@kinds
@pytest.mark.parametrize("window", [0, 400])
def test_attention_over_a_long_context(arm: Arm, window: int, kind: str) -> None:
    for count in (1, 7, 40):
        case = Case((LONG_CONTEXT,), (count,), 6, 2, kind=kind, window=window)
        assert_same(arm, lambda on, each=case: attended(on, each))


@kinds
@pytest.mark.parametrize("window", [0, 400])
def test_a_query_attends_alike_alone_and_among_others(arm: Arm, window: int, kind: str) -> None:
    """Whatever shares a pass over the keys: other rows of its sequence, other sequences, other heads of its group."""
    case = Case((LONG_CONTEXT,), (40,), 6, 2, kind=kind, window=window)
    together = attended(arm, case)
    rows, filled = stored(case.lengths, 2, 64, kind)
    tail = tail_of(rows, (40,))
    q = 3 * queries_of(6, tail, 64)
    for row in (0, 1, 25, 39):
        place = LONG_CONTEXT - 39 + row
        alone = replace(
            tail_of(rows, (1,)), seq_lens=np.array([place], np.int32), positions=np.array([place - 1], np.int64)
        )
        assert_same_bits(arm.attention(q[row : row + 1], filled, alone, case.options)[0], together[row])


# Whole steps.


def results(arm: Arm, family: Family, kind: str, growth: tuple[dict[int, int], ...], max_tokens: int) -> list[np.ndarray]:
    """Hidden states of every step, and the caches after the last."""
    case = scenario(family, kind, frozen(growth), max_tokens)
    caches = [layer.copy() for layer in case.empty]
    return [*arm.decoder_steps(case.spec, case.weights, caches, case.steps), *(layer.memory for layer in caches)]


@kinds
@pytest.mark.parametrize("name", FAMILIES)
def test_steps(arm: Arm, name: str, kind: str) -> None:
    actual = results(arm, FAMILIES[name], kind, STEPS, 64)
    for pair in zip(actual, results(oracle(), FAMILIES[name], kind, STEPS, 64), strict=True):
        assert_same_bits(*pair)


def cut(family: Family, counts: list[dict[int, int]], tokens: dict[int, np.ndarray]) -> tuple[Sequences, list[StepRows]]:
    """Steps in which each sequence grows by its count, by its own tokens from the first on."""
    sequences = Sequences(len(tokens), 16, 640, family.spec.num_kv_groups)
    taken = dict.fromkeys(tokens, 0)
    steps = []
    for growth in counts:
        ids = [tokens[seq][taken[seq] : taken[seq] + count] for seq, count in growth.items()]
        for seq, count in growth.items():
            taken[seq] += count
        steps.append(sequences.step(growth, token_ids=np.concatenate(ids).astype(np.int32)))
    return sequences, steps


@kinds
@pytest.mark.parametrize("name", ["llama", "windows"])
def test_a_prompt_whole_in_chunks_and_among_others(arm: Arm, name: str, kind: str) -> None:
    """Chunked prefill, draft verification and a busy server change no bit of a row."""
    family = FAMILIES[name]
    tokens = {seq: np.random.default_rng(seq).integers(0, 50, 600) for seq in range(3)}
    cuts = [
        [{0: 600}],
        [{0: 37}, {0: 300}, {0: 1}, {0: 4}, {0: 258}],
        [{1: 5, 0: 590, 2: 70}, {0: 1, 1: 1}, {2: 1, 0: 9}],
    ]
    weights = family.weights()
    found = []
    for counts in cuts:
        sequences, steps = cut(family, counts, tokens)
        shape = CacheShape(sequences.num_blocks, family.spec.num_kv_heads, 16, family.spec.head_dim, kind)
        hidden = arm.decoder_steps(family.spec, weights, [empty_cache(shape) for _ in weights.layers], steps)
        parts = []
        for growth, out in zip(counts, hidden, strict=True):
            begin = sum(count for seq, count in list(growth.items())[: list(growth).index(0)]) if 0 in growth else 0
            parts.append(out[begin : begin + growth.get(0, 0)])
        found.append(np.concatenate(parts))
    for other in found[1:]:
        assert_same_bits(other, found[0])


def test_many_threads(arm: Arm) -> None:
    """More threads than rows, heads or blocks of a product: some have nothing to do."""
    if not isinstance(arm, LibraryArm) or arm.team.num_threads > 1:
        pytest.skip("one arm of each instruction set is enough")
    family = Family(spec_of(), rotary_dim=32)
    with Team(16, arm.team.isa, library=native_library()) as team:
        for pair in zip(
            results(LibraryArm(team), family, "bfloat16", STEPS, 64),
            results(arm, family, "bfloat16", STEPS, 64),
            strict=True,
        ):
            assert_same_bits(*pair)
