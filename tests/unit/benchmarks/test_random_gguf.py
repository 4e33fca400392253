import math
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader
from gguf.quants import dequantize

from benchmarks.edge_harness.geometry import GEOMETRIES
from benchmarks.edge_harness.random_gguf import FILE_TYPES, gguf_tensor_bytes, plan_tensors, random_gguf
from tests.unit.benchmarks.tiny_models import TINY

Q6_K = GGMLQuantizationType.Q6_K


def wider_layers(part: str) -> list[int]:
    tensors = plan_tensors(GEOMETRIES["spark-1.7b"], "Q4_K_M")
    return [int(each.hf_name.split(".")[2]) for each in tensors if part in each.hf_name and each.type is Q6_K]


def test_half_of_the_sensitive_layers_are_wider_in_q4_k_m() -> None:
    # First and last eighth of 28 layers, and every third between: what llama-quantize printed for this geometry.
    expected = [0, 1, 2, 5, 8, 11, 14, 17, 20, 23, 24, 25, 26, 27]
    assert wider_layers("v_proj") == wider_layers("down_proj") == expected
    assert wider_layers("q_proj") == []


@pytest.mark.parametrize("mix", FILE_TYPES)
def test_a_tied_embedding_has_six_bits_in_every_mix(mix: str) -> None:
    types = {each.name: each.type for each in plan_tensors(TINY, mix)}
    assert types["token_embd.weight"] is Q6_K
    assert types["output_norm.weight"] is GGMLQuantizationType.F32
    assert "output.weight" not in types


@pytest.mark.parametrize("mix", FILE_TYPES)
def test_the_file_is_read_back_with_weights_of_a_trained_model_s_size(mix: str, tmp_path: Path) -> None:
    reader = GGUFReader(random_gguf(TINY, mix, tmp_path))
    assert reader.fields["llama.attention.key_length"].contents() == TINY.head_dim
    assert len(reader.fields["tokenizer.ggml.tokens"].contents()) == TINY.vocab_size
    assert sum(tensor.n_bytes for tensor in reader.tensors) == gguf_tensor_bytes(TINY, mix)
    for tensor in reader.tensors:
        weights = dequantize(tensor.data, tensor.tensor_type)
        shape = TINY.tensors()["model.norm.weight"] if weights.ndim == 1 else weights.shape
        assert np.isfinite(weights).all()
        if len(shape) == 2:
            assert weights.std() == pytest.approx(1 / math.sqrt(shape[1]), rel=0.3), tensor.name


def test_it_is_made_once(tmp_path: Path) -> None:
    path = random_gguf(TINY, "Q4_0", tmp_path)
    written = path.stat().st_mtime_ns
    assert random_gguf(TINY, "Q4_0", tmp_path).stat().st_mtime_ns == written
    assert not list(tmp_path.glob("*.partial"))
