"""What a quantizer reads: the tensors of a Hugging Face directory or of a GGUF file, a few rows at a time.

`TensorSource` is the contract; `HfSource` is the directory. `gguf_source.py` has the other one.
"""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from tokenizers import Tokenizer

from vllm_omni.errors import WeightError
from vllm_omni.quantization.checkpoint import check_checkpoint
from vllm_omni.quantization.checkpoint_files import open_checkpoint
from vllm_omni.quantization.conversion_record import FileEntry, hash_bytes, hash_file
from vllm_omni.quantization.packing import QuantizedMatrix
from vllm_omni.quantization.safetensors_format import TensorEntry

# What belongs to a checkpoint beside weights and configuration: tokenizer in all its forms, templates, defaults.
SIDE_FILES = (
    "generation_config.json",
    "tokenizer*",
    "*.jinja",
    "chat_template.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "LICENSE*",
)


@dataclass(frozen=True)
class SourceTensor:
    """One tensor of a source.

    Attributes:
        entry: Type and shape of an unpacked copy.
        grid: Bits and group size of the `omni_int4` grid that the values lie on already; None: on none.
    """

    entry: TensorEntry
    grid: tuple[int, int] | None = None


class TensorSource(Protocol):
    """A checkpoint to quantize. Reading is stateless; any number of calls in any order.

    Attributes:
        path: Directory or file.
        config: Content of `config.json`, as Hugging Face writes it.
        tensors: Hugging Face name to tensor.
    """

    path: Path
    config: dict[str, Any]
    tensors: Mapping[str, SourceTensor]

    def rows(self, name: str, begin: int, end: int) -> np.ndarray:
        """[end - begin, columns] float32; for a vector [end - begin]."""

    def grid_rows(self, name: str, begin: int, end: int) -> QuantizedMatrix:
        """The same rows on their own grid; only for tensors that have one."""

    def plain(self, name: str) -> bytes:
        """All bytes of the unpacked copy."""

    def hashes(self) -> dict[str, FileEntry]:
        """File name to content of what the values come from; reads the files whole."""

    def write_side_files(self, directory: Path) -> None:
        """Writes tokenizer, generation configuration and chat template."""

    def tokenizer(self) -> Tokenizer:
        """The tokenizer, for calibration text."""


class HfSource:
    """A `TensorSource` over a checkpoint directory; files are mapped, not read."""

    def __init__(self, directory: Path):
        """Checks the directory.

        Raises:
            WeightError: It is no sound checkpoint, it is quantized already, or it has tensors of other types than
                BF16, F16 and F32.
        """
        check_checkpoint(directory)
        files = open_checkpoint(directory)
        self.path = directory
        self.config = files.config
        _require_float(directory, self.config, files.tensors)
        self.tensors: Mapping[str, SourceTensor] = {name: SourceTensor(entry) for name, entry in files.tensors.items()}
        self._begins = {name: files.shards[holder].begins[name] for name, holder in files.holders.items()}
        self._files = {name: np.memmap(directory / name, np.uint8, "r") for name in sorted(files.shards)}
        self._maps = {name: self._files[holder] for name, holder in files.holders.items()}

    def rows(self, name: str, begin: int, end: int) -> np.ndarray:
        entry = self.tensors[name].entry
        row_bytes = entry.num_bytes // entry.shape[0]
        first = self._begins[name] + begin * row_bytes
        raw = self._maps[name][first : first + (end - begin) * row_bytes]
        return decode_floats(raw, entry.dtype).reshape(end - begin, *entry.shape[1:])

    def grid_rows(self, name: str, begin: int, end: int) -> QuantizedMatrix:
        raise AssertionError(f"{name} lies on no grid")

    def plain(self, name: str) -> bytes:
        first = self._begins[name]
        return self._maps[name][first : first + self.tensors[name].entry.num_bytes].tobytes()

    def hashes(self) -> dict[str, FileEntry]:
        # Of what is mapped: a file that was replaced since then is not where the values come from.
        shards = {name: hash_bytes(content.data) for name, content in self._files.items()}
        return {"config.json": hash_file(self.path / "config.json"), **shards}

    def write_side_files(self, directory: Path) -> None:
        for pattern in SIDE_FILES:
            for path in sorted(self.path.glob(pattern)):
                if path.is_file():
                    shutil.copyfile(path, directory / path.name)

    def tokenizer(self) -> Tokenizer:
        path = self.path / "tokenizer.json"
        if not path.is_file():
            raise WeightError(
                f"{self.path}: it has no tokenizer.json, which calibration needs; add it, or pass --calibration none"
            )
        return Tokenizer.from_file(str(path))


def decode_floats(raw: np.ndarray, dtype: str) -> np.ndarray:
    """uint8 bytes of BF16, F16 or F32 as a flat float32 array of its own."""
    if dtype == "BF16":
        return (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)
    return raw.view("<f2" if dtype == "F16" else "<f4").astype(np.float32)


def encode_floats(values: np.ndarray, dtype: str) -> bytes:
    """float32 values, representable in `dtype`, as its bytes."""
    if dtype == "BF16":
        return (values.view(np.uint32) >> 16).astype("<u2").tobytes()
    return values.astype("<f2" if dtype == "F16" else "<f4").tobytes()


def _require_float(directory: Path, config: Mapping[str, Any], tensors: Mapping[str, TensorEntry]) -> None:
    if quantization := config.get("quantization_config"):
        raise WeightError(
            f"{directory}: it is quantized already ({quantization.get('quant_method')!r}), accepted: checkpoints in "
            "BF16, F16 or F32; start from the original checkpoint"
        )
    for name, entry in tensors.items():
        if entry.dtype not in ("BF16", "F16", "F32"):
            raise WeightError(
                f"{directory}: tensor {name} has type {entry.dtype}, accepted: BF16, F16, F32; start from a checkpoint "
                "in one of these"
            )
