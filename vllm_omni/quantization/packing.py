"""Quantized matrices in memory, and their bytes in the format `omni_int4`; each direction is the other's inverse.

matrix = cell[row block][group]
cell   = | 16 x float16 scale | 16 x float16 minimum | chunk 0 | chunk 1 | ...      64 bytes a chunk, 4 per row

4 bits: byte 4 r + i of chunk c has column 8 c + i in its low half, column 8 c + 4 + i in its high half
8 bits: byte 4 r + i of chunk c has column 4 c + i
"""

from dataclasses import dataclass

import numpy as np

from vllm_omni.quantization.packed_format import BLOCK_ROWS, CELL_HEAD_BYTES, MatrixFormat, cell_bytes

__all__ = ["MatrixFormat", "QuantizedMatrix", "cell_bytes", "dequantize", "pack", "unpack"]

LANE_BYTES = CELL_HEAD_BYTES // 2


@dataclass(frozen=True)
class QuantizedMatrix:
    """weight[row, column] = scale[row, group] * q[row, column] + minimum[row, group], group = column // group_size.

    Attributes:
        q: [rows, columns] uint8, 0..15 for 4 bits, 0..254 for 8.
        scale: [rows, groups] float16, of either sign.
        minimum: [rows, groups] float16; what code 0 stands for.
        bits: 4 or 8.
        group_size: 32, 64 or 128.
    """

    q: np.ndarray
    scale: np.ndarray
    minimum: np.ndarray
    bits: int
    group_size: int

    @property
    def format(self) -> MatrixFormat:
        rows, columns = self.q.shape
        return MatrixFormat(rows, columns, self.bits, self.group_size)


def pack(matrix: QuantizedMatrix) -> np.ndarray:
    """The stored bytes: [row blocks, groups, bytes of a cell] uint8, contiguous.

    A matrix may be packed in panels of whole row blocks (16 rows); the panels' bytes follow each other.
    """
    shape = matrix.format.packed_shape
    cells = np.zeros(shape, np.uint8)
    cells[..., :LANE_BYTES] = _pack_lanes(matrix.scale, shape)
    cells[..., LANE_BYTES:CELL_HEAD_BYTES] = _pack_lanes(matrix.minimum, shape)
    cells[..., CELL_HEAD_BYTES:] = _pack_codes(matrix, shape)
    return cells


def unpack(packed: np.ndarray, rows: int, columns: int, bits: int, group_size: int) -> QuantizedMatrix:
    """The matrix whose bytes `pack` gives.

    Args:
        packed: [row blocks, groups, bytes of a cell] uint8. Not modified and not kept.
        rows: Rows without the padding of the last block.
        columns: Columns without the padding of the last group.
        bits: 4 or 8.
        group_size: 32, 64 or 128.
    """
    shape = MatrixFormat(rows, columns, bits, group_size).packed_shape
    assert packed.shape == shape, f"packed shape {packed.shape}, expected {shape}"
    scale = _unpack_lanes(packed[..., :LANE_BYTES])[:rows]
    minimum = _unpack_lanes(packed[..., LANE_BYTES:CELL_HEAD_BYTES])[:rows]
    codes = _unpack_codes(packed[..., CELL_HEAD_BYTES:], bits)[:rows, :columns]
    return QuantizedMatrix(np.ascontiguousarray(codes), scale, minimum, bits, group_size)


def dequantize(matrix: QuantizedMatrix) -> np.ndarray:
    """[rows, columns] float32: the weights that the codes stand for, product and sum each rounded to float32."""
    columns = matrix.q.shape[1]
    scale = np.repeat(matrix.scale.astype(np.float32), matrix.group_size, axis=1)[:, :columns]
    minimum = np.repeat(matrix.minimum.astype(np.float32), matrix.group_size, axis=1)[:, :columns]
    scale *= matrix.q
    scale += minimum
    return scale


def _pack_lanes(values: np.ndarray, shape: tuple[int, int, int]) -> np.ndarray:
    """[rows, groups] float16 to [blocks, groups, 32] uint8."""
    blocks, groups, _ = shape
    lanes = np.zeros((blocks * BLOCK_ROWS, groups), "<f2")
    lanes[: len(values)] = values
    lanes = lanes.reshape(blocks, BLOCK_ROWS, groups).swapaxes(1, 2)
    return np.ascontiguousarray(lanes).view(np.uint8)


def _unpack_lanes(lanes: np.ndarray) -> np.ndarray:
    """[blocks, groups, 32] uint8 to [blocks * 16, groups] float16."""
    values = np.ascontiguousarray(lanes).view("<f2").swapaxes(1, 2)
    return values.reshape(-1, lanes.shape[1]).astype(np.float16, copy=False)


def _pack_codes(matrix: QuantizedMatrix, shape: tuple[int, int, int]) -> np.ndarray:
    """[rows, columns] to [blocks, groups, bytes of the chunks]."""
    blocks, groups, _ = shape
    rows, columns = matrix.q.shape
    codes: np.ndarray = np.zeros((blocks * BLOCK_ROWS, groups * matrix.group_size), np.uint8)
    codes[:rows, :columns] = matrix.q
    if matrix.bits == 4:
        halves = codes.reshape(len(codes), -1, 2, 4)
        codes = halves[:, :, 0] | (halves[:, :, 1] << 4)
    lanes = codes.reshape(blocks, BLOCK_ROWS, groups, -1, 4)
    return lanes.transpose(0, 2, 3, 1, 4).reshape(blocks, groups, -1)


def _unpack_codes(chunks: np.ndarray, bits: int) -> np.ndarray:
    """[blocks, groups, bytes of the chunks] to [blocks * 16, groups * group size]."""
    blocks, groups, _ = chunks.shape
    lanes = chunks.reshape(blocks, groups, -1, BLOCK_ROWS, 4).transpose(0, 3, 1, 2, 4)
    codes = lanes.reshape(blocks * BLOCK_ROWS, -1)
    if bits == 8:
        return codes
    quads = codes.reshape(len(codes), -1, 1, 4)
    return np.concatenate([quads & 15, quads >> 4], axis=2).reshape(len(codes), -1)
