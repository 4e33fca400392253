"""The definition of every operation of the native core, in numpy: plain, slow, and what each arm is compared with.

Sums are taken in float64 and rounded once to float32; a fast arm sums in float32 and another order. Quantized numbers,
dequantized weights and stored keys and values are exact: every arm gives these bits. The layer stack is in
`reference_decoder.py`. `csrc/README.md` draws the formats.
"""

import math
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from vllm_omni.native.spec import FloatArray, IntArray, LongArray, StepRows

Array = npt.NDArray[Any]

_erf = np.vectorize(math.erf, otypes=[np.float64])


class GroupedWeights(Protocol):
    """An unpacked matrix: weight = scale * q + minimum.

    Attributes:
        q: [rows, columns] uint8; `scale`, `minimum`: [rows, groups] float16.
        group_size: Columns that share a scale and a minimum; the last group of a row may be shorter.
    """

    @property
    def q(self) -> npt.NDArray[np.uint8]: ...
    @property
    def scale(self) -> npt.NDArray[np.float16]: ...
    @property
    def minimum(self) -> npt.NDArray[np.float16]: ...
    @property
    def group_size(self) -> int: ...


@dataclass(frozen=True)
class PagedCache:
    """One layer's keys and values.

    Attributes:
        pages: [blocks, kv_heads, block_size, bytes of a cell] uint8; its outer strides are free.
        kind: `bfloat16` or `int8`.
        head_dim: Numbers of a key, and of a value.
    """

    pages: npt.NDArray[np.uint8]
    kind: str
    head_dim: int

    @property
    def block_size(self) -> int:
        return int(self.pages.shape[2])


# Matrix products.


def quantize_rows_ref(x: FloatArray, group_size: int) -> tuple[npt.NDArray[np.int8], FloatArray, FloatArray]:
    """`x` [R, K] as p [R, K padded to whole groups] int8, a and s [R, groups] float32.

    Per group a = max |x| / 127 and p = x / a, rounded to the nearest integer, halves to even; s = a * sum of p.
    """
    grouped = _grouped(x.astype(np.float32), group_size)
    a = np.abs(grouped).max(axis=2) / np.float32(127)
    p = np.rint(grouped / np.where(a > 0, a, np.float32(1))[:, :, None])
    s = a * p.sum(axis=2, dtype=np.float32)
    return p.reshape(len(x), -1).astype(np.int8), a, s


def linear_ref(x: FloatArray, matrix: GroupedWeights) -> FloatArray:
    """[R, rows]: `x` [R, columns], quantized, times the matrix, transposed."""
    return linear_terms_ref(x, matrix).sum(axis=(0, 1)).astype(np.float32)


def linear_terms_ref(x: FloatArray, matrix: GroupedWeights) -> Array:
    """[2, groups, R, rows] float64: what a product sums, scale * a * sum(q * p) and minimum * s of each group."""
    p, a, s = quantize_rows_ref(x, matrix.group_size)
    # [G, R, group] times [G, group, rows]; integers below 2**53 are exact in float64.
    products = _by_group(p, matrix.group_size) @ _by_group(matrix.q, matrix.group_size).transpose(0, 2, 1)
    scale, minimum = matrix.scale.astype(np.float64).T[:, None, :], matrix.minimum.astype(np.float64).T[:, None, :]
    return np.stack([scale * a.T[:, :, None] * products, minimum * s.T[:, :, None]])


def dequantize_rows_ref(matrix: GroupedWeights, ids: IntArray) -> FloatArray:
    """[count, columns] float32: the rows `ids` of the matrix. scale * q is exact in float32; one rounding follows."""
    columns = matrix.q.shape[1]
    scale, minimum = (
        values[ids].astype(np.float32).repeat(matrix.group_size, axis=1)[:, :columns]
        for values in (matrix.scale, matrix.minimum)
    )
    return scale * matrix.q[ids].astype(np.float32) + minimum


