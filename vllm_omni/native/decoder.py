"""The whole layer stack of a decoder in one call, and paged attention on its own.

A step takes a `Batch`: the C structure with plain addresses. A caller that runs many steps keeps one batch and
refreshes what has changed, so that a step costs microseconds outside the native core.
"""

import ctypes
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_omni.errors import EngineError, WeightError
from vllm_omni.native.ops import Matrix, Team, address_of, cache_struct
from vllm_omni.native.spec import (
    ACTIVATIONS,
    ROPE_STYLES,
    DecoderSpec,
    DecoderWeights,
    FloatArray,
    KvCacheView,
    LayerWeights,
    StepRows,
    number_of,
)
from vllm_omni.native.structures import BatchStruct, DecoderStruct, KvCacheStruct, LayerStruct, MatrixStruct

MATRICES = ("q", "k", "v", "o", "gate", "up", "down", "head_gate")
VECTORS = ("input_norm", "post_norm", "q_norm", "k_norm", "q_bias", "k_bias", "v_bias", "o_bias", "rope")
OPTIONAL = frozenset({"head_gate", "q_norm", "k_norm", "q_bias", "k_bias", "v_bias", "o_bias"})


class Batch:
    """The rows of one step for the C ABI.

    Set the fields of `struct` (counts and addresses, as `omni_batch` in `csrc/include/omni_native.h` lists them) and
    each KV group's tables by `set_group`. What the addresses point to belongs to the caller, and stays in place
    during a step.

    Attributes:
        struct: The C structure; its fields `slots`, `block_tables` and `block_table_strides` are this class's own.
        reference: `struct` as an argument.
    """

    __slots__ = ("_kept", "_slots", "_strides", "_tables", "reference", "struct")

    def __init__(self, num_kv_groups: int = 1):
        self._slots = (ctypes.c_void_p * num_kv_groups)()
        self._tables = (ctypes.c_void_p * num_kv_groups)()
        self._strides = (ctypes.c_int64 * num_kv_groups)()
        self._kept: list[Any] = []
        self.struct = BatchStruct(
            num_groups=num_kv_groups,
            slots=ctypes.addressof(self._slots),
            block_tables=ctypes.addressof(self._tables),
            block_table_strides=ctypes.addressof(self._strides),
        )
        self.reference = ctypes.byref(self.struct)

    def set_group(self, group: int, slots: int, block_table: int, stride: int) -> None:
        """Gives KV group `group` the addresses of its slots and block table, whose rows are `stride` elements apart."""
        self._slots[group] = slots
        self._tables[group] = block_table
        self._strides[group] = stride

    @classmethod
    def of_rows(cls, rows: StepRows, hidden: FloatArray | None = None) -> "Batch":
        """The batch of `rows`, whose result goes to `hidden` [rows, hidden]; it keeps their arrays alive.

        Raises:
            EngineError: An array has another dtype, order or shape than `StepRows` says.
        """
        batch = cls(len(rows.block_tables))
        count, seqs, struct = rows.num_rows, rows.num_seqs, batch.struct
        struct.num_rows, struct.num_seqs = count, seqs
        struct.positions = batch._keep(rows.positions, np.int64, (count,), "positions")
        struct.query_start = batch._keep(rows.query_start, np.int32, (seqs + 1,), "query_start")
        struct.seq_lens = batch._keep(rows.seq_lens, np.int32, (seqs,), "seq_lens")
        if rows.token_ids is not None:
            struct.token_ids = batch._keep(rows.token_ids, np.int32, (count,), "token_ids")
        if rows.inputs is not None:
            struct.inputs = batch._keep(rows.inputs, np.float32, (count, *rows.inputs.shape[1:]), "inputs")
        if hidden is not None:
            struct.hidden = batch._keep(hidden, np.float32, (count, *hidden.shape[1:]), "hidden")
        for group, (slots, table) in enumerate(zip(rows.slots, rows.block_tables, strict=True)):
            batch.set_group(
                group,
                batch._keep(slots, np.int64, (count,), "slots"),
                batch._keep(table, np.int32, (seqs, *table.shape[1:]), "block_tables"),
                table.shape[1],
            )
        return batch

    def _keep(self, array: npt.NDArray[Any], dtype: Any, shape: tuple[int, ...], name: str) -> int:
        self._kept.append(array)
        return address_of(array, dtype, shape, name)


