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

from vllm_omni.native.spec import CHUNK_KEYS, SMALLEST_STEP, FloatArray, IntArray, LongArray, StepRows

Array = npt.NDArray[Any]
LOG2_E = np.float32(1.44269504)

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
    """One layer's keys and values, as `spec.py` draws a page.

    Attributes:
        pages: [blocks, kv_heads, block_size, bytes of a token] uint8; its two outer strides are free.
        kind: `bfloat16` or `int8`.
        head_dim: Numbers of a key, and of a value.
    """

    pages: npt.NDArray[np.uint8]
    kind: str
    head_dim: int

    @property
    def block_size(self) -> int:
        return int(self.pages.shape[2])

    @property
    def keys(self) -> Array:
        """[blocks, kv_heads, tokens / 16, D, 16] bits of bfloat16, or [.., D / 4, 16, 4] codes + 127; a view."""
        numbers, chunks = self._numbers(0), self.block_size // CHUNK_KEYS
        if self.kind == "bfloat16":
            return _split(numbers, chunks, self.head_dim, CHUNK_KEYS)
        return _split(numbers.view(np.uint8), chunks, self.head_dim // 4, CHUNK_KEYS, 4)

    @property
    def values(self) -> Array:
        """[blocks, kv_heads, tokens, D] bits of bfloat16 or codes; a view."""
        return _split(self._numbers(1), self.block_size, self.head_dim)

    @property
    def scales(self) -> Array:
        """[blocks, kv_heads, 2, tokens] float32: of keys and of values, where they are int8; a view."""
        begin = 2 * self.head_dim * self.block_size
        return _split(self._flat[:, :, begin : begin + 8 * self.block_size].view(np.float32), 2, self.block_size)

    @property
    def _flat(self) -> Array:
        """[blocks, kv_heads, bytes of a head in a page]; a view."""
        return _merged(self.pages)

    def _numbers(self, which: int) -> Array:
        """Keys (0) or values (1) of a page, flat."""
        dtype = np.dtype(np.uint16 if self.kind == "bfloat16" else np.int8)
        size = self.block_size * self.head_dim * dtype.itemsize
        return self._flat[:, :, which * size : (which + 1) * size].view(dtype)


def _merged(pages: Array) -> Array:
    """The two last dimensions as one; an error where that would need a copy."""
    flat = pages.view()
    flat.shape = (*pages.shape[:2], pages.shape[2] * pages.shape[3])
    return flat


def _split(flat: Array, *sizes: int) -> Array:
    """The last dimension as several; an error where that would need a copy."""
    out = flat.view()
    out.shape = (*flat.shape[:-1], *sizes)
    return out


# Matrix products.


def quantize_rows_ref(x: FloatArray, group_size: int) -> tuple[npt.NDArray[np.int8], FloatArray, FloatArray]:
    """`x` [R, K] as p [R, K padded to whole groups] int8, a and s [R, groups] float32.

    Per group a = max |x| / 127 and p = x / a, rounded to the nearest integer, halves to even; s = a * sum of p.
    """
    grouped = _grouped(x.astype(np.float32), group_size)
    codes, steps = _int8_ref(grouped)
    a = steps[:, :, 0]
    s = a * codes.sum(axis=2, dtype=np.float32)
    return codes.reshape(len(x), -1), a, s


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
    stored = slots >= 0
    k, v = k[stored], v[stored]
    blocks, places = np.divmod(slots[stored], cache.block_size)
    chunks, lanes = np.divmod(places, CHUNK_KEYS)
    if cache.kind == "bfloat16":
        cache.keys[blocks, :, chunks, :, lanes] = bfloat16_ref(k)
        cache.values[blocks, :, places] = bfloat16_ref(v)
        return
    (key_codes, key_steps), (value_codes, value_steps) = _int8_ref(k), _int8_ref(v)
    codes = (key_codes.astype(np.int16) + 127).astype(np.uint8)
    cache.keys[blocks, :, chunks, :, lanes] = codes.reshape(*k.shape[:2], -1, 4)
    cache.values[blocks, :, places] = value_codes
    cache.scales[blocks, :, :, places] = np.concatenate([key_steps, value_steps], axis=2)


def stored_kv_ref(cache: PagedCache, slots: LongArray) -> tuple[FloatArray, FloatArray]:
    """Keys and values [T, KV heads, D] float32 of the tokens at `slots` [T]."""
    keys, values, steps = _stored(cache, slots)
    if cache.kind == "bfloat16":
        return from_bfloat16_ref(keys), from_bfloat16_ref(values)
    return keys.astype(np.float32) * steps[:, :, :1], values.astype(np.float32) * steps[:, :, 1:]


def _stored(cache: PagedCache, slots: LongArray) -> tuple[Array, Array, Array]:
    """Keys and values [T, KV heads, D] as bits or codes, and steps [T, KV heads, 2], of no use for bfloat16."""
    blocks, places = np.divmod(slots, cache.block_size)
    chunks, lanes = np.divmod(places, CHUNK_KEYS)
    keys, values = cache.keys[blocks, :, chunks, :, lanes], cache.values[blocks, :, places]
    if cache.kind == "bfloat16":
        return keys, values, np.empty(0)
    return keys.reshape(values.shape).astype(np.int16) - 127, values, cache.scales[blocks, :, :, places]


def _int8_ref(x: FloatArray) -> tuple[npt.NDArray[np.int8], FloatArray]:
    """Codes of `x` [.., D] and their steps [.., 1]: x / step to the nearest integer, with step = max |x| / 127."""
    steps = np.abs(x.astype(np.float32)).max(axis=-1, keepdims=True) / np.float32(127)
    steps = np.where(steps < SMALLEST_STEP, np.float32(0), steps)
    return np.rint(x / np.where(steps > 0, steps, np.float32(1))).astype(np.int8), steps


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
    head h * KV heads // heads. Over an int8 cache scale * q is rounded to 8 bits too, with a step for each row and
    head, so that q k is an integer.
    """
    out = np.empty(q.shape, np.float32)
    for seq in range(rows.num_seqs):
        begin, end = int(rows.query_start[seq]), int(rows.query_start[seq + 1])
        table = rows.block_tables[options.kv_group][seq]
        for row in range(begin, end):
            num_keys = int(rows.seq_lens[seq]) - (end - 1 - row)
            first = max(0, num_keys - options.window) if options.window else 0
            places = np.arange(first, num_keys)
            slots = table[places // cache.block_size].astype(np.int64) * cache.block_size + places % cache.block_size
            keys, values = stored_kv_ref(cache, slots)
            out[row] = _attend(_scaled_queries(q[row], options.scale, cache.kind), keys, values)
    return out


def _scaled_queries(q: FloatArray, scale: float, kind: str) -> Array:
    """scale * `q` [H, D], as an int8 cache multiplies it: rounded to 8 bits. The arms scale by log2(e) too."""
    scaled: Array = q * (np.float32(scale) * LOG2_E)
    if kind == "int8":
        codes, steps = _int8_ref(scaled)
        scaled = codes * steps.astype(np.float64)
    return scaled / LOG2_E.astype(np.float64)


def _attend(q: Array, keys: Array, values: Array) -> Array:
    """[H, D] of one token: `q` [H, D], scaled, over `keys`, `values` [T, KV heads, D]."""
    heads_per_kv = q.shape[0] // keys.shape[1]
    keys, values = (np.repeat(x, heads_per_kv, axis=1).astype(np.float64) for x in (keys, values))
    scores = np.einsum("hd,thd->ht", q, keys)
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    return np.einsum("ht,thd->hd", weights / weights.sum(axis=1, keepdims=True), values)
