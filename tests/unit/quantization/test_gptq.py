import numpy as np
import pytest

from vllm_omni.quantization import gptq
from vllm_omni.quantization.gptq import DAMPING_RATIO, prepare_compensation, quantize_gptq
from vllm_omni.quantization.grid_search import quantize_rtn
from vllm_omni.quantization.packing import dequantize


def activations(tokens: int, columns: int) -> np.ndarray:
    """Inputs that are correlated between columns, as those of a real layer are."""
    rng = np.random.default_rng(1)
    mixing = rng.standard_normal((columns // 4, columns)) + 0.2 * rng.standard_normal((1, columns))
    noise = 0.3 * rng.standard_normal((tokens, columns))
    return (rng.standard_normal((tokens, columns // 4)) @ mixing + noise).astype(np.float32)


def normal(rows: int, columns: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal((rows, columns)).astype(np.float32)


def output_error(x: np.ndarray, weights: np.ndarray, values: np.ndarray) -> float:
    return float(np.square(x @ (weights - values).T).sum())


@pytest.mark.parametrize("columns", [64, 100, 300])
@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_outputs_are_nearer_than_with_rounding(columns: int, group_size: int) -> None:
    x, weights = activations(600, columns), normal(40, columns)
    moments = x.T @ x / len(x)
    compensated = dequantize(quantize_gptq(weights, 4, group_size, prepare_compensation(moments)))
    weighted = dequantize(quantize_rtn(weights, 4, group_size, moments.diagonal()))
    assert output_error(x, weights, compensated) < 0.6 * output_error(x, weights, weighted)
    fresh = activations(700, columns)[600:]
    assert output_error(fresh, weights, compensated) < output_error(fresh, weights, weighted)


def test_without_correlation_it_is_weighted_rounding() -> None:
    weights = normal(20, 160)
    moments = np.random.default_rng(2).uniform(0.5, 2.0, 160).astype(np.float32)
    compensated = quantize_gptq(weights, 4, 32, prepare_compensation(np.diag(moments)))
    rounded = quantize_rtn(weights, 4, 32, moments)
    np.testing.assert_array_equal(compensated.q, rounded.q)
    np.testing.assert_array_equal(compensated.scale, rounded.scale)
    np.testing.assert_array_equal(compensated.minimum, rounded.minimum)


@pytest.mark.parametrize("order", [5, 300])
def test_the_factor_is_that_of_the_inverse(order: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gptq, "MIN_SPLIT_ORDER", 64)
    x = activations(2 * order + 20, order)
    hessian = x.T @ x
    factor = prepare_compensation(hessian).factor.astype(np.float64)
    damped = hessian + DAMPING_RATIO * hessian.diagonal().mean() * np.eye(order)
    np.testing.assert_allclose(factor.T @ factor @ damped, np.eye(order), atol=1e-3)
    assert (np.tril(factor, -1) == 0).all()


def test_rows_are_independent() -> None:
    x, weights = activations(300, 96), normal(37, 96)
    compensation = prepare_compensation(x.T @ x)
    whole = quantize_gptq(weights, 4, 32, compensation)
    part = quantize_gptq(weights[16:32], 4, 32, compensation)
    np.testing.assert_array_equal(whole.q[16:32], part.q)


def test_fewer_tokens_than_columns_are_enough() -> None:
    x, weights = activations(20, 128), normal(8, 128)
    values = dequantize(quantize_gptq(weights, 4, 64, prepare_compensation(x.T @ x)))
    assert output_error(x, weights, values) < output_error(x, weights, dequantize(quantize_rtn(weights, 4, 64)))


def test_inputs_that_never_occur_are_rounded() -> None:
    weights = normal(8, 64)
    values = dequantize(quantize_gptq(weights, 4, 64, prepare_compensation(np.zeros((64, 64), np.float32))))
    np.testing.assert_array_equal(values, dequantize(quantize_rtn(weights, 4, 64)))


def test_inputs_are_kept() -> None:
    x, weights = activations(100, 64), normal(8, 64)
    moments, before = x.T @ x, weights.copy()
    moments_before = moments.copy()
    quantize_gptq(weights, 4, 64, prepare_compensation(moments))
    np.testing.assert_array_equal(weights, before)
    np.testing.assert_array_equal(moments, moments_before)