def attention(
    team: Team,
    cache: KvCacheView,
    batch: Batch,
    q: FloatArray,
    *,
    num_kv_heads: int,
    scale: float,
    window: int = 0,
    kv_group: int = 0,
) -> FloatArray:
    """[R, H, D]: attention of `q` [R, H, D] float32 over the stored keys and values of each row's sequence.

    Args:
        batch: Whose rows these are; slots, token ids and hidden are not looked at.
        window: Keys a query sees, itself included; 0 means all before it.
        kv_group: Which block table of the batch to use.
    """
    _, heads, head_dim = q.shape
    out = np.empty(q.shape, np.float32)
    source = address_of(q, np.float32, (batch.struct.num_rows, heads, head_dim), "q")
    team.call(
        "omni_attention", ctypes.byref(cache_struct(cache)), batch.reference, kv_group, source,
        heads, num_kv_heads, head_dim, window, scale, out.ctypes.data,
    )  # fmt: skip
    return out


class Decoder:
    """A decoder on a team: bind a cache, then take any number of steps. It keeps its weights alive.

    Calls in this order: `bind_cache` once and again whenever the cache has moved, `step` any number of times, `close`
    once (the team's `close` does it too). Steps of decoders on one team wait for each other.
    """

    def __init__(self, team: Team, spec: DecoderSpec, weights: DecoderWeights[Matrix]):
        """Checks every weight against `spec`.

        Raises:
            WeightError: Weights are missing or have another shape; the message lists all of them.
            EngineError: The native core refused the numbers of `spec`.
        """
        self.spec, self.weights, self.team = spec, weights, team
        problems = _problems(spec, weights)
        if problems:
            raise WeightError(f"{len(problems)} weights do not fit the decoder: " + "; ".join(problems))
        functions = team.library.functions
        layers = (LayerStruct * len(weights.layers))(*(_layer_struct(layer) for layer in weights.layers))
        self._handle: int | None = None
        with team.lock:
            if team.handle is None:
                raise EngineError("decoder: its team was closed")
            self._handle = functions.omni_decoder_create(team.handle, ctypes.byref(_spec_struct(spec, weights)), layers)
        if not self._handle:
            raise EngineError(f"native core: {team.library.last_error()}")
        self._finalizer = weakref.finalize(self, functions.omni_decoder_destroy, self._handle)
        self._finalizer.atexit = False
        self._lock, self._step = team.lock, functions.omni_decoder_step
        team.register(self)

    def bind_cache(self, caches: Sequence[KvCacheView]) -> None:
        """Says where each layer's keys and values lie; their memory stays in place until the next call.

        Raises:
            EngineError: There is not one cache per layer, or the native core refused one.
        """
        if len(caches) != len(self.weights.layers):
            raise EngineError(f"{len(caches)} caches given, the decoder has {len(self.weights.layers)} layers")
        structs = (KvCacheStruct * len(caches))(*(cache_struct(cache) for cache in caches))
        with self._lock:
            code = self.team.library.functions.omni_decoder_bind_cache(self._open_handle(), structs)
        self.team.library.check(code)

    def step(self, batch: Batch) -> None:
        """Runs all layers and the final norm for the rows of `batch`; blocks, and releases the interpreter's lock.

        Raises:
            EngineError: No cache is bound, or the native core refused the batch. Nothing was stored then.
        """
        self.team.check_process()
        with self._lock:
            code = self._step(self._open_handle(), batch.reference)
        if code:
            self.team.library.check(code)

    def run(self, rows: StepRows) -> FloatArray:
        """[rows, hidden]: a step on arrays, for a caller to whom some copying does not matter.

        Raises:
            EngineError: As `step`; or an array is not what `StepRows` says.
        """
        hidden = np.empty((rows.num_rows, self.spec.hidden_size), np.float32)
        if rows.inputs is not None and rows.inputs.shape != hidden.shape:
            raise EngineError(f"inputs: {list(hidden.shape)} needed, {list(rows.inputs.shape)} given")
        if len(rows.block_tables) != self.spec.num_kv_groups:
            raise EngineError(
                f"{len(rows.block_tables)} block tables given, {self.spec.num_kv_groups} KV groups needed"
            )
        self.step(Batch.of_rows(rows, hidden))
        return hidden

    def close(self) -> None:
        """Frees what the native core holds; a second call does nothing."""
        with self._lock:
            self._handle = None
            self._finalizer()

    def _open_handle(self) -> int:
        if self._handle is None:
            raise EngineError("this decoder was closed")
        return self._handle