def dequantize_panel_ref(matrix: GroupedWeights, begin: int, count: int) -> npt.NDArray[np.uint16]:
    """[count, columns] bits of bfloat16: the rows from `begin`, rounded from float32."""
    return bfloat16_ref(dequantize_rows_ref(matrix, np.arange(begin, begin + count, dtype=np.int32)))


def bfloat16_ref(x: FloatArray) -> npt.NDArray[np.uint16]:
    """Bits of the nearest bfloat16, halves to even; NaN stays NaN."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    nearest = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FC0), nearest)


def from_bfloat16_ref(bits: npt.NDArray[np.uint16]) -> FloatArray:
    """The float32 numbers that bits of bfloat16 stand for."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _grouped(x: Array, group_size: int) -> Array:
    """[R, K] as [R, groups, group_size], the last group filled up with zeros."""
    padding = -x.shape[1] % group_size
    return np.pad(x, ((0, 0), (0, padding))).reshape(len(x), -1, group_size)


def _by_group(x: Array, group_size: int) -> Array:
    """[R, K] integers as [groups, R, group_size] float64."""
    return _grouped(x, group_size).transpose(1, 0, 2).astype(np.float64)


# Vectors.


def rms_norm_ref(x: FloatArray, weight: FloatArray, eps: float) -> FloatArray:
    """Each row of `x` [..., C] over its root mean square, times `weight` [C]."""
    wide = x.astype(np.float64)
    mean_square = np.mean(wide * wide, axis=-1, keepdims=True)
    return (wide / np.sqrt(mean_square + eps) * weight).astype(np.float32)


def rope_ref(x: FloatArray, positions: LongArray, table: FloatArray, style: str) -> FloatArray:
    """`x` [R, H, D] with its leading rotary_dim dimensions turned; `table` [positions, rotary_dim], `positions` [R]."""
    rotary_dim = table.shape[1]
    half = rotary_dim // 2
    cosines, sines = (part[:, None, :].astype(np.float64) for part in np.split(table[positions], 2, axis=1))
    is_halves = style == "halves"
    one, other = (
        (slice(0, half), slice(half, rotary_dim)) if is_halves else (slice(0, rotary_dim, 2), slice(1, rotary_dim, 2))
    )
    out = x.copy()
    out[..., one] = x[..., one] * cosines - x[..., other] * sines
    out[..., other] = x[..., other] * cosines + x[..., one] * sines
    return out


def gated_activation_ref(gate: FloatArray, up: FloatArray, activation: str) -> FloatArray:
    """activation(gate) * up: `silu` is x * sigmoid(x), `gelu` is x * (1 + erf(x / sqrt(2))) / 2."""
    wide = gate.astype(np.float64)
    factor = sigmoid_ref(wide) if activation == "silu" else 0.5 * (1 + _erf(wide / math.sqrt(2)))
    return (wide * factor * up).astype(np.float32)


def sigmoid_ref(x: Array) -> Array:
    """1 / (1 + e^-x) in float64, which no x of float32 overflows in this form."""
    return 0.5 * (1 + np.tanh(0.5 * x.astype(np.float64)))


# Keys and values.


def store_kv_ref(cache: PagedCache, k: FloatArray, v: FloatArray, slots: LongArray) -> None:
    """Writes `k` and `v` [R, KV heads, D] into the pages at `slots` [R]; a negative slot is not stored."""
    cells = encode_kv_ref(k, v, cache.kind)
    for row, slot in enumerate(slots):
        if slot >= 0:
            block, offset = divmod(int(slot), cache.block_size)
            cache.pages[block, :, offset, : cells.shape[2]] = cells[row]


