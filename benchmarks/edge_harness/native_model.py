"""An artifact on the native core alone: one sequence at a time, no engine, no scheduler, no sampling but the largest.

What the core can do where nothing else runs, and the logits that fidelity is judged by.
"""

from dataclasses import replace
from pathlib import Path
from types import TracebackType

import numpy as np

from vllm_omni.errors import RequestError
from vllm_omni.model_executor.models.decoder.rope import rope_angles
from vllm_omni.model_executor.models.decoder.spec_mapping import EMBEDDING, DecoderShape, shape_of
from vllm_omni.model_executor.models.decoder.weights import (
    MappedMatrix,
    MappedWeights,
    decoder_weights,
    placed_weights,
)
from vllm_omni.native.decoder import Batch, Decoder
from vllm_omni.native.ops import Matrix, Team, linear, rope_table
from vllm_omni.native.spec import (
    KV_KINDS,
    DecoderSpec,
    DecoderWeights,
    FloatArray,
    KvCacheView,
    StepRows,
    kv_cell_bytes,
)
from vllm_omni.quantization.artifact import Artifact, read_artifact

# Tokens of a cache page, as vLLM's CPU build has them.
BLOCK_SIZE = 128


class NativeModel:
    """A model with a cache for one sequence. A context manager; `close` ends the threads.

    Args:
        directory: An artifact.
        num_threads: Threads that compute, the calling one included.
        max_tokens: Longest sequence.
        num_layers: Use only so many layers; None: all.
        kv_kind: Of the cache: `bfloat16` or `int8`.

    Raises:
        WeightError: The directory is no intact artifact.
        HardwareError: There is no native core for this machine.
    """

    def __init__(
        self,
        directory: Path,
        num_threads: int,
        max_tokens: int,
        num_layers: int | None = None,
        kv_kind: str = KV_KINDS[0],
    ):
        self.kv_kind = kv_kind
        self.artifact = read_artifact(directory)
        self.mapped = MappedWeights(self.artifact)
        self.shape = _first_layers(shape_of(self.artifact.config), num_layers)
        self.num_blocks = -(-max_tokens // BLOCK_SIZE)
        self.spec = decoder_spec(self.shape, self.num_blocks * BLOCK_SIZE)
        self.team = Team(num_threads)
        angles = rope_angles(self.artifact.config, self.shape.head_dim)
        rope = rope_table(self.team, angles.frequencies, angles.magnitude, self.spec.max_position)
        weights = decoder_weights(self.mapped, self.shape, packed_matrix)
        self.weights: DecoderWeights[Matrix] = placed_weights(weights, rope, [0] * self.shape.num_layers)
        self.head = packed_matrix(self.mapped.matrix(*head_of(self.shape)))
        self._decoder = Decoder(self.team, self.spec, self.weights)
        self._pages = [self.new_pages() for _ in self.weights.layers]
        self._decoder.bind_cache([KvCacheView.of_array(pages, kv_kind) for pages in self._pages])
        self._row = _OneRow(self.num_blocks, self.shape.hidden_size)

    def __enter__(self) -> "NativeModel":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the threads. Idempotent."""
        self.team.close()

    def new_pages(self) -> np.ndarray:
        """[blocks, kv_heads, tokens of a block, bytes of a cell]: an empty cache of one layer."""
        cell_bytes = kv_cell_bytes(self.shape.head_dim, self.kv_kind)
        return np.zeros((self.num_blocks, self.shape.num_kv_heads, BLOCK_SIZE, cell_bytes), np.uint8)

    def prefill(self, token_ids: np.ndarray) -> FloatArray:
        """[tokens, hidden] after the final norm, of the sequence that begins with `token_ids`; all in one step.

        Raises:
            RequestError: The sequence is longer than the cache.
        """
        return self._decoder.run(self.rows(token_ids, 0))

    def decode(self, token_id: int, position: int) -> FloatArray:
        """[1, hidden] of the token at `position`; valid until the next call."""
        row = self._row
        row.token_ids[0], row.positions[0], row.slots[0], row.seq_lens[0] = token_id, position, position, position + 1
        self._decoder.step(row.batch)
        return row.hidden

    def logits(self, hidden: FloatArray) -> FloatArray:
        """[rows, vocabulary] of `hidden` [rows, hidden]."""
        return linear(self.team, self.head, np.ascontiguousarray(hidden))

    def rows(self, token_ids: np.ndarray, begin: int) -> StepRows:
        """A step that appends `token_ids` to a sequence of `begin` tokens."""
        count = len(token_ids)
        if begin + count > self.spec.max_position:
            raise RequestError(f"{begin + count} tokens, the cache has {self.spec.max_position}; raise max_tokens")
        positions = np.arange(begin, begin + count, dtype=np.int64)
        return StepRows(
            positions=positions,
            query_start=np.array([0, count], np.int32),
            seq_lens=np.array([begin + count], np.int32),
            slots=(positions.copy(),),
            block_tables=(np.arange(self.num_blocks, dtype=np.int32)[None],),
            token_ids=np.ascontiguousarray(token_ids, np.int32),
        )


class _OneRow:
    """A batch of one row whose arrays are refilled in place."""

    def __init__(self, num_blocks: int, hidden_size: int):
        self.token_ids = np.zeros(1, np.int32)
        self.positions, self.slots = np.zeros(1, np.int64), np.zeros(1, np.int64)
        self.seq_lens = np.ones(1, np.int32)
        self.hidden = np.empty((1, hidden_size), np.float32)
        rows = StepRows(
            positions=self.positions,
            query_start=np.array([0, 1], np.int32),
            seq_lens=self.seq_lens,
            slots=(self.slots,),
            block_tables=(np.arange(num_blocks, dtype=np.int32)[None],),
            token_ids=self.token_ids,
        )
        self.batch = Batch.of_rows(rows, self.hidden)


def decoder_spec(shape: DecoderShape, max_position: int) -> DecoderSpec:
    """The native core's numbers of a model."""
    return DecoderSpec(
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        max_position=max_position,
        norm_eps=shape.norm_eps,
        attention_scale=shape.attention_scale,
        activation=shape.activation,
    )


def packed_matrix(mapped: MappedMatrix) -> Matrix:
    """A mapped matrix for the native core; not a copy."""
    form = mapped.format
    return Matrix(mapped.data, form.rows, form.columns, form.bits, form.group_size)


def head_of(shape: DecoderShape) -> tuple[str, int, int]:
    """Tensor name, rows and columns of the output layer's matrix."""
    return shape.head_name, shape.vocab_size, shape.hidden_size


def kv_bytes_per_token(artifact: Artifact, kind: str) -> int:
    """Bytes of keys and values that a token adds in all layers."""
    shape = shape_of(artifact.config)
    return shape.num_layers * shape.num_kv_heads * kv_cell_bytes(shape.head_dim, kind)


def cache_bytes(directory: Path, num_tokens: int, kind: str) -> int:
    """Bytes of a cache for one sequence of `num_tokens`, with room for what an engine keeps to itself."""
    return (num_tokens + 4 * BLOCK_SIZE) * kv_bytes_per_token(read_artifact(directory), kind)


def bytes_per_token(artifact: Artifact) -> int:
    """Bytes of weights that a decoded token reads: every matrix, an embedding only where it is the output layer."""
    shape = shape_of(artifact.config)
    names = set(artifact.matrices) - {EMBEDDING} | {shape.head_name}
    return sum(artifact.matrices[name].format.num_bytes for name in names)


def _first_layers(shape: DecoderShape, num_layers: int | None) -> DecoderShape:
    if num_layers is None or num_layers >= shape.num_layers:
        return shape
    return replace(shape, num_layers=num_layers, windows=shape.windows[:num_layers])
