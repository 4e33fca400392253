"""Error-compensated quantization: the method `gptq`.

Columns are rounded one after another, and what rounding a column changes in the layer's output is made up for by the
columns still to come, as far as the calibration activations allow. Follows Frantar et al., "GPTQ: Accurate
Post-Training Quantization for Generative Pre-trained Transformers" (2022), algorithm 1. Here the grid of a group is
searched on its compensated columns, weighted by the Hessian's diagonal.
"""

from dataclasses import dataclass

import numpy as np

from vllm_omni.quantization.grid_search import Grid, column_importance, encode, search_grid
from vllm_omni.quantization.packing import QuantizedMatrix

# Added to the Hessian's diagonal, as a share of its mean: keeps the factorization stable with few tokens.
DAMPING_RATIO = 0.01
# Columns whose updates are applied to the rest in one product; a multiple of every group size.
COLUMNS_PER_BLOCK = 128
# Below this order a triangle is inverted in one call.
MIN_SPLIT_ORDER = 256


@dataclass(frozen=True)
class Compensation:
    """What a linear layer's activations say about its columns.

    Attributes:
        factor: [columns, columns] float32, upper triangle U with inverse(Hessian) = transpose(U) U.
        importance: [columns] float32, for the search of grids.
    """

    factor: np.ndarray
    importance: np.ndarray


def prepare_compensation(hessian: np.ndarray) -> Compensation:
    """Factorizes a Hessian.

    Args:
        hessian: [columns, columns] float32, transpose(X) X over the calibration tokens, by any factor. Not modified.
    """
    diagonal = hessian.diagonal().copy()
    damped = hessian.astype(np.float64)
    # Where no activation was ever met, any curvature does: the column takes part in no compensation.
    damping = DAMPING_RATIO * float(diagonal.mean()) or 1.0
    damped[np.diag_indices_from(damped)] += damping
    # With rows and columns reversed, the inverse of the lower factor is the wanted upper one.
    lower = np.linalg.cholesky(damped[::-1, ::-1])
    factor = _invert_lower(lower)[::-1, ::-1]
    return Compensation(np.ascontiguousarray(factor, dtype=np.float32), column_importance(diagonal))


def quantize_gptq(weights: np.ndarray, bits: int, group_size: int, compensation: Compensation) -> QuantizedMatrix:
    """Quantizes rows independently of each other, columns in order.

    Args:
        weights: [rows, columns] float32. Not modified.
        bits: 4 or 8.
        group_size: 32, 64 or 128.
        compensation: Of the activations that the matrix meets.

    Raises:
        WeightError: A weight is not finite, or a scale or minimum is beyond float16.
    """
    rows, columns = weights.shape
    # A column of weights is a row here: contiguous.
    rest = np.array(weights.T, dtype=np.float32, order="C")
    q = np.empty((columns, rows), np.uint8)
    grids: list[Grid] = []
    for begin in range(0, columns, COLUMNS_PER_BLOCK):
        end = min(begin + COLUMNS_PER_BLOCK, columns)
        block = _Block(rest[begin:end], compensation.factor[begin:end, begin:end], q[begin:end])
        grids += block.quantize(bits, group_size, compensation.importance[begin:end])
        rest[end:] -= compensation.factor[begin:end, end:].T @ block.errors
    scale = np.stack([grid.scale for grid in grids], axis=1).astype(np.float16)
    minimum = np.stack([grid.minimum for grid in grids], axis=1).astype(np.float16)
    return QuantizedMatrix(np.ascontiguousarray(q.T), scale, minimum, bits, group_size)


class _Block:
    """The columns of one lazy update.

    Attributes:
        values: [columns, rows] float32, changed in place.
        factor: [columns, columns] float32, the block on the factor's diagonal.
        q: [columns, rows] uint8, filled.
        errors: [columns, rows] float32, what later columns have to make up for.
    """

    def __init__(self, values: np.ndarray, factor: np.ndarray, q: np.ndarray):
        self.values = values
        self.factor = factor
        self.q = q
        self.errors = np.empty_like(values)

    def quantize(self, bits: int, group_size: int, importance: np.ndarray) -> list[Grid]:
        """Fills `q` and `errors`; the grids of the block's groups."""
        grids = []
        for begin in range(0, len(self.values), group_size):
            group = slice(begin, min(begin + group_size, len(self.values)))
            grid = search_grid(self.values[group], bits, importance[group, None])
            for column in range(group.start, group.stop):
                self._quantize_column(column, grid, bits)
            grids.append(grid)
        return grids

    def _quantize_column(self, column: int, grid: Grid, bits: int) -> None:
        values = self.values[column]
        codes = encode(values[None], grid, bits)[0]
        self.q[column] = codes
        error = (values - (grid.scale * codes + grid.minimum)) / self.factor[column, column]
        self.errors[column] = error
        self.values[column + 1 :] -= np.outer(self.factor[column, column + 1 :], error)


def _invert_lower(matrix: np.ndarray) -> np.ndarray:
    """Inverse of a lower triangle, by halves: most of the work is matrix products."""
    order = len(matrix)
    if order <= MIN_SPLIT_ORDER:
        return np.tril(np.linalg.inv(matrix))
    half = order // 2
    inverse = np.zeros_like(matrix)
    inverse[:half, :half] = _invert_lower(matrix[:half, :half])
    inverse[half:, half:] = _invert_lower(matrix[half:, half:])
    inverse[half:, :half] = -inverse[half:, half:] @ (matrix[half:, :half] @ inverse[:half, :half])
    return inverse
