"""The decoder stack on the native core: one call for all layers, over weights where their files are mapped."""

from collections.abc import Sequence

import torch

from vllm_omni.errors import EngineError
from vllm_omni.model_executor.models.decoder.rope import RopeAngles
from vllm_omni.model_executor.models.decoder.spec_mapping import DecoderShape
from vllm_omni.model_executor.models.decoder.step import DecoderStep
from vllm_omni.model_executor.models.decoder.weights import MappedMatrix, placed_weights
from vllm_omni.native.decoder import Batch, Decoder
from vllm_omni.native.ops import Matrix, Team, dequantize_rows, linear, rope_table
from vllm_omni.native.spec import DecoderSpec, DecoderWeights, KvCacheView


def native_matrix(mapped: MappedMatrix) -> Matrix:
    """The packed matrix for the native core; not a copy."""
    form = mapped.format
    return Matrix(mapped.data, form.rows, form.columns, form.bits, form.group_size)


class NativePath:
    """The stack on a team of threads, which it owns.

    Args:
        team: Closed with this path.
        shape: The model's numbers.
        weights: All weights but the output layer.
        head: The output layer.
    """

    def __init__(self, team: Team, shape: DecoderShape, weights: DecoderWeights[Matrix], head: Matrix):
        self._team = team
        self._shape = shape
        self._weights = weights
        self._head = head
        self._decoder: Decoder | None = None
        self._batch = Batch()
        self._filled: DecoderStep | None = None
        self._pages: tuple[torch.Tensor, ...] = ()

    @property
    def num_threads(self) -> int:
        """Threads that compute, the calling one included."""
        return self._team.num_threads

    def bind_cache(
        self, pages: Sequence[torch.Tensor], groups: Sequence[int], angles: RopeAngles, num_positions: int
    ) -> None:
        if self._decoder is not None:
            self._decoder.close()
        shape, num_groups = self._shape, max(groups) + 1
        spec = DecoderSpec(
            hidden_size=shape.hidden_size,
            intermediate_size=shape.intermediate_size,
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            max_position=num_positions,
            norm_eps=shape.norm_eps,
            attention_scale=shape.attention_scale,
            activation=shape.activation,
            num_kv_groups=num_groups,
        )
        rope = rope_table(self._team, angles.frequencies, angles.magnitude, num_positions)
        self._decoder = Decoder(self._team, spec, placed_weights(self._weights, rope, groups))
        self._decoder.bind_cache([cache_view(each) for each in pages])
        self._batch, self._filled = Batch(num_groups), None
        # The native core knows addresses only.
        self._pages = tuple(pages)

    def step(self, step: DecoderStep, hidden: torch.Tensor) -> None:
        if self._decoder is None:
            raise EngineError("the decoder has no cache yet")
        # A step is the same object where its tensors are, and so is where they lie.
        if step is not self._filled or hidden.data_ptr() != self._batch.struct.hidden:
            # What is refused half way leaves a batch that is no step's.
            self._filled = None
            self._fill_batch(step, hidden)
            self._filled = step
        self._decoder.step(self._batch)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        out = torch.empty((len(hidden), self._head.rows), dtype=torch.float32)
        linear(self._team, self._head, hidden.numpy(), out.numpy())
        return out

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        assert self._weights.embedding is not None
        return torch.from_numpy(dequantize_rows(self._team, self._weights.embedding, token_ids.int().numpy()))

    def close(self) -> None:
        self._team.close()
        self._decoder, self._pages = None, ()

    def _fill_batch(self, step: DecoderStep, hidden: torch.Tensor) -> None:
        """Gives the native core the addresses of this step's tensors; nothing is copied."""
        struct, rows, first = self._batch.struct, len(step.positions), step.groups[0]
        struct.num_rows, struct.num_seqs = rows, len(first.seq_lens)
        struct.positions = _address(step.positions, torch.int64, rows, "positions")
        struct.token_ids, struct.inputs = None, None
        if step.inputs is not None:
            struct.inputs = _address(step.inputs, torch.float32, rows, "inputs")
        elif step.token_ids is not None:
            struct.token_ids = _address(step.token_ids, torch.int32, rows, "token_ids")
        struct.query_start = _address(first.query_start, torch.int32, struct.num_seqs + 1, "query_start")
        struct.seq_lens = _address(first.seq_lens, torch.int32, struct.num_seqs, "seq_lens")
        struct.hidden = _address(hidden, torch.float32, rows, "hidden")
        for number, group in enumerate(step.groups):
            slots = _address(group.slots, torch.int64, rows, "slots")
            # Rows of the table may be longer than what is handed over, so it need not be contiguous.
            table = _address(group.block_table[:1], torch.int32, 1, "block_table")
            self._batch.set_group(number, slots, table, group.block_table.stride(0))


def cache_view(pages: torch.Tensor) -> KvCacheView:
    """Where one layer's pages lie."""
    size, kind = pages.element_size(), "int8" if pages.dtype == torch.int8 else "bfloat16"
    strides = [stride * size for stride in pages.stride()]
    return KvCacheView.of_pages(pages.data_ptr(), pages.shape, strides, size, kind)


def _address(tensor: torch.Tensor, dtype: torch.dtype, length: int, name: str) -> int:
    """The address that the native core may read from; a tensor that is not what it expects must not reach it."""
    if tensor.dtype != dtype or len(tensor) != length or not tensor.is_contiguous():
        raise EngineError(
            f"{name}: contiguous {dtype} of length {length} needed, {tensor.dtype} {list(tensor.shape)} with strides "
            f"{list(tensor.stride())} given"
        )
    return tensor.data_ptr()
