import numpy as np
import pytest

from vllm_omni.errors import WeightError
from vllm_omni.quantization import grid_search
from vllm_omni.quantization.grid_search import quantize_rtn
from vllm_omni.quantization.packed_format import MAX_CODES
from vllm_omni.quantization.packing import QuantizedMatrix, dequantize

KINDS = [(bits, group_size) for bits in (4, 8) for group_size in (32, 64, 128)]


def normal(rows: int, columns: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float32)


def range_ref(weights: np.ndarray, bits: int, group_size: int) -> np.ndarray:
    """Plain rounding between the least and the greatest value of each group, in float64."""
    result = np.empty_like(weights)
    for begin in range(0, weights.shape[1], group_size):
        part = weights[:, begin : begin + group_size].astype(np.float64)
        low, high = part.min(axis=1, keepdims=True), part.max(axis=1, keepdims=True)
        scale = (high - low) / MAX_CODES[bits]
        result[:, begin : begin + group_size] = np.rint((part - low) / scale) * scale + low
    return result


def squared_error(weights: np.ndarray, values: np.ndarray) -> float:
    return float(np.square(weights.astype(np.float64) - values).sum())


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("shape", [(5, 256), (3, 100), (1, 31)], ids=str)
def test_codes_are_the_nearest_and_in_range(shape: tuple[int, int], kind: tuple[int, int]) -> None:
    weights = normal(*shape)
    matrix = quantize_rtn(weights, *kind)
    assert matrix.q.shape == shape
    assert matrix.q.max() <= MAX_CODES[kind[0]]
    error = np.abs(dequantize(matrix) - weights)
    for step in (-1, 1):
        q = np.clip(matrix.q.astype(int) + step, 0, MAX_CODES[kind[0]]).astype(np.uint8)
        other = dequantize(QuantizedMatrix(q, matrix.scale, matrix.minimum, *kind))
        assert (error <= np.abs(other - weights) + 1e-5).all()


@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_the_search_beats_the_range(group_size: int) -> None:
    weights = normal(64, 512)
    searched = squared_error(weights, dequantize(quantize_rtn(weights, 4, group_size)))
    assert searched < 0.9 * squared_error(weights, range_ref(weights, 4, group_size))


def test_eight_bits_lose_little() -> None:
    weights = normal(8, 256)
    assert squared_error(weights, dequantize(quantize_rtn(weights, 8, 64))) < 1e-4 * float(np.square(weights).sum())


@pytest.mark.parametrize("bits", [4, 8])
def test_values_on_a_grid_come_back(bits: int) -> None:
    rng = np.random.default_rng(3)
    q = rng.integers(0, MAX_CODES[bits] + 1, (7, 128), dtype=np.uint8)
    q[:, ::64], q[:, 1::64] = 0, MAX_CODES[bits]
    scale = (rng.integers(1, 64, (7, 2)) / 256).astype(np.float16)
    minimum = (rng.integers(-64, 64, (7, 2)) / 32).astype(np.float16)
    weights = dequantize(QuantizedMatrix(q, scale, minimum, bits, 64))
    np.testing.assert_array_equal(dequantize(quantize_rtn(weights, bits, 64)), weights)


def test_importance_moves_the_error_to_other_columns() -> None:
    weights = normal(32, 128)
    importance = np.where(np.arange(128) % 8 == 0, 100.0, 1.0).astype(np.float32)
    plain, weighted = (dequantize(quantize_rtn(weights, 4, 64, each)) for each in (None, importance))

    def loss(values: np.ndarray) -> float:
        return float((np.square(weights - values) * importance).sum())

    assert loss(weighted) < 0.95 * loss(plain)
    assert squared_error(weights, plain) < squared_error(weights, weighted)


def test_equal_importance_changes_nothing() -> None:
    weights = normal(4, 128)
    importance = np.full(128, 1.0, np.float32)
    np.testing.assert_array_equal(quantize_rtn(weights, 4, 64, importance).q, quantize_rtn(weights, 4, 64).q)


def test_unused_columns_keep_sensible_weights() -> None:
    weights = normal(4, 64)
    matrix = quantize_rtn(weights, 4, 64, np.zeros(64, np.float32))
    assert squared_error(weights, dequantize(matrix)) < 0.02 * float(np.square(weights).sum())


def test_constant_groups_are_their_minimum() -> None:
    weights = np.repeat(np.array([[0.0], [1.5], [-3.0]], np.float32), 40, axis=1)
    matrix = quantize_rtn(weights, 4, 32)
    np.testing.assert_array_equal(dequantize(matrix), weights)


def test_rows_are_independent_of_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = normal(50, 96)
    whole = quantize_rtn(weights, 4, 32)
    monkeypatch.setattr(grid_search, "WEIGHTS_PER_SLICE", 7 * 96)
    sliced = quantize_rtn(weights, 4, 32)
    np.testing.assert_array_equal(whole.q, sliced.q)
    np.testing.assert_array_equal(whole.scale, sliced.scale)


def test_the_input_is_kept() -> None:
    weights = normal(4, 70)
    before = weights.copy()
    quantize_rtn(weights, 4, 32)
    np.testing.assert_array_equal(weights, before)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e6])
def test_values_that_float16_cannot_hold_are_refused(value: float) -> None:
    weights = normal(2, 64)
    weights[1, 5] = value
    with pytest.raises(WeightError, match=r"accepted: finite, within 65504"):
        quantize_rtn(weights, 4, 64)
