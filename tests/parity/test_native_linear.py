"""Products, quantized activations and dequantized weights: every arm against the reference."""

from functools import cache

import numpy as np
import pytest

from tests.native.arms import Arm
from tests.native.cases import MAX_CODE, Sample, random_matrix, random_rows, sample_of
from vllm_omni.native.reference import (
    dequantize_panel_ref,
    dequantize_rows_ref,
    linear_terms_ref,
    quantize_rows_ref,
)
from vllm_omni.quantization.packing import QuantizedMatrix

ROWS = (1, 15, 16, 17, 100)
COLUMNS = (32, 33, 96, 576, 1000)
ALL_BATCHES = (*range(1, 34), 70)
SOME_BATCHES = (1, 2, 3, 4, 5, 32, 70)
FORMATS = [(bits, group_size) for bits in (4, 8) for group_size in (32, 64, 128)]
FLOAT32_UNIT = 2.0**-24

formats = pytest.mark.parametrize(("bits", "group_size"), FORMATS)
columns_of_a_row = pytest.mark.parametrize("columns", COLUMNS)


@cache
def matrix_of(rows: int, columns: int, bits: int, group_size: int) -> Sample:
    rng = np.random.default_rng([rows, columns, bits, group_size])
    return random_matrix(rng, (rows, columns), bits, group_size)


@cache
def inputs_of(columns: int) -> np.ndarray:
    return random_rows(np.random.default_rng(columns), max(ALL_BATCHES), columns)


@cache
def expected_of(rows: int, columns: int, bits: int, group_size: int) -> tuple[np.ndarray, np.ndarray]:
    return product_of(matrix_of(rows, columns, bits, group_size), inputs_of(columns))


