"""A GGUF file as a source of tensors, and its block formats as grids of `omni_int4`.

    Q4_0   d * (code - 8)     4 bits, group 32: scale d, minimum -8 d
    Q4_1   d * code + m       4 bits, group 32: scale d, minimum m
    Q8_0   d * x              8 bits, group 32: scale d, minimum -128 d, or scale -d, minimum 128 d

d, m and their multiples by powers of two are float16, so nothing is rounded. A Q8_0 block that holds both 127 and -127
fits neither form; its minimum is -127 d rounded to float16, which moves the whole block by less than d / 16.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize
from tokenizers import Tokenizer

from vllm_omni.errors import WeightError
from vllm_omni.quantization.conversion_record import FileEntry, hash_bytes
from vllm_omni.quantization.gguf_config import hf_generation_config, permuted_heads
from vllm_omni.quantization.gguf_file import GgufTensor
from vllm_omni.quantization.gguf_import import plan_import
from vllm_omni.quantization.gguf_tensors import decode_tensor, paired_row_order
from vllm_omni.quantization.gguf_tokenizer import build_tokenizer, tokenizer_config
from vllm_omni.quantization.json_file import write_json
from vllm_omni.quantization.packing import QuantizedMatrix
from vllm_omni.quantization.safetensors_format import TensorEntry
from vllm_omni.quantization.source_tensors import SourceTensor, encode_floats

GROUP_SIZE = 32
# Block type to bits.
GRID_BITS = {"Q4_0": 4, "Q4_1": 4, "Q8_0": 8}
BLOCK_BYTES = {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}
PLAIN_DTYPES = {"F32": "F32", "F16": "F16", "BF16": "BF16"}


class GgufSource:
    """A `TensorSource` over a mapped GGUF file."""

    def __init__(self, path: Path):
        """Parses the file.

        Raises:
            ConfigError: There is no such file.
            WeightError: The file is damaged, or its architecture, tokenizer, tensor types or tensors are not accepted.
        """
        plan = plan_import(path, "bfloat16")
        self.path = path
        self.config: dict[str, Any] = plan.config
        self._file = plan.source
        self._tokenizer = build_tokenizer(plan.source)
        self._stored = {name: tensor for name, tensor, _ in plan.tensors}
        self.tensors: Mapping[str, SourceTensor] = {
            name: _source_tensor(tensor) for name, tensor in self._stored.items()
        }

    def rows(self, name: str, begin: int, end: int) -> np.ndarray:
        tensor = self._stored[name]
        blocks = self._stored_rows(tensor, begin, end)
        # Damaged scales give infinities; they are refused when a grid is searched.
        with np.errstate(all="ignore"):
            values = dequantize(blocks, GGMLQuantizationType[tensor.type_name])
        return np.asarray(values, np.float32).reshape(end - begin, *tensor.shape[1:])

    def grid_rows(self, name: str, begin: int, end: int) -> QuantizedMatrix:
        tensor = self._stored[name]
        blocks = self._stored_rows(tensor, begin, end)
        blocks = blocks.reshape(end - begin, -1, BLOCK_BYTES[tensor.type_name])
        try:
            return grid_matrix(blocks, tensor.type_name)
        except WeightError as error:
            raise WeightError(f"{self.path}: tensor {tensor.name}: {error}") from error

    def plain(self, name: str) -> bytes:
        tensor = self._stored[name]
        values = decode_tensor(self._file, tensor, permuted_heads(self.config, tensor.name))
        return encode_floats(np.ascontiguousarray(values, np.float32), self.tensors[name].entry.dtype)

    def hashes(self) -> dict[str, FileEntry]:
        return {self.path.name: hash_bytes(self._file.data.data)}

    def write_side_files(self, directory: Path) -> None:
        write_json(directory / "generation_config.json", hf_generation_config(self._file))
        write_json(directory / "tokenizer_config.json", tokenizer_config(self._file))
        self._tokenizer.save(str(directory / "tokenizer.json"))
        if template := self._file.metadata.get("tokenizer.chat_template"):
            (directory / "chat_template.jinja").write_text(template, encoding="utf-8")

    def tokenizer(self) -> Tokenizer:
        return self._tokenizer

    def _stored_rows(self, tensor: GgufTensor, begin: int, end: int) -> np.ndarray:
        """[end - begin, bytes of a row] uint8, rows in Hugging Face order."""
        stored = self._file.data[tensor.begin : tensor.begin + tensor.num_bytes].reshape(tensor.shape[0], -1)
        num_heads = permuted_heads(self.config, tensor.name)
        if num_heads is None:
            return np.asarray(stored[begin:end])
        return np.asarray(stored[paired_row_order(tensor.shape[0], num_heads)[begin:end]])


def grid_matrix(blocks: np.ndarray, type_name: str) -> QuantizedMatrix:
    """Blocks as a matrix of groups of 32.

    Args:
        blocks: [rows, blocks, bytes of a block] uint8.
        type_name: A key of `GRID_BITS`.

    Raises:
        WeightError: A scale or a minimum is not finite, or its minimum would be beyond float16.
    """
    rows = len(blocks)
    scale = np.ascontiguousarray(blocks[..., :2]).view("<f2")[..., 0]
    if type_name == "Q8_0":
        q, scale, minimum = _signed_codes(np.ascontiguousarray(blocks[..., 2:]).view(np.int8), scale)
    else:
        halves = blocks[..., -16:]
        q = np.concatenate([halves & 15, halves >> 4], axis=-1)
        has_minimum = type_name == "Q4_1"
        minimum = np.ascontiguousarray(blocks[..., 2:4]).view("<f2")[..., 0] if has_minimum else _times(scale, -8)
    if not (np.isfinite(scale).all() and np.isfinite(minimum).all()):
        raise WeightError("a scale or minimum is beyond float16; pass --bits or --group-size to quantize it anew")
    bits = GRID_BITS[type_name]
    return QuantizedMatrix(q.reshape(rows, -1), scale.astype(np.float16), minimum.astype(np.float16), bits, GROUP_SIZE)


def _signed_codes(codes: np.ndarray, scale: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes -128..127 [rows, blocks, 32] as q, scale and minimum."""
    wide = codes.astype(np.int16)
    is_upright = wide.max(axis=-1) <= 126
    is_mirrored = ~is_upright & (wide.min(axis=-1) >= -126)
    sign = np.where(is_mirrored, -1, 1).astype(np.int16)
    offset = np.where(is_upright | is_mirrored, 128, 127).astype(np.int16)
    q = np.clip(wide * sign[..., None] + offset[..., None], 0, 254).astype(np.uint8)
    return q, scale * sign.astype(np.float16), _times(scale, -(sign * offset).astype(np.float32))


def _times(scale: np.ndarray, factor: float | np.ndarray) -> np.ndarray:
    # Beyond float16 it becomes infinite and is refused.
    with np.errstate(over="ignore", invalid="ignore"):
        return (scale.astype(np.float32) * np.asarray(factor, np.float32)).astype(np.float16)


def _source_tensor(tensor: GgufTensor) -> SourceTensor:
    entry = TensorEntry(PLAIN_DTYPES.get(tensor.type_name, "F32"), tensor.shape)
    is_grid = tensor.type_name in GRID_BITS and len(tensor.shape) == 2
    return SourceTensor(entry, (GRID_BITS[tensor.type_name], GROUP_SIZE) if is_grid else None)
