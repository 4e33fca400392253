"""GGUF files of random weights in the 4-bit types of llama.cpp, as its quantizer would choose the types of tensors.

Blocks are random bytes with scales of a size that keeps activations finite. The choice of types is that of
`llama-quantize` without an importance matrix: a tied embedding, being the output layer, gets Q6_K in every mix, and
Q4_K_M gives Q6_K to half of the value and down projections, those of the first and last eighth of the layers and every
third between.
"""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, LlamaFileType

from benchmarks.edge_harness.geometry import Geometry, gguf_name
from benchmarks.edge_harness.gguf_output import GgufPlan, GgufTensorPlan, write_gguf
from benchmarks.edge_harness.toy_tokenizer import toy_vocabulary
from vllm_omni.quantization.quantize_settings import EMBEDDING_NAME

SEED = 20260102
FILE_TYPES: Mapping[str, LlamaFileType] = MappingProxyType(
    {
        "Q4_0": LlamaFileType.MOSTLY_Q4_0,
        "Q4_1": LlamaFileType.MOSTLY_Q4_1,
        "Q4_K_M": LlamaFileType.MOSTLY_Q4_K_M,
    }
)
GENERAL_TYPES = {
    "Q4_0": GGMLQuantizationType.Q4_0,
    "Q4_1": GGMLQuantizationType.Q4_1,
    "Q4_K_M": GGMLQuantizationType.Q4_K,
}
WIDER_PARTS = ("self_attn.v_proj.weight", "mlp.down_proj.weight")


def random_gguf(geometry: Geometry, mix: str, work_dir: Path) -> Path:
    """A GGUF file of random weights; made once and kept in `work_dir`.

    Args:
        geometry: The model's numbers; widths in multiples of 256.
        mix: A key of `FILE_TYPES`.
        work_dir: Directory for made models.
    """
    path = work_dir / f"{geometry.name}-{mix}.gguf"
    if path.is_file():
        return path
    rng = np.random.Generator(np.random.SFC64(SEED))
    vocabulary = toy_vocabulary(geometry.vocab_size)
    plan = GgufPlan(geometry.config(), vocabulary, FILE_TYPES[mix], plan_tensors(geometry, mix))
    write_gguf(path, plan, lambda tensor: random_blocks(rng, tensor))
    return path


def plan_tensors(geometry: Geometry, mix: str) -> list[GgufTensorPlan]:
    """The tensors of a model in the types of a mix."""
    return [
        GgufTensorPlan(gguf_name(name), name, shape, tensor_type(geometry, mix, name, len(shape)))
        for name, shape in geometry.tensors().items()
    ]


def gguf_tensor_bytes(geometry: Geometry, mix: str) -> int:
    """Bytes of all tensors of a mix; with the tied embedding each is read once a token."""
    return sum(math.prod(tensor.byte_shape) for tensor in plan_tensors(geometry, mix))


def tensor_type(geometry: Geometry, mix: str, hf_name: str, num_dimensions: int) -> GGMLQuantizationType:
    """The type that a tensor gets in a mix."""
    if num_dimensions == 1:
        return GGMLQuantizationType.F32
    if hf_name == EMBEDDING_NAME:
        return GGMLQuantizationType.Q6_K
    if mix == "Q4_K_M" and hf_name.endswith(WIDER_PARTS):
        layer, num_layers = int(hf_name.split(".")[2]), geometry.num_layers
        first, last = num_layers // 8, 7 * num_layers // 8
        if layer < first or layer >= last or (layer - first) % 3 == 2:
            return GGMLQuantizationType.Q6_K
    return GENERAL_TYPES[mix]


def random_blocks(rng: np.random.Generator, tensor: GgufTensorPlan) -> np.ndarray:
    """A tensor's bytes, uint8 of its `byte_shape`; a vector is near 1."""
    if tensor.type is GGMLQuantizationType.F32:
        return rng.uniform(0.7, 1.3, tensor.shape).astype("<f4").view(np.uint8)
    block_bytes = GGML_QUANT_SIZES[tensor.type][1]
    shape = tensor.byte_shape
    blocks = np.frombuffer(bytearray(rng.bytes(math.prod(shape))), np.uint8).reshape(-1, block_bytes)
    size = rng.uniform(0.5, 1.5, len(blocks)) / math.sqrt(tensor.shape[-1])
    SET_SCALES[tensor.type](blocks, size)
    return blocks.reshape(shape)


def _half(values: np.ndarray) -> np.ndarray:
    """[N] numbers as [N, 2] bytes of float16."""
    return values.astype("<f2")[:, None].view(np.uint8)


# Each takes [N, bytes of a block] and [N] deviations that the blocks' weights shall have. 4-bit codes deviate by
# 4.6 of their unit, and their middle is 7.5.


def _set_q4_0(blocks: np.ndarray, size: np.ndarray) -> None:
    blocks[:, :2] = _half(size / 4.6)


def _set_q4_1(blocks: np.ndarray, size: np.ndarray) -> None:
    blocks[:, :2] = _half(size / 4.6)
    blocks[:, 2:4] = _half(-7.5 * size / 4.6)


def _set_q4_k(blocks: np.ndarray, size: np.ndarray) -> None:
    # Codes times random 6-bit factors deviate by 218 units, random 6-bit minima of 7.5 units by 139: 258 together.
    blocks[:, :2] = _half(size / 258)
    blocks[:, 2:4] = _half(7.5 * size / 258)


def _set_q6_k(blocks: np.ndarray, size: np.ndarray) -> None:
    # 16 signed factors, here 16..31 of either sign, of codes that deviate by 18.5.
    factors = blocks[:, 192:208].view(np.int8)
    factors[:] = np.where(factors < 0, -1, 1) * (16 + (factors & 15))
    blocks[:, 208:210] = _half(size / (18.5 * 23.5))


SET_SCALES: Mapping[GGMLQuantizationType, Callable[[np.ndarray, np.ndarray], None]] = MappingProxyType(
    {
        GGMLQuantizationType.Q4_0: _set_q4_0,
        GGMLQuantizationType.Q4_1: _set_q4_1,
        GGMLQuantizationType.Q4_K: _set_q4_k,
        GGMLQuantizationType.Q6_K: _set_q6_k,
    }
)
