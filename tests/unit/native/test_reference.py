"""The reference against arithmetic by hand and against plainer definitions."""

import math
from dataclasses import replace

import numpy as np
import pytest

from tests.native.cases import (
    UNWRITTEN,
    CacheShape,
    Family,
    Sequences,
    Weights,
    empty_cache,
    random_matrix,
    random_rows,
    rope_table,
    unpacked_weights,
    written_bytes,
)
from vllm_omni.errors import EngineError
from vllm_omni.native.reference import (
    AttentionOptions,
    attention_ref,
    bfloat16_ref,
    dequantize_rows_ref,
    from_bfloat16_ref,
    gated_activation_ref,
    linear_ref,
    quantize_rows_ref,
    rms_norm_ref,
    rope_ref,
    store_kv_ref,
    stored_kv_ref,
)
from vllm_omni.native.reference_decoder import decoder_ref
from vllm_omni.native.spec import DecoderSpec, kv_cell_bytes


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


# Matrix products.


def test_activations_by_hand() -> None:
    x = np.zeros((1, 40), np.float32)
    x[0, :4], x[0, 32:35] = [2.54, -1.27, 0.01, 0.03], [-127, 63.5, 64.5]
    p, a, s = quantize_rows_ref(x, 32)
    assert p.shape == (1, 64)
    assert p[0, :4].tolist() == [127, -64, 0, 2] or p[0, :4].tolist() == [127, -63, 0, 2]
    assert p[0, 32:35].tolist() == [-127, 64, 64]
    assert a[0].tolist() == [np.float32(2.54) / np.float32(127), 1]
    assert s[0, 1] == 1


def test_a_product_is_the_sum_over_dequantized_numbers(rng: np.random.Generator) -> None:
    matrix = random_matrix(rng, (9, 100), 4, 64).unpacked
    x = random_rows(rng, 3, 100)
    p, a, _ = quantize_rows_ref(x, 64)
    rounded = (p.reshape(3, 2, 64) * a[:, :, None]).reshape(3, 128)[:, :100]
    weights = dequantize_rows_ref(matrix, np.arange(9, dtype=np.int32))
    np.testing.assert_allclose(linear_ref(x, matrix), rounded @ weights.T, rtol=0, atol=1e-5)


def test_a_product_is_near_that_of_the_weights(rng: np.random.Generator) -> None:
    matrix = random_matrix(rng, (9, 256), 8, 32).unpacked
    x = random_rows(rng, 3, 256)
    weights = dequantize_rows_ref(matrix, np.arange(9, dtype=np.int32))
    np.testing.assert_allclose(linear_ref(x, matrix), x @ weights.T, rtol=0, atol=0.05)


