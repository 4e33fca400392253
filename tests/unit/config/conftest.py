import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

LLAMA_CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "max_position_embeddings": 2048,
    "torch_dtype": "bfloat16",
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 64,
    "vocab_size": 256,
}


@pytest.fixture
def make_model(tmp_path: Path) -> Callable[..., Path]:
    """Writes a checkpoint directory without weights: keywords replace config keys, None removes one."""

    def make(files: dict[str, str] | None = None, **config: Any) -> Path:
        directory = tmp_path / "model"
        directory.mkdir(exist_ok=True)
        values = {key: value for key, value in {**LLAMA_CONFIG, **config}.items() if value is not None}
        (directory / "config.json").write_text(json.dumps(values))
        for name, text in (files or {}).items():
            (directory / name).write_text(text)
        return directory

    return make


@pytest.fixture
def model(make_model: Callable[..., Path]) -> str:
    return str(make_model())


@pytest.fixture
def write_yaml(tmp_path: Path) -> Callable[..., Path]:
    def write(text: str, name: str = "deploy.yaml") -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    return write
