from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from vllm_omni.quantization.artifact import matrix_table
from vllm_omni.quantization.artifact_writer import ArtifactFile
from vllm_omni.quantization.packed_format import MatrixFormat
from vllm_omni.quantization.safetensors_format import TensorEntry, read_shard

MATRICES = {"a": MatrixFormat(20, 40, 4, 32), "b": MatrixFormat(3, 70, 8, 64)}
TENSORS = {"c": TensorEntry("F32", (3,))}


def test_any_order_gives_a_file_that_the_safetensors_library_reads(tmp_path: Path) -> None:
    file = ArtifactFile(tmp_path, MATRICES, TENSORS)
    file.prepare()
    rng = np.random.default_rng(0)
    data = {name: rng.integers(0, 256, each.packed_shape, dtype=np.uint8) for name, each in MATRICES.items()}
    vector = np.array([1.0, 2.0, 3.0], np.float32)
    file.write("c", [vector.tobytes()])
    file.write("b", [data["b"]])
    file.write("a", [data["a"][:1], data["a"][1:]])
    with safe_open(file.path, "numpy") as reader:
        assert reader.metadata()["omni_int4"] == matrix_table(MATRICES)
        for name, values in data.items():
            np.testing.assert_array_equal(reader.get_tensor(name), values)
            np.testing.assert_array_equal(file.read(name), values)
        np.testing.assert_array_equal(reader.get_tensor("c"), vector)
    assert file.path.stat().st_size == file.num_bytes


def test_matrices_come_first_and_are_aligned(tmp_path: Path) -> None:
    file = ArtifactFile(tmp_path, MATRICES, TENSORS)
    file.prepare()
    shard = read_shard(file.path)
    assert list(shard.tensors) == ["a", "b", "c"]
    assert [shard.begins[name] % 64 for name in MATRICES] == [0, 0]


def test_preparing_again_keeps_what_was_written(tmp_path: Path) -> None:
    file = ArtifactFile(tmp_path, MATRICES, TENSORS)
    file.prepare()
    file.write("c", [bytes(range(12))])
    again = ArtifactFile(tmp_path, MATRICES, TENSORS)
    again.prepare()
    assert again.read("c").tobytes() == bytes(range(12))


def test_pieces_must_fill_the_tensor(tmp_path: Path) -> None:
    file = ArtifactFile(tmp_path, MATRICES, TENSORS)
    file.prepare()
    with pytest.raises(AssertionError, match="c: wrote 5 bytes of 12"):
        file.write("c", [bytes(5)])
