from pathlib import Path

import numpy as np
import pytest

from benchmarks.edge_harness.native_model import bytes_per_token
from benchmarks.edge_harness.random_artifact import random_artifact, random_cells
from tests.unit.benchmarks.tiny_models import TINY
from vllm_omni.errors import ConfigError
from vllm_omni.quantization.artifact import read_artifact
from vllm_omni.quantization.checkpoint import check_checkpoint
from vllm_omni.quantization.packed_format import MatrixFormat
from vllm_omni.quantization.packing import dequantize, pack, unpack


def test_the_artifact_is_intact_and_of_the_geometry(tmp_path: Path) -> None:
    artifact = read_artifact(random_artifact(TINY, 64, 8, tmp_path))
    assert {name: each.format.bits for name, each in artifact.matrices.items() if each.format.bits != 4} == {
        "model.embed_tokens.weight": 8
    }
    assert artifact.config["vocab_size"] == TINY.vocab_size
    assert check_checkpoint(artifact.directory).verified_hash


def test_it_is_made_once(tmp_path: Path) -> None:
    first = random_artifact(TINY, 64, 4, tmp_path)
    written = (first / "model.safetensors").stat().st_mtime_ns
    assert random_artifact(TINY, 64, 4, tmp_path) == first
    assert (first / "model.safetensors").stat().st_mtime_ns == written
    assert random_artifact(TINY, 32, 4, tmp_path) != first


def test_a_decoded_token_reads_every_matrix_once(tmp_path: Path) -> None:
    artifact = read_artifact(random_artifact(TINY, 64, 4, tmp_path))
    num_weights = sum(shape[0] * shape[1] for shape in TINY.tensors().values() if len(shape) == 2)
    assert bytes_per_token(artifact) * 8 == num_weights * 4.5


def test_a_group_size_that_cuts_a_width_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="another --group-size"):
        random_artifact(TINY.__class__(**{**vars(TINY), "hidden_size": 192}), 128, 4, tmp_path)


@pytest.mark.parametrize("bits", [4, 8])
def test_random_weights_are_of_a_trained_model_s_size(bits: int) -> None:
    form = MatrixFormat(512, 256, bits, 64)
    cells = np.concatenate(list(random_cells(np.random.default_rng(0), form)))
    matrix = unpack(cells, 512, 256, bits, 64)
    assert (pack(matrix) == cells).all()
    weights = dequantize(matrix)
    assert weights.std() == pytest.approx(1 / 16, rel=0.1)
    assert abs(weights.mean()) < 0.002
    assert matrix.q.max() == (15 if bits == 4 else 254)
