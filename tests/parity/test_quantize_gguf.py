"""A published GGUF becomes an artifact with the very weights that the `gguf` package decodes."""

from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader
from gguf.quants import dequantize as gguf_dequantize

from vllm_omni.quantization.artifact import Artifact, read_artifact
from vllm_omni.quantization.checkpoint import check_checkpoint
from vllm_omni.quantization.gguf_tensors import hf_name
from vllm_omni.quantization.packing import QuantizedMatrix, dequantize, unpack
from vllm_omni.quantization.quantize import open_source, plan_quantize, quantize
from vllm_omni.quantization.quantize_settings import QuantizeSettings

HEADS = {"self_attn.q_proj": 9, "self_attn.k_proj": 3}


@pytest.fixture(scope="module")
def artifact(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """SmolLM2-135M-Instruct, taken over from its GGUF."""
    out = tmp_path_factory.mktemp("quantized") / "smollm2"
    quantize(plan_quantize(open_source(smollm2_gguf), QuantizeSettings(keep_grid=True)), out)
    return read_artifact(out)


@pytest.fixture(scope="module")
def expected(smollm2_gguf: Path) -> dict[str, np.ndarray]:
    """Hugging Face name to float32 in Hugging Face row order, as the `gguf` package decodes the file."""
    return {
        hf_name(tensor.name): halves_order(hf_name(tensor.name), gguf_dequantize(tensor.data, tensor.tensor_type))
        for tensor in GGUFReader(smollm2_gguf).tensors
    }


def halves_order(name: str, values: np.ndarray) -> np.ndarray:
    """Rows 2 i and 2 i + 1 of a query or key head go to i and i + half."""
    heads = next((count for part, count in HEADS.items() if part in name), None)
    if heads is None:
        return values
    head_dim = len(values) // heads
    result = np.empty_like(values)
    for row in range(len(values)):
        head, place = divmod(row, head_dim)
        pair, member = divmod(place, 2)
        result[head * head_dim + member * head_dim // 2 + pair] = values[row]
    return result


def stored(artifact: Artifact, name: str) -> QuantizedMatrix:
    matrix = artifact.matrices[name]
    each = matrix.format
    data = np.fromfile(matrix.path, np.uint8, each.num_bytes, offset=matrix.begin).reshape(each.packed_shape)
    return unpack(data, each.rows, each.columns, each.bits, each.group_size)


def test_the_artifact_is_sound(artifact: Artifact) -> None:
    report = check_checkpoint(artifact.directory)
    assert report.verified_hash
    assert report.num_parameters == 134_515_008
    assert len(artifact.matrices) == 211
    assert artifact.config["quantization_config"]["method"] == "gguf"


def test_four_bit_matrices_are_equal_bit_for_bit(artifact: Artifact, expected: dict[str, np.ndarray]) -> None:
    names = [name for name, each in artifact.matrices.items() if each.format.bits == 4]
    assert len(names) == 210
    for name in names:
        np.testing.assert_array_equal(dequantize(stored(artifact, name)), expected[name], err_msg=name, strict=True)


def test_the_eight_bit_embedding_is_equal_but_for_blocks_with_both_extremes(
    artifact: Artifact, expected: dict[str, np.ndarray]
) -> None:
    name = "model.embed_tokens.weight"
    matrix = stored(artifact, name)
    assert matrix.bits == 8
    values, wanted = dequantize(matrix), expected[name]
    differs = (values != wanted).reshape(len(values), -1, 32).any(axis=2)
    assert differs.mean() < 0.03
    codes = np.rint(wanted.reshape(len(values), -1, 32)[differs] / matrix.scale[differs].astype(np.float32)[:, None])
    assert (codes.max(axis=1) == 127).all()
    assert (codes.min(axis=1) == -127).all()
    step = np.abs(matrix.scale.astype(np.float32)).repeat(32, axis=1)
    assert (np.abs(values - wanted) <= step / 16).all()


def test_norms_are_equal(artifact: Artifact, expected: dict[str, np.ndarray]) -> None:
    assert len(artifact.tensors) == 61
    for name, tensor in artifact.tensors.items():
        values = np.fromfile(tensor.path, "<f4", tensor.entry.num_elements, offset=tensor.begin)
        np.testing.assert_array_equal(values, expected[name], err_msg=name)


def test_asking_for_bits_quantizes_anew(smollm2_gguf: Path) -> None:
    plan = plan_quantize(open_source(smollm2_gguf), QuantizeSettings(bits=4, group_size=64))
    assert {each.group_size for each in plan.matrices.values()} == {64}
    assert plan.kept == frozenset()