def encode_kv_ref(k: FloatArray, v: FloatArray, kind: str) -> npt.NDArray[np.uint8]:
    """[R, KV heads, bytes of a cell]: keys and values as a cache of `kind` holds them."""
    if kind == "bfloat16":
        return np.concatenate([bfloat16_ref(k), bfloat16_ref(v)], axis=2).view(np.uint8)
    values, scales = zip(*(_int8_ref(x) for x in (k, v)), strict=True)
    return np.concatenate([*(x.view(np.uint8) for x in values), *(x.view(np.uint8) for x in scales)], axis=2)


def decode_kv_ref(cells: npt.NDArray[np.uint8], kind: str, head_dim: int) -> tuple[FloatArray, FloatArray]:
    """Keys and values [..., D] float32 of `cells` [..., bytes of a cell]."""
    cells = np.ascontiguousarray(cells)
    if kind == "bfloat16":
        numbers = from_bfloat16_ref(np.ascontiguousarray(cells[..., : 4 * head_dim]).view(np.uint16))
        return numbers[..., :head_dim], numbers[..., head_dim:]
    numbers = cells[..., : 2 * head_dim].view(np.int8).astype(np.float32)
    scales = np.ascontiguousarray(cells[..., 2 * head_dim : 2 * head_dim + 8]).view(np.float32)
    return numbers[..., :head_dim] * scales[..., :1], numbers[..., head_dim:] * scales[..., 1:]


def gather_kv_ref(cache: PagedCache, block_table: IntArray, indices: LongArray) -> tuple[FloatArray, FloatArray]:
    """Keys and values [T, KV heads, D] of the tokens `indices` [T] of the sequence with that block table."""
    blocks, offsets = block_table[indices // cache.block_size], indices % cache.block_size
    return decode_kv_ref(cache.pages[blocks, :, offsets], cache.kind, cache.head_dim)


def _int8_ref(x: FloatArray) -> tuple[npt.NDArray[np.int8], FloatArray]:
    """[R, H, D] int8 and [R, H, 1] float32: round(x / scale) with scale = max |x| / 127."""
    scale = np.abs(x).max(axis=2, keepdims=True) / np.float32(127)
    return np.rint(x / np.where(scale > 0, scale, np.float32(1))).astype(np.int8), scale


# Attention.


@dataclass(frozen=True)
class AttentionOptions:
    """How a layer attends.

    Attributes:
        scale: Factor of query times key.
        window: Keys a query sees, itself included; 0 means all before it.
        kv_group: Which block table of a batch the layer uses.
    """

    scale: float
    window: int = 0
    kv_group: int = 0


def attention_ref(q: FloatArray, cache: PagedCache, rows: StepRows, options: AttentionOptions) -> FloatArray:
    """[R, H, D]: softmax(scale * q k) v of `q` [R, H, D] over the stored keys and values of each row's sequence.

    The last row of a sequence sees the last of its `seq_lens` keys, the row before one key less. Query head h uses KV
    head h * KV heads // heads.
    """
    out = np.empty(q.shape, np.float32)
    for seq in range(rows.num_seqs):
        begin, end = int(rows.query_start[seq]), int(rows.query_start[seq + 1])
        table = rows.block_tables[options.kv_group][seq]
        for row in range(begin, end):
            num_keys = int(rows.seq_lens[seq]) - (end - 1 - row)
            first = max(0, num_keys - options.window) if options.window else 0
            keys, values = gather_kv_ref(cache, table, np.arange(first, num_keys))
            out[row] = _attend(q[row], keys, values, options.scale)
    return out


def _attend(q: Array, keys: Array, values: Array, scale: float) -> Array:
    """[H, D] of one token: `q` [H, D] over `keys`, `values` [T, KV heads, D]."""
    heads_per_kv = q.shape[0] // keys.shape[1]
    keys, values = (np.repeat(x, heads_per_kv, axis=1).astype(np.float64) for x in (keys, values))
    scores = np.einsum("hd,thd->ht", q, keys) * scale
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    return np.einsum("ht,thd->hd", weights / weights.sum(axis=1, keepdims=True), values)
