"""Scales and minima of groups by search: the method `rtn`, round to nearest.

A group's candidates are its range and shrunken ranges. The one with the smallest squared error, counted with scale and
minimum as float16, is refitted to the codes it gives (least squares) as long as that helps. Errors may be weighted per
column with the mean squared activation that meets it.

Groups lie along the last axis here, one element of all groups after another, so that every operation and every sum
over a group runs over contiguous memory.
"""

from dataclasses import dataclass
from functools import reduce
from itertools import product

import numpy as np

from vllm_omni.errors import WeightError
from vllm_omni.quantization.packed_format import MAX_CODES
from vllm_omni.quantization.packing import QuantizedMatrix

# Factors on a group's lowest and highest value; ends shrink independently of each other.
SHRINK_FACTORS = {4: (1.0, 0.92, 0.84, 0.76), 8: (1.0,)}
NUM_REFITS = {4: 3, 8: 1}
# A slice of about this many weights stays in a core's cache through all operations of the search.
WEIGHTS_PER_SLICE = 1 << 16
# Share of the mean importance that every column has at least.
IMPORTANCE_FLOOR = 1e-3


@dataclass
class Grid:
    """Codes' meaning for a run of groups, and its error.

    Attributes:
        scale: [groups] float32, a float16 value.
        minimum: [groups] float32, a float16 value.
        error: [groups] float32, weighted squared error.
    """

    scale: np.ndarray
    minimum: np.ndarray
    error: np.ndarray


