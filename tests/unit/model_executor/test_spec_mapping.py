from typing import Any

import pytest

from vllm_omni.errors import ConfigError
from vllm_omni.model_executor.models.decoder.spec_mapping import FAMILIES, shape_of

CONFIG: dict[str, Any] = {
    "omni_source_architecture": "LlamaForCausalLM",
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "rms_norm_eps": 1e-5,
}
VECTORS = {"input_norm", "post_norm"}
QKV_BIAS = {"q_bias", "k_bias", "v_bias"}


def family(name: str, **changes: Any) -> dict[str, Any]:
    return CONFIG | {"omni_source_architecture": f"{name}ForCausalLM"} | changes


def test_numbers() -> None:
    shape = shape_of(CONFIG)
    assert (shape.num_layers, shape.num_heads, shape.num_kv_heads, shape.head_dim) == (4, 4, 2, 16)
    assert (shape.hidden_size, shape.intermediate_size, shape.vocab_size) == (64, 96, 100)
    assert (shape.norm_eps, shape.activation, shape.attention_scale) == (1e-5, "silu", 0.25)


def test_a_stated_head_size_wins_over_the_computed_one() -> None:
    shape = shape_of(family("Qwen3", head_dim=32))
    assert shape.head_dim == 32
    assert shape.layer_matrices(3)["q"] == ("model.layers.3.self_attn.q_proj.weight", 128, 64)
    assert shape.layer_matrices(3)["o"] == ("model.layers.3.self_attn.o_proj.weight", 64, 128)
    assert shape.layer_matrices(3)["down"] == ("model.layers.3.mlp.down_proj.weight", 64, 96)
    assert shape.layer_vectors(0)["q_norm"] == ("model.layers.0.self_attn.q_norm.weight", 32)


@pytest.mark.parametrize(
    ("config", "vectors"),
    [
        (family("Llama"), VECTORS),
        (family("Llama", attention_bias=True), VECTORS | QKV_BIAS | {"o_bias"}),
        (family("Mistral"), VECTORS),
        (family("Qwen2"), VECTORS | QKV_BIAS),
        (family("Qwen3"), VECTORS | {"q_norm", "k_norm"}),
        (family("Qwen3", attention_bias=True), VECTORS | {"q_norm", "k_norm"} | QKV_BIAS | {"o_bias"}),
    ],
)
def test_vectors_of_a_layer(config: dict[str, Any], vectors: set[str]) -> None:
    assert set(shape_of(config).layer_vectors(0)) == vectors


@pytest.mark.parametrize(
    ("config", "windows"),
    [
        (family("Llama", sliding_window=8), (0, 0, 0, 0)),
        (family("Mistral", sliding_window=8), (8, 8, 8, 8)),
        (family("Mistral", sliding_window=None), (0, 0, 0, 0)),
        (family("Qwen2", sliding_window=8, max_window_layers=2), (0, 0, 0, 0)),
        (family("Qwen2", use_sliding_window=True, sliding_window=8, max_window_layers=2), (0, 0, 8, 8)),
        (family("Qwen2", use_sliding_window=True, sliding_window=8), (0, 0, 0, 0)),
        (
            family(
                "Qwen3",
                use_sliding_window=True,
                sliding_window=8,
                layer_types=["sliding_attention", "full_attention"] * 2,
            ),
            (8, 0, 8, 0),
        ),
    ],
)
def test_windows(config: dict[str, Any], windows: tuple[int, ...]) -> None:
    assert shape_of(config).windows == windows


def test_a_tied_model_uses_its_embedding_as_output_layer() -> None:
    assert shape_of(CONFIG).head_name == "lm_head.weight"
    assert shape_of(CONFIG | {"tie_word_embeddings": True}).head_name == "model.embed_tokens.weight"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"omni_source_architecture": "OtherForCausalLM"}, "accepted: " + ", ".join(sorted(FAMILIES))),
        ({"omni_source_architecture": None}, "omni_source_architecture is None"),
        ({"hidden_act": "gelu_pytorch_tanh"}, "hidden_act is 'gelu_pytorch_tanh'; accepted: silu"),
        ({"mlp_bias": True}, "mlp_bias is true"),
        ({"hidden_size": None}, "hidden_size is None; accepted: a whole number"),
        ({"num_key_value_heads": 3}, "4 heads, 3 key/value heads"),
        ({"head_dim": 15}, "head_dim 15"),
    ],
)
def test_what_the_stack_cannot_compute_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        shape_of(CONFIG | changes)
