"""What the native core works on, as plain dataclasses: they hold arrays, and neither compute nor load anything.

`LayerWeights` and `DecoderWeights` are generic in the matrix: `native.ops.Matrix` (packed) for the native core,
`native.reference.GroupedWeights` (unpacked) for the reference.

```
rope table   [max_position, rotary_dim]: rotary_dim / 2 cosines, then as many sines
KV page      of a layer, head by head: keys, values and, where they are int8, scales of keys, then of values
             keys [tokens / 16, head_dim, 16] bfloat16, or [tokens / 16, head_dim / 4, 16, 4] code + 127 in 8 bits
             values [tokens, head_dim] bfloat16 or int8;  scales [tokens] float32
```
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

from vllm_omni.errors import ConfigError, EngineError

FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int32]
LongArray = npt.NDArray[np.int64]

# A name's place is its number in the C ABI.
ACTIVATIONS = ("silu", "gelu")
ROPE_STYLES = ("halves", "pairs")
KV_KINDS = ("bfloat16", "int8")
# Keys that lie side by side in a page.
CHUNK_KEYS = 16
# A step below float32's normal numbers is too coarse to divide by: such groups are zero.
SMALLEST_STEP = np.finfo(np.float32).smallest_normal

MatrixT = TypeVar("MatrixT")


@dataclass(frozen=True)
class DecoderSpec:
    """Numbers that all layers of a decoder share.

    Attributes:
        max_position: Rows of each rope table.
        attention_scale: Factor of query times key, usually head_dim ** -0.5.
        activation: `silu`, or `gelu` (exact, with erf).
        rope_style: Partners of a rotation: `halves` are i and i + rotary_dim / 2, `pairs` are 2i and 2i + 1.
        num_kv_groups: Block tables of a batch; a layer names its own by `kv_group`.
    """

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    norm_eps: float
    attention_scale: float
    activation: str = "silu"
    rope_style: str = "halves"
    num_kv_groups: int = 1


@dataclass(frozen=True)
class LayerWeights(Generic[MatrixT]):
    """One decoder layer. Vectors are float32, contiguous; None where the family has none.

    Attributes:
        q: [heads * head_dim, hidden]; `k`, `v`: [kv_heads * head_dim, hidden]; `o`: [hidden, heads * head_dim].
        gate: [intermediate, hidden]; `up`: the same; `down`: [hidden, intermediate].
        input_norm: [hidden], before attention; `post_norm`: [hidden], before the MLP.
        rope: [max_position, rotary_dim]; rotary_dim is even and at most head_dim.
        head_gate: [heads, hidden]; its sigmoid scales each head's output.
        q_norm: [head_dim]; `k_norm`: the same.
        q_bias: [heads * head_dim]; `k_bias`, `v_bias`: [kv_heads * head_dim]; `o_bias`: [hidden].
        window: Keys a query sees, itself included; 0 means all before it.
        kv_group: Which block table of a batch this layer uses.
    """

    q: MatrixT
    k: MatrixT
    v: MatrixT
    o: MatrixT
    gate: MatrixT
    up: MatrixT
    down: MatrixT
    input_norm: FloatArray
    post_norm: FloatArray
    rope: FloatArray
    head_gate: MatrixT | None = None
    q_norm: FloatArray | None = None
    k_norm: FloatArray | None = None
    q_bias: FloatArray | None = None
    k_bias: FloatArray | None = None
    v_bias: FloatArray | None = None
    o_bias: FloatArray | None = None
    window: int = 0
    kv_group: int = 0

    @property
    def rotary_dim(self) -> int:
        """Leading dimensions of a head that are rotated."""
        return int(self.rope.shape[1])


@dataclass(frozen=True)
class DecoderWeights(Generic[MatrixT]):
    """All weights of a decoder.

    Attributes:
        final_norm: [hidden].
        embedding: [vocabulary, hidden], whose rows token ids look up; None where every batch brings its inputs.
    """

    layers: tuple[LayerWeights[MatrixT], ...]
    final_norm: FloatArray
    embedding: MatrixT | None = None


@dataclass(frozen=True)
class KvCacheView:
    """Where one layer's keys and values lie. The memory belongs to the caller and outlives the use of the view.

    Attributes:
        address: First byte of the first page.
        block_stride: Bytes from page to page; `head_stride`: from head to head within a page.
        block_size: Tokens of a page, a multiple of 16.
        kind: `bfloat16` or `int8`.
    """

    address: int
    num_blocks: int
    block_stride: int
    head_stride: int
    block_size: int
    kind: str

    @classmethod
    def of_array(cls, pages: npt.NDArray[np.uint8], kind: str) -> "KvCacheView":
        """The view of `pages` [blocks, kv_heads, block_size, bytes of a token], whose two outer strides are free.

        Raises:
            EngineError: A head's bytes do not follow each other.
        """
        return cls.of_pages(pages.ctypes.data, pages.shape, pages.strides, pages.itemsize, kind)

    @classmethod
    def of_pages(
        cls, address: int, shape: Sequence[int], strides: Sequence[int], itemsize: int, kind: str
    ) -> "KvCacheView":
        """The view of pages at `address`, whatever library their array is of.

        Args:
            address: Of the first byte.
            shape: [blocks, kv_heads, tokens of a block, elements of a token].
            strides: Of the same array, in bytes; the two outer ones are free.
            itemsize: Bytes of an element.
            kind: `bfloat16` or `int8`.

        Raises:
            EngineError: A head's bytes do not follow each other.
        """
        if len(shape) != 4 or tuple(strides[2:]) != (shape[3] * itemsize, itemsize):
            raise EngineError(
                f"KV pages of shape {list(shape)} with strides {list(strides)}; accepted: [blocks, kv heads, tokens, "
                "elements of a token], the last two contiguous"
            )
        return cls(address, shape[0], strides[0], strides[1], shape[2], kind)


@dataclass(frozen=True)
class StepRows:
    """The rows of one step. Rows of a sequence are consecutive and in order of position.

    Attributes:
        positions: [rows] int64, index into the rope table.
        query_start: [seqs + 1] int32, first row of each sequence, then the number of rows.
        seq_lens: [seqs] int32, tokens in the cache after this step.
        slots: Per KV group [rows] int64: block * block_size + offset; negative: not stored.
        block_tables: Per KV group [seqs, blocks] int32.
        token_ids: [rows] int32, looked up in the embedding; or None.
        inputs: [rows, hidden] float32, where there are no token ids.
    """

    positions: LongArray
    query_start: IntArray
    seq_lens: IntArray
    slots: tuple[LongArray, ...]
    block_tables: tuple[IntArray, ...]
    token_ids: IntArray | None = None
    inputs: FloatArray | None = None

    @property
    def num_rows(self) -> int:
        return len(self.positions)

    @property
    def num_seqs(self) -> int:
        return len(self.seq_lens)


def kv_cell_bytes(head_dim: int, kind: str) -> int:
    """Bytes that one token takes for one KV head: key and value, with their scales where they are int8."""
    return 4 * head_dim if kind == "bfloat16" else 2 * head_dim + 8


def number_of(name: str, names: tuple[str, ...], what: str) -> int:
    """The number of `name` in the C ABI; ConfigError where it is none of `names`."""
    if name not in names:
        raise ConfigError(f"{what}: {name!r} given, accepted: {', '.join(names)}")
    return names.index(name)
