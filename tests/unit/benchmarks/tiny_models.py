"""Small models for the tests of the benchmarks: a geometry, and a checkpoint of it with float weights."""

import json
from pathlib import Path

import numpy as np

from benchmarks.edge_harness.geometry import Geometry
from benchmarks.edge_harness.toy_tokenizer import toy_vocabulary, write_tokenizer
from vllm_omni.quantization.safetensors_format import TensorEntry, write_shard

# Widths of 256, which every block type of llama.cpp divides, and a vocabulary with more than one row block.
TINY = Geometry("tiny", "llama", 4, 256, 512, 4, 2, 64, 320, 1e4)


def write_checkpoint(directory: Path, geometry: Geometry = TINY) -> Path:
    """A checkpoint in float32 with random weights and a tokenizer; embeddings are tied."""
    directory.mkdir()
    rng = np.random.default_rng(0)
    tensors = geometry.tensors()
    entries = [(name, TensorEntry("F32", shape)) for name, shape in tensors.items()]
    pieces = [_values(rng, shape).astype("<f4").tobytes() for shape in tensors.values()]
    write_shard(directory / "model.safetensors", entries, pieces)
    (directory / "config.json").write_text(json.dumps(geometry.config() | {"dtype": "float32"}))
    write_tokenizer(directory, toy_vocabulary(geometry.vocab_size), 512)
    return directory


def _values(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return rng.uniform(0.5, 1.5, shape) if len(shape) == 1 else rng.standard_normal(shape) / shape[1] ** 0.5
