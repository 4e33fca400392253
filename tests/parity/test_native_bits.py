"""Every arm gives the bits of the `generic` one, with any number of threads, in any batch, for any cut of a prompt.

The tests of the single operations compare with the reference within a tolerance; these compare with one arm exactly.
Which bits stand for what is not a number is not promised.
"""

import hashlib
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

from tests.native.arms import Arm, LibraryArm, native_library
from tests.native.cases import (
    MAX_CODE,
    CacheShape,
    Family,
    Sample,
    Sequences,
    empty_cache,
    random_matrix,
    random_rows,
    sample_of,
)
from tests.parity.test_native_attention import HEADS, Case, queries_of, stored, tail_of
from tests.parity.test_native_decoder import FAMILIES, STEPS, frozen, scenario, spec_of
from vllm_omni.model_executor.models.decoder.rope import RopeAngles, rope_angles
from vllm_omni.native.ops import Team
from vllm_omni.native.spec import KV_KINDS, DecoderWeights, LayerWeights, StepRows
from vllm_omni.quantization.packing import QuantizedMatrix

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
        x = rows_of(5, width)
        for pair in zip(arm.quantize_rows(x, group_size), oracle().quantize_rows(x, group_size), strict=True):
            assert_same_bits(*pair)


@pytest.mark.parametrize("group_size", [32, 64, 128])
@pytest.mark.parametrize("bits", [4, 8])
def test_products(arm: Arm, bits: int, group_size: int) -> None:
    for rows, columns in ((17, 33), (100, 576), (16, 2000)):
        sample = random_matrix(np.random.default_rng(rows), (rows, columns), bits, group_size)
        for count in (1, 2, 3, 7, 40):
            x = rows_of(40, columns)[:count]
            assert_same_bits(arm.linear(sample.packed, x), oracle().linear(sample.packed, x))
        ids = np.array([0, rows - 1, 3], np.int32)
        assert_same_bits(arm.dequantize_rows(sample.packed, ids), oracle().dequantize_rows(sample.packed, ids))


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


@pytest.mark.parametrize("magnitude", [1.0, 1.2079442])
def test_rope_tables(arm: Arm, magnitude: float) -> None:
    frequencies = rope_angles({"rope_theta": 5e5}, 64).frequencies
    actual = arm.rope_table(frequencies, magnitude, 3000)
    assert_same_bits(actual, oracle().rope_table(frequencies, magnitude, 3000))
    expected = RopeAngles(frequencies, magnitude).table(3000)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=2 * 2.0**-24 * magnitude)


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


def results(
    arm: Arm, family: Family, kind: str, growth: tuple[dict[int, int], ...], max_tokens: int
) -> list[np.ndarray]:
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


def cut(
    family: Family, counts: list[dict[int, int]], tokens: dict[int, np.ndarray]
) -> tuple[Sequences, list[StepRows]]:
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


# What is not a number, and what the process has set.


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("bits", [4, 8])
def test_what_is_not_a_number_stays_so(arm: Arm, bits: int, value: float) -> None:
    """A row with such a number becomes one of such numbers; the rows beside it do not change."""
    sample = random_matrix(np.random.default_rng(0), (17, 100), bits, 32)
    x = random_rows(np.random.default_rng(1), 5, 100)
    expected = arm.linear(sample.packed, x)
    x[2, 40] = value
    actual = arm.linear(sample.packed, x)
    assert not np.isfinite(actual[2]).any()
    assert_same_bits(np.delete(actual, 2, axis=0), np.delete(expected, 2, axis=0))
    assert np.isnan(arm.rms_norm(x, np.ones(100, np.float32), 1e-5)[2]).any()
    assert not np.isfinite(arm.gated_activation(x[2], x[2], "silu")[40]) or value == -np.inf


@kinds
def test_a_query_that_is_not_a_number_gives_none(arm: Arm, kind: str) -> None:
    rows, filled = stored((300,), 2, 64, kind)
    tail, options = tail_of(rows, (3,)), Case((300,), (3,), 6, 2, kind=kind).options
    q = queries_of(6, tail, 64)
    expected = arm.attention(q, filled, tail, options)
    q[1, 4, 7] = np.nan
    actual = arm.attention(q, filled, tail, options)
    assert np.isnan(actual[1, 4]).all()
    others = np.ones((3, 6), bool)
    others[1, 4] = False
    assert_same_bits(actual[others], expected[others])


