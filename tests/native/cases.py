"""Random matrices, caches, batches and decoders for tests of the native core."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from vllm_omni.native.decoder import MATRICES
from vllm_omni.native.ops import Matrix
from vllm_omni.native.reference import GroupedWeights, PagedCache
from vllm_omni.native.spec import (
    CHUNK_KEYS,
    DecoderSpec,
    DecoderWeights,
    KvCacheView,
    LayerWeights,
    StepRows,
    kv_cell_bytes,
)
from vllm_omni.quantization.packing import QuantizedMatrix, pack

# Not a number in float32, bfloat16 and as a scale: what nobody wrote must not be read.
UNWRITTEN = 0xFF
MAX_CODE = {4: 15, 8: 254}


@dataclass(frozen=True)
class Sample:
    """A matrix unpacked for the reference and packed for the arms."""

    unpacked: QuantizedMatrix
    packed: Matrix

    @property
    def shape(self) -> tuple[int, int]:
        return self.packed.shape


Weights = DecoderWeights[Sample]


def aligned(array: np.ndarray, offset: int = 0) -> np.ndarray:
    """A copy whose memory begins `offset` bytes after a multiple of 64."""
    memory = np.empty(array.nbytes + 128, np.uint8)
    begin = -memory.ctypes.data % 64 + offset
    out = memory[begin : begin + array.nbytes].view(array.dtype).reshape(array.shape)
    out[...] = array
    return out


def sample_of(matrix: QuantizedMatrix) -> Sample:
    rows, columns = matrix.q.shape
    return Sample(matrix, Matrix(aligned(pack(matrix)), rows, columns, matrix.bits, matrix.group_size))


def random_matrix(rng: np.random.Generator, shape: tuple[int, int], bits: int, group_size: int) -> Sample:
    """Weights of about 1 / sqrt(columns), scales of either sign."""
    rows, columns = shape
    groups = -(-columns // group_size)
    step = 4 / MAX_CODE[bits] / np.sqrt(columns)
    scale = (step * rng.uniform(0.5, 1.5, (rows, groups)) * rng.choice([-1, 1], (rows, groups))).astype(np.float16)
    minimum = (-scale.astype(np.float32) * MAX_CODE[bits] * rng.uniform(0.3, 0.7, (rows, groups))).astype(np.float16)
    q = rng.integers(0, MAX_CODE[bits] + 1, shape, np.uint8)
    return sample_of(QuantizedMatrix(q, scale, minimum, bits, group_size))


def random_rows(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Standard normal float32."""
    return rng.standard_normal(shape, np.float32)


def rope_table(max_position: int, rotary_dim: int, theta: float = 10000.0) -> np.ndarray:
    """[max_position, rotary_dim] float32: cosines, then sines."""
    angles = np.arange(max_position)[:, None] * theta ** (-np.arange(0, rotary_dim, 2) / rotary_dim)
    return np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)


# Caches.


@dataclass(frozen=True)
class CacheShape:
    """How a cache is laid out; `gap` bytes, a multiple of 4, lie between the heads of a page, and as many after it."""

    num_blocks: int
    num_kv_heads: int
    block_size: int
    head_dim: int
    kind: str
    gap: int = 0


@dataclass(frozen=True)
class Cache(PagedCache):
    """A cache over its own memory, a flat uint8 array."""

    memory: np.ndarray

    @property
    def view(self) -> KvCacheView:
        return KvCacheView.of_array(self.pages, self.kind)

    @property
    def num_kv_heads(self) -> int:
        return int(self.pages.shape[1])

    def copy(self) -> "Cache":
        memory = aligned(self.memory)
        pages = np.lib.stride_tricks.as_strided(memory, self.pages.shape, self.pages.strides)
        return Cache(pages, self.kind, self.head_dim, memory)


def empty_cache(shape: CacheShape) -> Cache:
    """A cache in which nothing was written."""
    cell = kv_cell_bytes(shape.head_dim, shape.kind)
    head_stride = shape.block_size * cell + shape.gap
    block_stride = shape.num_kv_heads * head_stride + shape.gap
    memory = aligned(np.full(shape.num_blocks * block_stride, UNWRITTEN, np.uint8))
    pages = np.lib.stride_tricks.as_strided(
        memory,
        (shape.num_blocks, shape.num_kv_heads, shape.block_size, cell),
        (block_stride, head_stride, cell, 1),
    )
    return Cache(pages, shape.kind, shape.head_dim, memory)


