"""Tiny GGUF files and checkpoint directories, made to be damaged."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from tokenizers.pre_tokenizers import ByteLevel

from tests.checkpoints import Checkpoint, write_raw

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, MLP = 32, 4, 2, 8, 64
MERGES = ["h e", "Ġ t", "Ġt he"]
TOKENS = [
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>"),
    *sorted(ByteLevel.alphabet()),
    *("he", "Ġt", "Ġthe"),
]
TOKEN_TYPES = [3, 3, 3, 4] + [1] * (len(TOKENS) - 4)


@dataclass
class GgufSample:
    """A one-layer Llama in GGUF; tests change its parts before `write`."""

    path: Path
    architecture: str = "llama"
    metadata: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, np.ndarray] = field(default_factory=dict)
    types: dict[str, str] = field(default_factory=dict)

    def write(self) -> Path:
        writer = GGUFWriter(self.path, self.architecture)
        for key, value in self.metadata.items():
            add_value(writer, key, value)
        for name, values in self.tensors.items():
            kind = GGMLQuantizationType[self.types.get(name, "F32")]
            writer.add_tensor(name, quantize(values, kind), raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return self.path


def add_value(writer: GGUFWriter, key: str, value: Any) -> None:
    adders: dict[type, Any] = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
    }
    adders.get(type(value), writer.add_array)(key, value)


def llama_metadata() -> dict[str, Any]:
    return {
        "llama.block_count": 1,
        "llama.context_length": 128,
        "llama.embedding_length": HIDDEN,
        "llama.feed_forward_length": MLP,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": KV_HEADS,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 50000.0,
        "llama.rope.dimension_count": HEAD_DIM,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": TOKEN_TYPES,
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.chat_template": "{{ messages[0].content }}<|im_end|>",
    }


def llama_tensors() -> dict[str, np.ndarray]:
    shapes = {
        "token_embd.weight": (len(TOKENS), HIDDEN),
        "output_norm.weight": (HIDDEN,),
        "blk.0.attn_norm.weight": (HIDDEN,),
        "blk.0.ffn_norm.weight": (HIDDEN,),
        "blk.0.attn_q.weight": (HEADS * HEAD_DIM, HIDDEN),
        "blk.0.attn_k.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
        "blk.0.attn_v.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
        "blk.0.attn_output.weight": (HIDDEN, HEADS * HEAD_DIM),
        "blk.0.ffn_gate.weight": (MLP, HIDDEN),
        "blk.0.ffn_up.weight": (MLP, HIDDEN),
        "blk.0.ffn_down.weight": (HIDDEN, MLP),
    }
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


@pytest.fixture
def sample(tmp_path: Path) -> GgufSample:
    return GgufSample(tmp_path / "tiny.gguf", metadata=llama_metadata(), tensors=llama_tensors())


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    return Checkpoint(tmp_path / "model")


@pytest.fixture(autouse=True)
def cache_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keeps verification markers out of the user's cache."""
    monkeypatch.setenv("VLLM_OMNI_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


# Given to tests as a fixture because test modules do not import each other.
@pytest.fixture
def raw_safetensors(tmp_path: Path) -> Any:
    def write(header: Any, num_data_bytes: int) -> Path:
        return write_raw(tmp_path / "raw.safetensors", header, num_data_bytes)

    return write
