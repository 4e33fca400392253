"""A tiny checkpoint directory for tests that look at files and never compute with them."""

import json
import struct
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4,
    "intermediate_size": 6,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_hidden_layers": 1,
    "vocab_size": 5,
    "tie_word_embeddings": True,
}
SHAPES = {
    "model.embed_tokens.weight": [5, 4],
    "model.norm.weight": [4],
    "model.layers.0.input_layernorm.weight": [4],
    "model.layers.0.post_attention_layernorm.weight": [4],
    "model.layers.0.self_attn.q_proj.weight": [4, 4],
    "model.layers.0.self_attn.k_proj.weight": [2, 4],
    "model.layers.0.self_attn.v_proj.weight": [2, 4],
    "model.layers.0.self_attn.o_proj.weight": [4, 4],
    "model.layers.0.mlp.gate_proj.weight": [6, 4],
    "model.layers.0.mlp.up_proj.weight": [6, 4],
    "model.layers.0.mlp.down_proj.weight": [4, 6],
}


def float_header(shapes: dict[str, list[int]]) -> dict[str, Any]:
    """A safetensors header of contiguous F32 tensors."""
    header: dict[str, Any] = {}
    begin = 0
    for name, shape in shapes.items():
        end = begin + 4 * prod(shape)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}
        begin = end
    return header


def write_raw(path: Path, header: Any, num_data_bytes: int) -> Path:
    """A safetensors file with any header and zero data; a text header is taken as it is."""
    text = (header if isinstance(header, str) else json.dumps(header)).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(num_data_bytes))
    return path


@dataclass
class Checkpoint:
    """A Llama of one layer; tests change its parts before they write it."""

    directory: Path
    config: dict[str, Any] = field(default_factory=lambda: dict(CONFIG))
    shapes: dict[str, list[int]] = field(default_factory=lambda: dict(SHAPES))

    def write(self) -> Path:
        """As a single file."""
        self.write_config()
        self.write_shard("model.safetensors", self.shapes)
        return self.directory

    def write_sharded(self, with_index: bool = True) -> Path:
        """As two shards of alternate tensors."""
        self.write_config()
        names = list(self.shapes)
        weight_map: dict[str, str] = {}
        for number in (1, 2):
            file_name = f"model-{number:05d}-of-00002.safetensors"
            part = {name: self.shapes[name] for name in names[number - 1 :: 2]}
            self.write_shard(file_name, part)
            weight_map |= dict.fromkeys(part, file_name)
        if with_index:
            self.write_index(weight_map)
        return self.directory

    def write_config(self) -> None:
        self.directory.mkdir(exist_ok=True)
        (self.directory / "config.json").write_text(json.dumps(self.config))

    def write_shard(self, file_name: str, shapes: dict[str, list[int]]) -> Path:
        header = float_header(shapes)
        num_bytes = max(entry["data_offsets"][1] for entry in header.values())
        return write_raw(self.directory / file_name, header, num_bytes)

    def write_index(self, weight_map: dict[str, str]) -> None:
        (self.directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