def written_bytes(cache: Cache, slots: np.ndarray) -> np.ndarray:
    """Which bytes of the cache's memory hold the tokens at `slots`, as booleans."""
    marked = cache.copy()
    marked.memory[:] = 0
    blocks, places = np.divmod(slots[slots >= 0], cache.block_size)
    every_bit = np.iinfo(marked.keys.dtype).max
    marked.keys[blocks, :, places // CHUNK_KEYS, :, places % CHUNK_KEYS] = every_bit
    marked.values.view(marked.keys.dtype)[blocks, :, places] = every_bit
    if cache.kind == "int8":
        marked.scales.view(np.uint32)[blocks, :, :, places] = np.iinfo(np.uint32).max
    return marked.memory != 0


# Batches.


class Sequences:
    """Sequences that grow, with their block tables: what a scheduler would keep.

    Block 0 is given to nobody and never written.
    """

    def __init__(self, num_seqs: int, block_size: int, max_tokens: int, num_kv_groups: int = 1, seed: int = 0):
        rng = np.random.default_rng(seed)
        blocks = -(-max_tokens // block_size)
        self.block_size = block_size
        self.num_blocks = num_seqs * blocks + 1
        self.lengths = [0] * num_seqs
        self._tables = [
            (1 + rng.permutation(num_seqs * blocks)).reshape(num_seqs, blocks).astype(np.int32)
            for _ in range(num_kv_groups)
        ]

    def step(self, growth: dict[int, int], **inputs: np.ndarray) -> StepRows:
        """Rows of the sequences in `growth`, each longer by its number of tokens; `inputs` as in `StepRows`."""
        seqs = list(growth)
        places = [np.arange(self.lengths[seq], self.lengths[seq] + growth[seq]) for seq in seqs]
        for seq in seqs:
            self.lengths[seq] += growth[seq]
        tables = tuple(np.ascontiguousarray(table[seqs]) for table in self._tables)
        return StepRows(
            positions=np.concatenate(places).astype(np.int64),
            query_start=np.cumsum([0, *growth.values()]).astype(np.int32),
            seq_lens=np.array([self.lengths[seq] for seq in seqs], np.int32),
            slots=tuple(self._slots(table, places) for table in tables),
            block_tables=tables,
            **inputs,  # type: ignore[arg-type]
        )

    def _slots(self, table: np.ndarray, places: Sequence[np.ndarray]) -> np.ndarray:
        parts = [
            row[indices // self.block_size].astype(np.int64) * self.block_size + indices % self.block_size
            for row, indices in zip(table, places, strict=True)
        ]
        return np.concatenate(parts)


# Decoders.


def map_matrices(weights: DecoderWeights[Any], change: Callable[[Any], Any]) -> DecoderWeights[Any]:
    """The same weights with every matrix replaced."""

    def changed(matrix: Any) -> Any:
        return None if matrix is None else change(matrix)

    layers = tuple(
        replace(layer, **{name: changed(getattr(layer, name)) for name in MATRICES}) for layer in weights.layers
    )
    return replace(weights, layers=layers, embedding=changed(weights.embedding))


def packed_weights(weights: Weights) -> DecoderWeights[Matrix]:
    return map_matrices(weights, lambda sample: sample.packed)


def unpacked_weights(weights: Weights) -> DecoderWeights[GroupedWeights]:
    return map_matrices(weights, lambda sample: sample.unpacked)


@dataclass(frozen=True)
class Family:
    """What a tiny random decoder has; each layer takes its own entry of `windows` and `kv_groups`."""

    spec: DecoderSpec
    rotary_dim: int
    windows: tuple[int, ...] = (0, 0)
    kv_groups: tuple[int, ...] = (0, 0)
    has_qk_norm: bool = False
    has_qkv_bias: bool = False
    has_o_bias: bool = False
    has_head_gate: bool = False
    formats: tuple[tuple[int, int], ...] = ((4, 32),)
    vocabulary: int | None = 50

    def weights(self, seed: int = 0) -> Weights:
        rng = np.random.default_rng(seed)
        layers = tuple(self._layer(rng, *pair) for pair in zip(self.windows, self.kv_groups, strict=True))
        hidden = self.spec.hidden_size
        embedding = None if self.vocabulary is None else random_matrix(rng, (self.vocabulary, hidden), *self.formats[0])
        return DecoderWeights(layers, _norm(rng, hidden), embedding)

    def _layer(self, rng: np.random.Generator, window: int, kv_group: int) -> LayerWeights[Sample]:
        spec = self.spec
        hidden, mlp, head_dim = spec.hidden_size, spec.intermediate_size, spec.head_dim
        query, key = spec.num_heads * head_dim, spec.num_kv_heads * head_dim

        def matrix(*shape: int) -> Sample:
            return random_matrix(rng, (shape[0], shape[1]), *self.formats[rng.integers(len(self.formats))])

        def bias(is_present: bool, width: int) -> np.ndarray | None:
            return random_rows(rng, width) if is_present else None

        return LayerWeights(
            q=matrix(query, hidden), k=matrix(key, hidden), v=matrix(key, hidden), o=matrix(hidden, query),
            gate=matrix(mlp, hidden), up=matrix(mlp, hidden), down=matrix(hidden, mlp),
            input_norm=_norm(rng, hidden), post_norm=_norm(rng, hidden),
            rope=rope_table(spec.max_position, self.rotary_dim),
            head_gate=matrix(spec.num_heads, hidden) if self.has_head_gate else None,
            q_norm=_norm(rng, head_dim) if self.has_qk_norm else None,
            k_norm=_norm(rng, head_dim) if self.has_qk_norm else None,
            q_bias=bias(self.has_qkv_bias, query), k_bias=bias(self.has_qkv_bias, key),
            v_bias=bias(self.has_qkv_bias, key), o_bias=bias(self.has_o_bias, hidden),
            window=window, kv_group=kv_group,
        )  # fmt: skip


def _norm(rng: np.random.Generator, width: int) -> np.ndarray:
    """Weights of a normalisation: around 1, of either sign."""
    return (1 + 0.5 * random_rows(rng, width)).astype(np.float32)