def _shapes(spec: DecoderSpec, rotary_dim: int) -> dict[str, tuple[int, ...]]:
    """Shape of each weight of a layer."""
    hidden, head_dim = spec.hidden_size, spec.head_dim
    query, key, mlp = spec.num_heads * head_dim, spec.num_kv_heads * head_dim, spec.intermediate_size
    return {
        "q": (query, hidden), "k": (key, hidden), "v": (key, hidden), "o": (hidden, query),
        "gate": (mlp, hidden), "up": (mlp, hidden), "down": (hidden, mlp), "head_gate": (spec.num_heads, hidden),
        "input_norm": (hidden,), "post_norm": (hidden,), "q_norm": (head_dim,), "k_norm": (head_dim,),
        "q_bias": (query,), "k_bias": (key,), "v_bias": (key,), "o_bias": (hidden,),
        "rope": (spec.max_position, rotary_dim),
    }  # fmt: skip


def _problems(spec: DecoderSpec, weights: DecoderWeights[Matrix]) -> list[str]:
    """What does not fit, one line per weight."""
    found = []
    for number, layer in enumerate(weights.layers):
        for name, shape in _shapes(spec, layer.rotary_dim).items():
            found += _problem(f"layer {number} {name}", getattr(layer, name), shape, name in OPTIONAL)
    found += _problem("final_norm", weights.final_norm, (spec.hidden_size,), False)
    if weights.embedding is not None:
        found += _problem("embedding", weights.embedding, (weights.embedding.rows, spec.hidden_size), False)
    return found


def _problem(name: str, weight: Any, shape: tuple[int, ...], is_optional: bool) -> list[str]:
    if weight is None:
        return [] if is_optional else [f"{name} is missing"]
    if weight.shape != shape:
        return [f"{name} is {list(weight.shape)}, {list(shape)} needed"]
    if isinstance(weight, np.ndarray) and (weight.dtype != np.float32 or not weight.flags.c_contiguous):
        return [f"{name} is {weight.dtype} with strides {list(weight.strides)}, contiguous float32 needed"]
    return []


def _layer_struct(layer: LayerWeights[Matrix]) -> LayerStruct:
    struct = LayerStruct(rotary_dim=layer.rotary_dim, window=layer.window, kv_group=layer.kv_group)
    for name in MATRICES:
        setattr(struct, name, _matrix_struct(getattr(layer, name)))
    for name in VECTORS:
        vector = getattr(layer, name)
        setattr(struct, name, None if vector is None else vector.ctypes.data)
    return struct


def _matrix_struct(matrix: Matrix | None) -> MatrixStruct:
    return MatrixStruct() if matrix is None else matrix.struct


def _spec_struct(spec: DecoderSpec, weights: DecoderWeights[Matrix]) -> DecoderStruct:
    return DecoderStruct(
        len(weights.layers), spec.hidden_size, spec.intermediate_size, spec.num_heads, spec.num_kv_heads,
        spec.head_dim, number_of(spec.activation, ACTIVATIONS, "activation"),
        number_of(spec.rope_style, ROPE_STYLES, "rope style"), spec.num_kv_groups, spec.max_position, spec.norm_eps,
        spec.attention_scale, weights.final_norm.ctypes.data, _matrix_struct(weights.embedding),
    )  # fmt: skip
