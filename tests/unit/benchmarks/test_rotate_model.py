from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from benchmarks.edge_harness.rotate_model import RotatedTensors, main, random_rotation, rotate
from tests.unit.benchmarks.tiny_models import TINY, write_checkpoint
from vllm_omni.errors import ConfigError
from vllm_omni.quantization.checkpoint import check_checkpoint
from vllm_omni.quantization.source_tensors import HfSource

Read = Callable[[str], np.ndarray]


def norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + TINY.norm_eps) * weight


def stream(read: Read, token_ids: np.ndarray, num_layers: int) -> np.ndarray:
    """Logits of a stack without attention between tokens: each head sees its own value alone."""
    hidden = read("model.embed_tokens.weight")[token_ids]
    for layer in range(num_layers):
        name = f"model.layers.{layer}."
        normed = norm(hidden, read(name + "input_layernorm.weight"))
        values = (normed @ read(name + "self_attn.v_proj.weight").T).reshape(len(hidden), TINY.num_kv_heads, -1)
        values = values.repeat(TINY.num_heads // TINY.num_kv_heads, axis=1).reshape(len(hidden), -1)
        scores = (normed @ read(name + "self_attn.q_proj.weight").T) * (
            normed @ read(name + "self_attn.k_proj.weight").T
        ).repeat(2, axis=1)
        hidden = hidden + (values * np.tanh(scores)) @ read(name + "self_attn.o_proj.weight").T
        normed = norm(hidden, read(name + "post_attention_layernorm.weight"))
        gate, up = (normed @ read(name + f"mlp.{part}_proj.weight").T for part in ("gate", "up"))
        hidden = hidden + (np.tanh(gate) * up) @ read(name + "mlp.down_proj.weight").T
    return norm(hidden, read("model.norm.weight"))


@pytest.fixture
def source(tmp_path: Path) -> HfSource:
    return HfSource(write_checkpoint(tmp_path / "model"))


def test_a_rotation_is_orthogonal_and_follows_its_seed() -> None:
    rotation = random_rotation(16, 3)
    assert rotation @ rotation.T == pytest.approx(np.eye(16), abs=1e-12)
    assert (rotation == random_rotation(16, 3)).all()
    assert not np.allclose(rotation, random_rotation(16, 4))


def test_the_function_is_the_same_and_the_weights_are_not(source: HfSource) -> None:
    def original(name: str) -> np.ndarray:
        return source.rows(name, 0, source.tensors[name].entry.shape[0]).astype(np.float64)

    rotated = RotatedTensors(source, random_rotation(TINY.hidden_size, 0))
    ids = np.array([5, 77, 300])
    expected = stream(original, ids, TINY.num_layers) @ original("model.embed_tokens.weight").T
    found = stream(rotated.compute, ids, TINY.num_layers) @ rotated.compute("lm_head.weight").T
    assert found == pytest.approx(expected, abs=1e-9)
    for name, shape in TINY.tensors().items():
        assert rotated.compute(name).shape == shape
        assert not np.allclose(rotated.compute(name), original(name)), name


def test_the_directory_is_a_sound_untied_checkpoint(source: HfSource, tmp_path: Path) -> None:
    out = tmp_path / "rotated"
    assert main(["--model", str(source.path), "--out", str(out), "--dtype", "bfloat16"]) == 0
    assert check_checkpoint(out).verified_hash
    written = HfSource(out)
    assert written.config["tie_word_embeddings"] is False
    assert written.tensors["lm_head.weight"].entry.dtype == "BF16"
    expected = RotatedTensors(source, random_rotation(TINY.hidden_size, 0)).compute("lm_head.weight")
    assert written.rows("lm_head.weight", 0, TINY.vocab_size) == pytest.approx(expected, rel=2**-8)
    assert (out / "tokenizer.json").read_text() == (source.path / "tokenizer.json").read_text()


def test_a_model_of_another_type_is_refused(source: HfSource, tmp_path: Path) -> None:
    source.config["model_type"] = "mamba"
    with pytest.raises(ConfigError, match="mamba"):
        rotate(source, tmp_path / "rotated", 0)