def test_the_process_may_have_turned_off_subnormal_numbers(arm: Arm) -> None:
    """The core computes by its own rules, and leaves those of the caller as they were."""
    if not isinstance(arm, LibraryArm):
        pytest.skip("rules of this process are not those of the driver")
    x = rows_of(3, 100) * np.float32(1e-36)
    weight = np.full(100, 1e-3, np.float32)
    expected = arm.rms_norm(x, weight, 1.0)
    assert ((expected != 0) & (np.abs(expected) < np.finfo(np.float32).smallest_normal)).any()
    assert torch.set_flush_denormal(True)
    try:
        assert_same_bits(arm.rms_norm(x, weight, 1.0), expected)
        assert np.float32(1e-30) * np.float32(1e-10) == 0
    finally:
        torch.set_flush_denormal(False)


# The bits themselves.

# Of the logits below, for each version of the numerics. A change of the bits is a new version and a new line.
DIGESTS = {2: {"bfloat16": "b1722e1d81b4923f", "int8": "78b62099bf379f40"}}


def whole_numbers(seed: int, *shape: int) -> np.ndarray:
    """uint64 by the splitmix64 sequence: the same everywhere, with integers alone."""
    with np.errstate(over="ignore"):
        x = (np.arange(np.prod(shape), dtype=np.uint64) + np.uint64(seed << 32)) * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (x ^ (x >> np.uint64(31))).reshape(shape)


def exact_matrix(seed: int, rows: int, columns: int, bits: int, group_size: int) -> Sample:
    """Codes from whole numbers, and scales and minima that are written as their bits."""
    groups = -(-columns // group_size)
    q = (whole_numbers(seed, rows, columns) % np.uint64(MAX_CODE[bits] + 1)).astype(np.uint8)
    # Scales of 2^-7 to 2^-6 for 4 bits, of 2^-11 to 2^-10 for 8; the minimum is about half the range below zero.
    exponent = 8 if bits == 4 else 4
    mantissas = (whole_numbers(seed + 1, 2, rows, groups) % np.uint64(1024)).astype(np.uint16)
    scale = (np.uint16(exponent << 10) | mantissas[0]).view(np.float16)
    minimum = (np.uint16(0x8000 | (exponent + 3) << 10) | mantissas[1]).view(np.float16)
    return sample_of(QuantizedMatrix(q, scale, minimum, bits, group_size))


def exact_vector(seed: int, width: int) -> np.ndarray:
    """Multiples of 2^-10 from 0.5 to 1.5."""
    return (whole_numbers(seed, width) % np.uint64(1024)).astype(np.float32) / np.float32(1024) + np.float32(0.5)


def exact_layer(seed: int, window: int) -> LayerWeights[Sample]:
    sizes = {
        "q": (96, 64), "k": (48, 64), "v": (48, 64), "o": (64, 96), "gate": (80, 64), "up": (80, 64), "down": (64, 80)
    }  # fmt: skip
    matrices = {
        name: exact_matrix(seed + 2 * number, *size, 8 if name == "o" else 4, 32)
        for number, (name, size) in enumerate(sizes.items())
    }
    norms = {"input_norm": 64, "post_norm": 64, "q_norm": 24, "k_norm": 24, "o_bias": 64}
    vectors = {name: exact_vector(seed + 100 + number, width) for number, (name, width) in enumerate(norms.items())}
    rope = oracle().rope_table(rope_angles({}, 24).frequencies, 1.0, 700)
    return LayerWeights(**matrices, **vectors, rope=rope, window=window)


@kinds
def test_the_logits_have_the_bits_of_their_version(arm: Arm, kind: str) -> None:
    """Two layers over a prompt, single tokens and a second sequence, then the output layer."""
    spec = spec_of(intermediate_size=80, head_dim=24, attention_scale=0.25)
    embedding = exact_matrix(1, 50, 64, 8, 64)
    weights = DecoderWeights((exact_layer(10, 0), exact_layer(30, 100)), exact_vector(5, 64), embedding)
    sequences = Sequences(2, 16, 640)
    steps = [
        sequences.step(
            growth, token_ids=(whole_numbers(7 + number, sum(growth.values())) % np.uint64(50)).astype(np.int32)
        )
        for number, growth in enumerate([{0: 300}, {0: 1, 1: 20}, {1: 1, 0: 3}])
    ]
    shape = CacheShape(sequences.num_blocks, 2, 16, 24, kind)
    hidden = arm.decoder_steps(spec, weights, [empty_cache(shape) for _ in weights.layers], steps)
    digest = hashlib.sha256()
    for rows in hidden:
        logits = arm.linear(embedding.packed, np.ascontiguousarray(rows))
        assert np.isfinite(logits).all() and np.ptp(logits) > 1
        digest.update(logits.astype("<f4").tobytes())
    assert digest.hexdigest()[:16] == DIGESTS[native_library().numerics_version][kind]
