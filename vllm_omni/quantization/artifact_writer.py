"""The weight file of an artifact, written tensor by tensor in any order.

Sizes are known before the first weight is quantized, so the header comes first and every tensor has its place. A
tensor is on disk when `write` returns: a run that was stopped goes on with the tensors that are missing.
"""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from vllm_omni.quantization.artifact import matrix_table
from vllm_omni.quantization.packed_format import METADATA_KEY, MatrixFormat
from vllm_omni.quantization.safetensors_format import TensorEntry, encode_header

WEIGHT_FILE_NAME = "model.safetensors"


class ArtifactFile:
    """One safetensors file: packed matrices first, then plain tensors.

    Attributes:
        path: The file.
        header: Its first bytes.
        num_bytes: Its size when complete.
    """

    def __init__(self, directory: Path, matrices: Mapping[str, MatrixFormat], tensors: Mapping[str, TensorEntry]):
        """Lays the file out; nothing is written.

        Args:
            directory: Where `model.safetensors` is to be.
            matrices: Names and formats, in file order.
            tensors: Names and types of the others, in file order.
        """
        self.path = directory / WEIGHT_FILE_NAME
        self._entries = {name: TensorEntry("U8", each.packed_shape) for name, each in matrices.items()} | dict(tensors)
        self.header = encode_header(list(self._entries.items()), {METADATA_KEY: matrix_table(matrices)})
        self._begins: dict[str, int] = {}
        position = len(self.header)
        for name, entry in self._entries.items():
            self._begins[name] = position
            position += entry.num_bytes
        self.num_bytes = position

    def prepare(self) -> None:
        """Makes the file with its header and full size, or goes on with the one that is there."""
        with self.path.open("r+b" if self.path.exists() else "w+b") as stream:
            stream.write(self.header)
            stream.truncate(self.num_bytes)

    def write(self, name: str, pieces: Iterable[bytes | np.ndarray]) -> None:
        """Writes one tensor and waits until it is on disk.

        Args:
            name: One of the tensors laid out.
            pieces: Its bytes, cut anywhere.
        """
        num_bytes = 0
        with self.path.open("r+b") as stream:
            stream.seek(self._begins[name])
            for piece in pieces:
                num_bytes += stream.write(memoryview(piece))  # type: ignore[arg-type]
            stream.flush()
            os.fsync(stream.fileno())
        expected = self._entries[name].num_bytes
        assert num_bytes == expected, f"{name}: wrote {num_bytes} bytes of {expected}"

    def read(self, name: str) -> np.ndarray:
        """A tensor that was written, as uint8 in its stored shape; plain tensors as a row of bytes."""
        entry = self._entries[name]
        data = np.fromfile(self.path, np.uint8, entry.num_bytes, offset=self._begins[name])
        return data.reshape(entry.shape) if entry.dtype == "U8" else data
