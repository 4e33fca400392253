"""A one-layer artifact, mapped."""

import mmap
from pathlib import Path

import numpy as np
import pytest

from tests.unit.model_executor.conftest import EMBEDDING, SHAPE
from vllm_omni.errors import WeightError
from vllm_omni.model_executor.models.decoder.weights import (
    MappedMatrix,
    MappedWeights,
    as_float32,
    decoder_weights,
    placed_weights,
)
from vllm_omni.quantization.artifact import read_artifact
from vllm_omni.quantization.packed_format import MatrixFormat


@pytest.fixture
def mapped(artifact_directory: Path) -> MappedWeights:
    return MappedWeights(read_artifact(artifact_directory))


def test_a_matrix_is_a_view_of_the_mapped_file(mapped: MappedWeights, artifact_directory: Path) -> None:
    matrix = mapped.matrix(*EMBEDDING)
    assert matrix.data.shape == MatrixFormat(*EMBEDDING[1:], 8, 64).packed_shape
    assert matrix.data.ctypes.data % 64 == 0
    assert not matrix.data.flags.writeable
    base = matrix.data
    while isinstance(base.base, np.ndarray):
        base = base.base
    assert isinstance(base.base, (mmap.mmap, memoryview))
    file = (artifact_directory / "model.safetensors").read_bytes()
    assert matrix.data.tobytes() in file


def test_all_weights_of_the_stack_are_found(mapped: MappedWeights) -> None:
    weights = decoder_weights(mapped, SHAPE, lambda matrix: matrix)
    (layer,) = weights.layers
    assert isinstance(layer.down, MappedMatrix)
    assert (layer.down.format.rows, layer.down.format.columns) == (64, 96)
    assert layer.q_norm is None and layer.q_bias is None
    np.testing.assert_array_equal(weights.final_norm, np.arange(1, 65, dtype=np.float32))


def test_placing_gives_each_layer_its_table_and_group(mapped: MappedWeights) -> None:
    rope = np.ones((5, 16), np.float32)
    weights = decoder_weights(mapped, SHAPE, lambda matrix: matrix)
    (layer,) = placed_weights(weights, rope, [3]).layers
    assert layer.rope is rope
    assert layer.kv_group == 3
    assert layer.down is weights.layers[0].down


def test_a_matrix_of_another_shape_is_refused(mapped: MappedWeights) -> None:
    with pytest.raises(WeightError, match=r"needs a matrix model\.embed_tokens\.weight of 41 x 64.*one of 40 x 64"):
        mapped.matrix(EMBEDDING[0], 41, 64)


def test_a_missing_vector_is_refused(mapped: MappedWeights) -> None:
    with pytest.raises(
        WeightError, match=r"needs a vector model\.layers\.0\.x\.bias of 64, the weight files have none"
    ):
        mapped.vector("model.layers.0.x.bias", 64)


@pytest.mark.parametrize(
    ("raw", "dtype"),
    [
        (np.array([1.5, -2.0], "<f4").tobytes(), "F32"),
        (np.array([1.5, -2.0], "<f2").tobytes(), "F16"),
        (np.array([0x3FC0, 0xC000], "<u2").tobytes(), "BF16"),
    ],
)
def test_vectors_become_float32(raw: bytes, dtype: str) -> None:
    values = as_float32(np.frombuffer(raw, np.uint8), dtype)
    assert values.dtype == np.float32
    assert values.tolist() == [1.5, -2.0]