def test_dequantized_rows_by_hand(rng: np.random.Generator) -> None:
    matrix = random_matrix(rng, (3, 33), 8, 32).unpacked
    for row, column in ((0, 0), (2, 31), (1, 32)):
        scale, minimum = (np.float32(values[row, column // 32]) for values in (matrix.scale, matrix.minimum))
        expected = scale * np.float32(matrix.q[row, column]) + minimum
        assert dequantize_rows_ref(matrix, np.array([row]))[0, column] == expected


@pytest.mark.parametrize(
    ("number", "bits"),
    [(1.0, 0x3F80), (1 + 2**-8, 0x3F80), (1 + 3 * 2**-8, 0x3F82), (-2.0, 0xC000), (math.inf, 0x7F80), (3.4e38, 0x7F80)],
)
def test_bfloat16_by_hand(number: float, bits: int) -> None:
    assert bfloat16_ref(np.array([number], np.float32)).tolist() == [bits]


def test_bfloat16_keeps_what_it_can_hold() -> None:
    bits = np.arange(0x7F80, dtype=np.uint16)
    np.testing.assert_array_equal(bfloat16_ref(from_bfloat16_ref(bits)), bits)
    assert np.isnan(from_bfloat16_ref(bfloat16_ref(np.array([np.nan], np.float32)))).all()


# Vectors.


def test_rms_norm_by_hand() -> None:
    x, weight = np.array([[3, 4]], np.float32), np.array([1, 2], np.float32)
    np.testing.assert_allclose(rms_norm_ref(x, weight, 0.5), [[3 / math.sqrt(13), 8 / math.sqrt(13)]], rtol=1e-6)


@pytest.mark.parametrize(("style", "partner"), [("halves", 2), ("pairs", 1)])
def test_rope_turns_partners_by_the_angle(style: str, partner: int) -> None:
    table = rope_table(10, 4, theta=100.0)
    x = np.zeros((1, 1, 6), np.float32)
    x[0, 0, 0], x[0, 0, 4:] = 1, 7
    out = rope_ref(x, np.array([3]), table, style)
    expected = np.zeros(6)
    expected[0], expected[partner], expected[4:] = math.cos(3), math.sin(3), 7
    np.testing.assert_allclose(out[0, 0], expected, rtol=0, atol=1e-6)


def test_gates_by_hand() -> None:
    gate, up = np.array([1, -2], np.float32), np.array([10, 1], np.float32)
    silu = [10 / (1 + math.exp(-1)), -2 / (1 + math.exp(2))]
    gelu = [5 * (1 + math.erf(1 / math.sqrt(2))), -(1 + math.erf(-2 / math.sqrt(2)))]
    np.testing.assert_allclose(gated_activation_ref(gate, up, "silu"), silu, rtol=1e-6)
    np.testing.assert_allclose(gated_activation_ref(gate, up, "gelu"), gelu, rtol=1e-6)


# Keys, values, attention.


@pytest.mark.parametrize(("kind", "size", "error"), [("bfloat16", 128, 2**-8), ("int8", 72, 1 / 254)])
def test_stored_numbers_come_back(rng: np.random.Generator, kind: str, size: int, error: float) -> None:
    assert kv_cell_bytes(32, kind) == size
    cache = empty_cache(CacheShape(3, 2, 16, 32, kind))
    k, v = random_rows(rng, 5, 2, 32), random_rows(rng, 5, 2, 32)
    slots = np.array([32, 33, -1, 47, 16])
    store_kv_ref(cache, k, v, slots)
    keys, values = stored_kv_ref(cache, slots[slots >= 0])
    kept = [0, 1, 3, 4]
    for actual, expected in ((keys, k[kept]), (values, v[kept])):
        assert (np.abs(actual - expected) <= error * np.abs(expected).max(axis=2, keepdims=True)).all()
    assert (cache.memory[~written_bytes(cache, slots)] == UNWRITTEN).all()
    assert written_bytes(cache, slots).sum() == 4 * 2 * size


@pytest.mark.parametrize("window", [0, 5])
def test_attention_is_a_masked_softmax(rng: np.random.Generator, window: int) -> None:
    sequences = Sequences(2, 16, 48)
    rows = sequences.step({0: 37, 1: 3})
    cache = empty_cache(CacheShape(sequences.num_blocks, 2, 16, 8, "bfloat16"))
    q, k, v = random_rows(rng, 40, 4, 8), random_rows(rng, 40, 2, 8), random_rows(rng, 40, 2, 8)
    k, v = (from_bfloat16_ref(bfloat16_ref(x)) for x in (k, v))
    store_kv_ref(cache, k, v, rows.slots[0])
    actual = attention_ref(q, cache, rows, AttentionOptions(0.5, window))
    row, key = np.indices((40, 40))
    seen = (key <= row) & ((row < 37) == (key < 37)) & ((window == 0) | (key > row - window))
    for head in range(4):
        scores = np.where(seen, 0.5 * q[:, head] @ k[:, head // 2].T, -np.inf)
        weights = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
        np.testing.assert_allclose(actual[:, head], weights @ v[:, head // 2], rtol=0, atol=1e-5)


# The layer stack.

SPEC = DecoderSpec(
    hidden_size=64, intermediate_size=96, num_heads=4, num_kv_heads=2, head_dim=16, max_position=50, norm_eps=1e-5,
    attention_scale=0.25,
)  # fmt: skip


def test_a_step_needs_tokens_or_inputs() -> None:
    weights = unpacked_weights(Family(SPEC, rotary_dim=16, vocabulary=None).weights())
    rows = Sequences(1, 16, 32).step({0: 1})
    with pytest.raises(EngineError, match="token_ids or inputs"):
        decoder_ref(SPEC, weights, [], rows)
    with pytest.raises(EngineError, match="has no embedding"):
        decoder_ref(SPEC, weights, [], Sequences(1, 16, 32).step({0: 1}, token_ids=np.array([1], np.int32)))


def test_tokens_one_by_one_give_what_they_give_together() -> None:
    weights = unpacked_weights(Family(SPEC, rotary_dim=16, has_qk_norm=True, windows=(0, 3)).weights())
    tokens = np.array([5, 7, 1, 30, 2], np.int32)

    def run(*counts: int) -> np.ndarray:
        sequences, out, begin = Sequences(1, 16, 32), [], 0
        shape = CacheShape(sequences.num_blocks, 2, 16, 16, "bfloat16")
        caches = [empty_cache(shape) for _ in weights.layers]
        for count in counts:
            rows = sequences.step({0: count}, token_ids=tokens[begin : begin + count])
            out.append(decoder_ref(SPEC, weights, caches, rows))
            begin += count
        return np.concatenate(out)

    np.testing.assert_allclose(run(1, 1, 1, 1, 1), run(5), rtol=0, atol=1e-6)


FULL = Family(SPEC, rotary_dim=16, has_qk_norm=True, has_qkv_bias=True, has_o_bias=True, has_head_gate=True).weights()


@pytest.mark.parametrize("name", ["q_norm", "k_norm", "q_bias", "k_bias", "v_bias", "o_bias", "head_gate"])
def test_every_optional_weight_counts(name: str) -> None:
    layers = tuple(replace(layer, **{name: None}) for layer in FULL.layers)  # type: ignore[arg-type]
    assert difference_from_full(replace(FULL, layers=layers)) > 0.01


@pytest.mark.parametrize("change", [{"window": 2}, {"rope": rope_table(50, 8)}, {"rope": rope_table(50, 16, 50.0)}])
def test_windows_and_rotations_count(change: dict[str, object]) -> None:
    layers = tuple(replace(layer, **change) for layer in FULL.layers)  # type: ignore[arg-type]
    assert difference_from_full(replace(FULL, layers=layers)) > 0.01


def difference_from_full(weights: Weights) -> float:
    """Largest difference in the last of five rows."""
    return float(np.abs(last_row(weights) - last_row(FULL)).max())


def last_row(weights: Weights) -> np.ndarray:
    sequences = Sequences(1, 16, 32)
    caches = [empty_cache(CacheShape(sequences.num_blocks, 2, 16, 16, "bfloat16")) for _ in weights.layers]
    rows = sequences.step({0: 5}, token_ids=np.array([5, 7, 1, 30, 2], np.int32))
    return decoder_ref(SPEC, unpacked_weights(weights), caches, rows)[-1]
