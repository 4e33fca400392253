"""An artifact's weights as views of its mapped files: nothing is copied but norms and biases.

Mapped pages are the page cache's own. They count as file memory of the process, several processes share them, and the
system may drop them when it needs room.
"""

import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from vllm_omni.errors import WeightError
from vllm_omni.model_executor.models.decoder.spec_mapping import EMBEDDING, FINAL_NORM, DecoderShape
from vllm_omni.native.spec import DecoderWeights, FloatArray, LayerWeights
from vllm_omni.quantization.artifact import Artifact
from vllm_omni.quantization.packed_format import MatrixFormat

MatrixT = TypeVar("MatrixT")


@dataclass(frozen=True)
class MappedMatrix:
    """A packed matrix where its file is mapped.

    Attributes:
        data: [row blocks, groups, bytes of a cell] uint8, read-only, aligned to 64 bytes.
        format: Plain shape, bits and group size.
    """

    data: np.ndarray
    format: MatrixFormat


class MappedWeights:
    """The weight files of a checked artifact, mapped read-only and asked to be resident.

    Views keep their mapping alive; there is nothing to close.
    """

    def __init__(self, artifact: Artifact):
        self._artifact = artifact
        paths = [each.path for each in artifact.matrices.values()] + [each.path for each in artifact.tensors.values()]
        self._bytes = {path: _map(path) for path in dict.fromkeys(paths)}

    def matrix(self, name: str, rows: int, columns: int) -> MappedMatrix:
        """A matrix by its tensor name.

        Raises:
            WeightError: The artifact has no such matrix, or one of another shape.
        """
        stored = self._artifact.matrices.get(name)
        if stored is None or (stored.format.rows, stored.format.columns) != (rows, columns):
            found = "none" if stored is None else f"one of {stored.format.rows} x {stored.format.columns}"
            raise WeightError(
                f"{self._artifact.directory}: the configuration needs a matrix {name} of {rows} x {columns}, the "
                f"weight files have {found}; make the artifact again"
            )
        end = stored.begin + stored.format.num_bytes
        return MappedMatrix(
            self._bytes[stored.path][stored.begin : end].reshape(stored.format.packed_shape), stored.format
        )

    def vector(self, name: str, size: int) -> FloatArray:
        """A norm or bias as float32, a copy.

        Raises:
            WeightError: The artifact has no such tensor, or one of another size.
        """
        stored = self._artifact.tensors.get(name)
        if stored is None or stored.entry.shape != (size,):
            found = "none" if stored is None else f"one of shape {list(stored.entry.shape)}"
            raise WeightError(
                f"{self._artifact.directory}: the configuration needs a vector {name} of {size}, the weight files have "
                f"{found}; make the artifact again"
            )
        raw = self._bytes[stored.path][stored.begin : stored.begin + stored.entry.num_bytes]
        return as_float32(raw, stored.entry.dtype)


def _map(path: Path) -> np.ndarray:
    with path.open("rb") as stream:
        mapping = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    # Reading ahead now keeps the first request from waiting for the disk page by page.
    mapping.madvise(mmap.MADV_WILLNEED)
    return np.frombuffer(mapping, np.uint8)


def as_float32(raw: np.ndarray, dtype: str) -> FloatArray:
    """Little-endian bytes of a safetensors type, F32, F16 or BF16, as float32."""
    if dtype == "BF16":
        return (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)
    return raw.view({"F32": "<f4", "F16": "<f2"}[dtype]).astype(np.float32)


def decoder_weights(
    mapped: MappedWeights, shape: DecoderShape, make_matrix: Callable[[MappedMatrix], MatrixT]
) -> DecoderWeights[MatrixT]:
    """All weights of a decoder but the output layer, with an empty RoPE table until `placed_weights`.

    Args:
        make_matrix: What a path makes of a mapped matrix.
    """
    no_rope = np.empty((0, 0), np.float32)

    def layer_weights(layer: int) -> LayerWeights[MatrixT]:
        matrices: dict[str, Any] = {
            field: make_matrix(mapped.matrix(*each)) for field, each in shape.layer_matrices(layer).items()
        }
        vectors: dict[str, Any] = {field: mapped.vector(*each) for field, each in shape.layer_vectors(layer).items()}
        return LayerWeights(**matrices, **vectors, rope=no_rope, window=shape.windows[layer])

    return DecoderWeights(
        layers=tuple(layer_weights(layer) for layer in range(shape.num_layers)),
        final_norm=mapped.vector(FINAL_NORM, shape.hidden_size),
        embedding=make_matrix(mapped.matrix(EMBEDDING, shape.vocab_size, shape.hidden_size)),
    )


def placed_weights(
    weights: DecoderWeights[MatrixT], rope: FloatArray, groups: Sequence[int]
) -> DecoderWeights[MatrixT]:
    """The same weights with what is known once the cache is allocated: the RoPE table and each layer's KV group."""
    layers = (replace(layer, rope=rope, kv_group=group) for layer, group in zip(weights.layers, groups, strict=True))
    return replace(weights, layers=tuple(layers))