def quantize_rtn(
    weights: np.ndarray, bits: int, group_size: int, importance: np.ndarray | None = None
) -> QuantizedMatrix:
    """Quantizes rows independently of each other.

    Args:
        weights: [rows, columns] float32. Not modified.
        bits: 4 or 8.
        group_size: 32, 64 or 128.
        importance: [columns] float32, the mean squared activation of each column; None: all alike.

    Raises:
        WeightError: A weight is not finite, or a scale or minimum is beyond float16.
    """
    rows, columns = weights.shape
    groups = -(-columns // group_size)
    q = np.empty((rows, groups * group_size), np.uint8)
    scale, minimum = (np.empty((rows, groups), np.float16) for _ in range(2))
    factors = _group_importance(importance, columns, group_size)
    rows_per_slice = max(1, WEIGHTS_PER_SLICE // (groups * group_size))
    for begin in range(0, rows, rows_per_slice):
        part = slice(begin, min(begin + rows_per_slice, rows))
        values = _grouped(weights[part], groups, group_size)
        grid = search_grid(values, bits, _tiled(factors, part.stop - part.start))
        shape = (part.stop - part.start, groups)
        scale[part], minimum[part] = grid.scale.reshape(shape), grid.minimum.reshape(shape)
        q[part] = encode(values, grid, bits).T.reshape(shape[0], -1)
    return QuantizedMatrix(np.ascontiguousarray(q[:, :columns]), scale, minimum, bits, group_size)


def search_grid(values: np.ndarray, bits: int, importance: np.ndarray | None = None) -> Grid:
    """The best scale and minimum found for each group.

    Args:
        values: [group size, groups] float32.
        bits: 4 or 8.
        importance: [group size, groups] or [group size, 1] float32, 0 or more; None: all alike.

    Raises:
        WeightError: A value is not finite, or a scale or minimum is beyond float16.
    """
    low, high = values.min(axis=0), values.max(axis=0)
    _require_storable(low, high)
    grids = (
        _measure(values, _range_grid(low, high, factors, bits), bits, importance)
        for factors in product(SHRINK_FACTORS[bits], SHRINK_FACTORS[bits])
    )
    best = reduce(_better, grids)
    for _ in range(NUM_REFITS[bits]):
        best = _better(best, _measure(values, _refit(values, best, bits, importance), bits, importance))
    return best


def encode(values: np.ndarray, grid: Grid, bits: int) -> np.ndarray:
    """[group size, groups] uint8: the nearest code of each value."""
    return _codes(values, grid, bits).astype(np.uint8)


def column_importance(mean_square: np.ndarray) -> np.ndarray:
    """Importance as the search wants it: 1 on average, and floored so that no column loses its weights."""
    mean = float(mean_square.mean())
    if mean == 0:
        return np.ones_like(mean_square)
    return np.maximum(mean_square / np.float32(mean), np.float32(IMPORTANCE_FLOOR))


def _grouped(weights: np.ndarray, groups: int, group_size: int) -> np.ndarray:
    """[rows, columns] to [group size, rows * groups]; a short last group repeats its last column."""
    missing = groups * group_size - weights.shape[1]
    if missing:
        weights = np.pad(weights, ((0, 0), (0, missing)), mode="edge")
    return np.ascontiguousarray(weights.reshape(-1, group_size).T, dtype=np.float32)


def _group_importance(importance: np.ndarray | None, columns: int, group_size: int) -> np.ndarray | None:
    """[group size, groups]; None where all columns count alike and no group is short."""
    missing = -columns % group_size
    if importance is None and not missing:
        return None
    given = np.ones(columns, np.float32) if importance is None else column_importance(importance)
    return np.pad(given, (0, missing)).reshape(-1, group_size).T


def _tiled(factors: np.ndarray | None, rows: int) -> np.ndarray | None:
    return None if factors is None else np.tile(factors, (1, rows))


def _range_grid(low: np.ndarray, high: np.ndarray, factors: tuple[float, float], bits: int) -> Grid:
    """Over the range with its ends drawn towards zero, or towards its inner end where zero lies outside."""
    pivot = np.clip(np.float32(0), low, high)
    start, end = (
        pivot + np.float32(factor) * (bound - pivot) for factor, bound in zip(factors, (low, high), strict=True)
    )
    return _rounded((end - start) / MAX_CODES[bits], start)


def _rounded(scale: np.ndarray, minimum: np.ndarray) -> Grid:
    scale, minimum = (array.astype(np.float16).astype(np.float32) for array in (scale, minimum))
    return Grid(scale, minimum, np.full(scale.shape, np.inf, np.float32))


def _codes(values: np.ndarray, grid: Grid, bits: int) -> np.ndarray:
    """The nearest codes as float32; 0 where the scale is 0."""
    inverse = np.divide(1.0, grid.scale, out=np.zeros_like(grid.scale), where=grid.scale != 0)
    codes = values - grid.minimum
    codes *= inverse
    np.rint(codes, out=codes)
    return np.clip(codes, 0, MAX_CODES[bits], out=codes)


def _measure(values: np.ndarray, grid: Grid, bits: int, importance: np.ndarray | None) -> Grid:
    """The same grid with its error."""
    difference = _codes(values, grid, bits)
    difference *= grid.scale
    difference += grid.minimum
    difference -= values
    difference *= difference
    if importance is not None:
        difference *= importance
    return Grid(grid.scale, grid.minimum, difference.sum(axis=0))


def _refit(values: np.ndarray, grid: Grid, bits: int, importance: np.ndarray | None) -> Grid:
    """Scale and minimum with the least squared error for the codes that `grid` gives."""
    codes = _codes(values, grid, bits)
    # Relative to the old minimum, so that the sums lose nothing to cancellation.
    rest = values - grid.minimum
    weighted = codes if importance is None else codes * importance
    total = np.float32(len(values)) if importance is None else np.broadcast_to(importance, values.shape).sum(axis=0)
    sum_q, sum_qq, sum_qr = weighted.sum(axis=0), (weighted * codes).sum(axis=0), (weighted * rest).sum(axis=0)
    sum_r = rest.sum(axis=0) if importance is None else (rest * importance).sum(axis=0)
    spread = total * sum_qq - sum_q * sum_q
    is_solvable = spread > 1e-5 * total * sum_qq
    slope = np.divide(total * sum_qr - sum_q * sum_r, spread, out=grid.scale.copy(), where=is_solvable)
    slope = slope.astype(np.float16).astype(np.float32)
    return _rounded(slope, grid.minimum + (sum_r - slope * sum_q) / total)


def _better(first: Grid, second: Grid) -> Grid:
    is_better = second.error < first.error
    return Grid(
        np.where(is_better, second.scale, first.scale),
        np.where(is_better, second.minimum, first.minimum),
        np.where(is_better, second.error, first.error),
    )


def _require_storable(low: np.ndarray, high: np.ndarray) -> None:
    largest = np.finfo(np.float16).max
    # False for values that are not numbers, too.
    if not ((low >= -largest) & (high <= largest)).all():
        raise WeightError(
            f"it holds weights from {low.min():g} to {high.max():g}, accepted: finite, within {largest:g} (float16); "
            "the checkpoint is damaged"
        )