def product_of(sample: Sample, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The product in float64, and how far an order of float32 sums may be from it.

    Each of 2 terms per group takes at most 3 roundings, and each of as many additions one; a rounding is half a unit in
    the last place of at most the sum of the terms' magnitudes. Arms may take codes of 8 bits about their middle, 127.
    """
    terms = linear_terms_ref(x, sample.unpacked)
    magnitude = np.abs(terms).sum(axis=(0, 1))
    if sample.unpacked.bits == 8:
        _, _, s = quantize_rows_ref(x, sample.unpacked.group_size)
        magnitude += 127 * np.abs(s).astype(np.float64) @ np.abs(sample.unpacked.scale).astype(np.float64).T
    return terms.sum(axis=(0, 1)), (2 * terms.shape[1] + 4) * FLOAT32_UNIT * magnitude + 1e-30


def assert_within(actual: np.ndarray, expected: np.ndarray, tolerance: np.ndarray) -> None:
    assert actual.shape == expected.shape
    assert np.isfinite(actual).all()
    excess = np.abs(actual - expected) - tolerance
    worst = np.unravel_index(excess.argmax(), excess.shape)
    assert excess[worst] <= 0, f"at {worst}: {actual[worst]}, expected {expected[worst]} +- {tolerance[worst]}"


@formats
@columns_of_a_row
def test_a_product_of_any_shape(arm: Arm, columns: int, bits: int, group_size: int) -> None:
    for rows in ROWS:
        sample = matrix_of(rows, columns, bits, group_size)
        expected, tolerance = expected_of(rows, columns, bits, group_size)
        for count in ALL_BATCHES if columns < 100 else SOME_BATCHES:
            actual = arm.linear(sample.packed, inputs_of(columns)[:count])
            assert_within(actual, expected[:count], tolerance[:count])


@formats
def test_a_row_gives_the_same_bits_alone_and_among_many(arm: Arm, bits: int, group_size: int) -> None:
    """Many rows are computed from unpacked weights, in parts of a row block's columns and of the rows."""
    sample = matrix_of(17, 1000, bits, group_size)
    x = random_rows(np.random.default_rng(0), 140, 1000)
    together = arm.linear(sample.packed, x)
    for row in (0, 3, 11, 127, 128, 139):
        np.testing.assert_array_equal(arm.linear(sample.packed, x[row : row + 1])[0], together[row])


@pytest.mark.parametrize(("rows", "columns", "count"), [(1601, 1000, 40), (40, 30000, 45)])
def test_long_parts_and_wide_rows_give_the_same_bits(arm: Arm, rows: int, columns: int, count: int) -> None:
    """Parts are taken in several turns, also by others; a row block may exceed a turn; rows go in several passes."""
    sample = random_matrix(np.random.default_rng(rows), (rows, columns), 4, 32)
    x = random_rows(np.random.default_rng(0), count, columns)
    together = arm.linear(sample.packed, x)
    expected, tolerance = product_of(sample, x[[0, count - 1]])
    assert_within(together[[0, count - 1]], expected, tolerance)
    for row in (0, 17, count - 1):
        np.testing.assert_array_equal(arm.linear(sample.packed, x[row : row + 1])[0], together[row])


def test_a_row_that_is_no_number_spoils_no_other(arm: Arm) -> None:
    sample = matrix_of(17, 96, 4, 32)
    x = inputs_of(96)[:13].copy()
    x[5, 3] = np.nan
    expected, tolerance = expected_of(17, 96, 4, 32)
    actual = arm.linear(sample.packed, x)
    assert np.isnan(actual[5]).all()
    others = [row for row in range(13) if row != 5]
    assert_within(actual[others], expected[others], tolerance[others])


@formats
def test_the_largest_codes_and_activations_do_not_overflow(arm: Arm, bits: int, group_size: int) -> None:
    """Sums of products in 16 bits would saturate: 254 * 127 * 2 is twice what they hold."""
    shape, groups = (17, 300), -(-300 // group_size)
    q = np.full(shape, MAX_CODE[bits], np.uint8)
    scale, minimum = np.full((17, groups), 0.01, np.float16), np.full((17, groups), -0.5, np.float16)
    sample = sample_of(QuantizedMatrix(q, scale, minimum, bits, group_size))
    signs = np.random.default_rng(0).choice([-1.0, 1.0], (4, 300))
    x = np.concatenate([np.ones((1, 300)), -np.ones((1, 300)), signs]).astype(np.float32)
    expected, tolerance = product_of(sample, x)
    assert_within(arm.linear(sample.packed, x), expected, tolerance)


@formats
def test_zero_rows_give_zeros(arm: Arm, bits: int, group_size: int) -> None:
    sample = matrix_of(17, 96, bits, group_size)
    x = inputs_of(96)[:3].copy()
    x[1] = 0
    assert not arm.linear(sample.packed, x)[1].any()


@formats
def test_subnormal_scales_and_large_activations(arm: Arm, bits: int, group_size: int) -> None:
    unpacked = matrix_of(16, 96, bits, group_size).unpacked
    tiny = QuantizedMatrix(unpacked.q, np.full_like(unpacked.scale, 3e-7), unpacked.minimum, bits, group_size)
    sample = sample_of(tiny)
    x = inputs_of(96)[:5] * np.float32(1e20)
    expected, tolerance = product_of(sample, x)
    assert_within(arm.linear(sample.packed, x), expected, tolerance)


@pytest.mark.parametrize("group_size", (32, 64, 128))
@columns_of_a_row
def test_activations_are_quantized_to_the_same_bits(arm: Arm, columns: int, group_size: int) -> None:
    x = inputs_of(columns)[:7].copy()
    x[2, : columns // 2] = 0
    x[3] = 0
    for name, actual, expected in zip(
        "pas", arm.quantize_rows(x, group_size), quantize_rows_ref(x, group_size), strict=True
    ):
        np.testing.assert_array_equal(actual, expected, err_msg=name)


def test_halves_of_activations_go_to_the_even_integer(arm: Arm) -> None:
    x = np.zeros((1, 32), np.float32)
    x[0, :7] = [127, 0.5, 1.5, 2.5, -0.5, -1.5, 126.5]
    p, a, s = arm.quantize_rows(x, 32)
    assert p[0, :8].tolist() == [127, 0, 2, 2, 0, -2, 126, 0]
    assert (a[0, 0], s[0, 0]) == (1, 127 + 0 + 2 + 2 + 0 - 2 + 126)


@formats
@columns_of_a_row
def test_rows_are_dequantized_to_the_same_bits(arm: Arm, columns: int, bits: int, group_size: int) -> None:
    for rows in ROWS:
        sample = matrix_of(rows, columns, bits, group_size)
        ids = np.array([rows - 1, 0, rows // 2, rows - 1], np.int32)
        expected = dequantize_rows_ref(sample.unpacked, ids)
        np.testing.assert_array_equal(arm.dequantize_rows(sample.packed, ids), expected)


@formats
@columns_of_a_row
def test_panels_are_dequantized_to_the_same_bits(arm: Arm, columns: int, bits: int, group_size: int) -> None:
    for rows, begin, count in ((1, 0, 1), (17, 0, 17), (100, 15, 18), (100, 99, 1), (16, 3, 0)):
        sample = matrix_of(rows, columns, bits, group_size)
        expected = dequantize_panel_ref(sample.unpacked, begin, count)
        np.testing.assert_array_equal(arm.dequantize_panel(sample.packed, begin, count), expected)
