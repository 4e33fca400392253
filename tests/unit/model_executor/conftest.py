"""Artifacts of one layer."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vllm_omni.model_executor.models.decoder.spec_mapping import DecoderShape, shape_of
from vllm_omni.quantization.artifact_writer import ArtifactFile
from vllm_omni.quantization.packed_format import MatrixFormat
from vllm_omni.quantization.safetensors_format import TensorEntry

ARTIFACT_CONFIG = {
    "architectures": ["OmniDecoderForCausalLM"],
    "omni_source_architecture": "LlamaForCausalLM",
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "max_position_embeddings": 128,
    "vocab_size": 40,
    "tie_word_embeddings": True,
    "quantization_config": {"quant_method": "omni_int4", "version": 1},
}
SHAPE: DecoderShape = shape_of(ARTIFACT_CONFIG)
EMBEDDING = ("model.embed_tokens.weight", 40, 64)


def write_artifact(directory: Path, config: Mapping[str, Any]) -> Path:
    """An artifact of `config`, whose matrices hold random bytes and whose vectors count up from 1."""
    random = np.random.default_rng(3)
    shape = shape_of(config)
    matrices = {name: MatrixFormat(rows, columns, 4, 32) for name, rows, columns in shape.layer_matrices(0).values()}
    matrices[EMBEDDING[0]] = MatrixFormat(*EMBEDDING[1:], 8, 64)
    vectors = dict(shape.layer_vectors(0).values()) | {"model.norm.weight": 64}
    file = ArtifactFile(directory, matrices, {name: TensorEntry("F32", (size,)) for name, size in vectors.items()})
    file.prepare()
    for name, each in matrices.items():
        file.write(name, [random.integers(0, 256, each.num_bytes, dtype=np.uint8)])
    for name, size in vectors.items():
        file.write(name, [np.arange(1, size + 1, dtype=np.float32)])
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.fixture
def artifact_directory(tmp_path: Path) -> Path:
    return write_artifact(tmp_path, ARTIFACT_CONFIG)
