from typing import Any

import pytest

from vllm_omni.errors import ConfigError
from vllm_omni.model_executor.models.decoder.spec_mapping import FAMILIES, decodable_shape, shape_of
from vllm_omni.quantization.tensor_table import expected_tensors

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
    ("model_type", "architecture", "kv_heads", "head_dim"),
    [("llama", "Llama", 16, 4), ("mistral", "Mistral", 8, 4), ("qwen2", "Qwen2", 32, 4), ("qwen3", "Qwen3", 32, 128)],
)
def test_heads_that_a_configuration_leaves_out(
    model_type: str, architecture: str, kv_heads: int, head_dim: int
) -> None:
    """The families' own defaults, by which the tensors of the checkpoint are checked too."""
    num_heads = max(16, kv_heads)
    config = family(architecture, model_type=model_type, num_attention_heads=num_heads, hidden_size=4 * num_heads)
    del config["num_key_value_heads"]
    shape = shape_of(config)
    assert (shape.num_kv_heads, shape.head_dim) == (kv_heads, head_dim)
    expected = expected_tensors(config)
    for name, rows, columns in shape.layer_matrices(0).values():
        assert expected[name] == (rows, columns)
    assert shape_of(config | {"num_key_value_heads": None}).num_kv_heads == num_heads


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


def test_what_can_be_decoded() -> None:
    assert decodable_shape(CONFIG) == shape_of(CONFIG)


SLIDING = {"omni_source_architecture": "Qwen3ForCausalLM", "use_sliding_window": True, "sliding_window": 8}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head_dim": 20}, "head_dim is 20; accepted in packed weights: multiples of 8 up to 512"),
        ({"head_dim": 1024}, "head_dim is 1024; accepted"),
        ({"partial_rotary_factor": 1.5}, "24 of 16 head dimensions are rotated; accepted: at most all of them"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope_type is 'longrope'; accepted: default"),
        (family("Mistral", sliding_window=-1), "sliding_window is -1; accepted: a whole number"),
        (family("Mistral", sliding_window=8.5), "sliding_window is 8.5; accepted: a whole number"),
        (SLIDING | {"max_window_layers": "all"}, "max_window_layers is 'all'; accepted: a whole number"),
        (SLIDING | {"layer_types": ["full_attention"] * 3}, "layer_types names 3 layers, num_hidden_layers is 4"),
    ],
)
def test_what_cannot_be_decoded_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        decodable_shape(CONFIG | changes)
