"""GGUF tensors as Hugging Face tensors: names, row order and values.

GGUF stores the query and key rows of Llama-type models for a rotary embedding of neighbouring pairs (0, 1), (2, 3)...;
Hugging Face pairs the first half of a head with its second half. Rows are whole runs of quantized blocks, so they are
put back in order before they are decoded, and only a few thousand rows are in memory at a time.
"""

import re
from collections.abc import Iterator

import numpy as np
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize, quantize

from vllm_omni.errors import WeightError
from vllm_omni.quantization.gguf_file import GgufFile, GgufTensor

ROPE_FACTORS_NAME = "rope_freqs.weight"
GLOBAL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
LAYER_PATTERN = re.compile(r"blk\.(?P<layer>\d+)\.(?P<part>\w+)\.(?P<kind>weight|bias)")
# Output type to the largest magnitude that it holds and its safetensors name.
OUTPUT_LIMITS = {"bfloat16": 3.3895313892515355e38, "float16": 65504.0, "float32": 3.4028234663852886e38}
SAFETENSORS_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
# 4 MiB of float32 at a time.
ELEMENTS_PER_PIECE = 1 << 20


def hf_name(gguf_name: str) -> str:
    """The Hugging Face name of a tensor; a name that has none is given back unchanged."""
    match = LAYER_PATTERN.fullmatch(gguf_name)
    if match and match["part"] in LAYER_NAMES:
        return f"model.layers.{match['layer']}.{LAYER_NAMES[match['part']]}.{match['kind']}"
    return GLOBAL_NAMES.get(gguf_name, gguf_name)


def decode_tensor(source: GgufFile, tensor: GgufTensor, num_heads: int | None = None) -> np.ndarray:
    """The whole tensor as float32 in its own shape; rows of `num_heads` heads are put in Hugging Face order."""
    return np.concatenate(list(_decoded_pieces(source, tensor, num_heads))).reshape(tensor.shape)


def encoded_pieces(source: GgufFile, tensor: GgufTensor, dtype: str, num_heads: int | None = None) -> Iterator[bytes]:
    """The tensor's bytes in the output type, in pieces of about a million elements.

    Args:
        source: The mapped file.
        tensor: One of its tensors.
        dtype: A key of `OUTPUT_LIMITS`.
        num_heads: Heads whose rows are stored for neighbouring pairs; None: rows are in order already.

    Raises:
        WeightError: A value is not finite, or does not fit the output type.
    """
    for values in _decoded_pieces(source, tensor, num_heads):
        _require_representable(source, tensor, values, dtype)
        yield _encode(values, dtype)


def paired_row_order(num_rows: int, num_heads: int) -> np.ndarray:
    """[num_rows] int64: the stored row that belongs at each Hugging Face position."""
    return np.arange(num_rows).reshape(num_heads, -1, 2).swapaxes(1, 2).reshape(num_rows)


def _decoded_pieces(source: GgufFile, tensor: GgufTensor, num_heads: int | None) -> Iterator[np.ndarray]:
    # A vector has one element per row, so that a permuted bias works like a permuted matrix.
    num_rows = tensor.shape[0]
    rows = source.data[tensor.begin : tensor.begin + tensor.num_bytes]
    is_blocked = tensor.type_name.startswith("Q") and len(tensor.shape) == 1
    rows = rows.reshape(1 if is_blocked else num_rows, -1)
    order = paired_row_order(num_rows, num_heads) if num_heads else np.arange(len(rows))
    rows_per_piece = max(1, ELEMENTS_PER_PIECE * len(rows) // int(np.prod(tensor.shape)))
    for begin in range(0, len(order), rows_per_piece):
        yield _decode(rows[order[begin : begin + rows_per_piece]], tensor.type_name)


def _decode(rows: np.ndarray, type_name: str) -> np.ndarray:
    # Damaged scales give infinities; they are refused later, with the tensor's name.
    with np.errstate(all="ignore"):
        return dequantize(rows, GGMLQuantizationType[type_name]).reshape(-1)


def _require_representable(source: GgufFile, tensor: GgufTensor, values: np.ndarray, dtype: str) -> None:
    if not np.isfinite(values).all():
        raise WeightError(f"{source.path}: tensor {tensor.name} holds values that are not finite; fetch the file again")
    largest = float(np.abs(values).max())
    if largest > OUTPUT_LIMITS[dtype]:
        raise WeightError(
            f"{source.path}: tensor {tensor.name} holds magnitude {largest:g}, {dtype} ends at "
            f"{OUTPUT_LIMITS[dtype]:g}; pass --dtype bfloat16 or float32"
        )


def _encode(values: np.ndarray, dtype: str) -> bytes:
    if dtype == "bfloat16":
        return quantize(values.reshape(1, -1), GGMLQuantizationType.BF16).tobytes()
    return values.astype("<f2" if dtype == "float16" else "<f4").tobytes()
