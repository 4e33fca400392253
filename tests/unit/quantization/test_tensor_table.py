from typing import Any

import pytest

from vllm_omni.errors import WeightError
from vllm_omni.quantization.tensor_table import expected_tensors, has_table, require_expected

BASE: dict[str, Any] = {
    "hidden_size": 8,
    "intermediate_size": 6,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_hidden_layers": 2,
    "vocab_size": 5,
}


def config(model_type: str, **changes: Any) -> dict[str, Any]:
    return {**BASE, "model_type": model_type} | changes


def test_llama_has_no_biases_unless_asked() -> None:
    assert not any(name.endswith(".bias") for name in expected_tensors(config("llama")))
    with_bias = expected_tensors(config("llama", attention_bias=True, mlp_bias=True))
    layer = {name for name in with_bias if name.startswith("model.layers.1.") and name.endswith(".bias")}
    assert {name.split(".")[-2] for name in layer} == {
        *("q_proj", "k_proj", "v_proj", "o_proj"),
        *("gate_proj", "up_proj", "down_proj"),
    }
    assert with_bias["model.layers.1.mlp.down_proj.bias"] == (8,)


def test_qwen2_has_three_biases() -> None:
    table = expected_tensors(config("qwen2"))
    biases = {name: shape for name, shape in table.items() if name.startswith("model.layers.0.") and "bias" in name}
    assert biases == {
        "model.layers.0.self_attn.q_proj.bias": (8,),
        "model.layers.0.self_attn.k_proj.bias": (4,),
        "model.layers.0.self_attn.v_proj.bias": (4,),
    }


def test_qwen3_has_head_norms_and_its_own_head_dim() -> None:
    table = expected_tensors(config("qwen3"))
    assert table["model.layers.0.self_attn.q_norm.weight"] == (128,)
    assert table["model.layers.0.self_attn.k_proj.weight"] == (128, 8)
    assert table["model.layers.0.self_attn.o_proj.weight"] == (8, 256)


def test_explicit_head_dim_and_null_kv_heads() -> None:
    table = expected_tensors(config("mistral", head_dim=3, num_key_value_heads=None))
    assert table["model.layers.0.self_attn.k_proj.weight"] == (6, 8)


def test_missing_kv_heads_take_the_family_default() -> None:
    without = {key: value for key, value in config("mistral").items() if key != "num_key_value_heads"}
    assert expected_tensors(without)["model.layers.0.self_attn.k_proj.weight"] == (32, 8)


@pytest.mark.parametrize(("key", "value"), [("hidden_size", None), ("vocab_size", "5"), ("num_hidden_layers", 0)])
def test_an_unusable_key_is_named(key: str, value: Any) -> None:
    with pytest.raises(WeightError, match=f"{key} is {value!r}, accepted: a whole number"):
        expected_tensors(config("llama", **{key: value}))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),
        ({"architectures": ["LlamaForCausalLM"]}, True),
        ({"architectures": ["LlamaForSequenceClassification"]}, False),
        ({"model_type": "gemma3"}, False),
        ({"quantization_config": {"quant_method": "awq"}}, False),
    ],
)
def test_has_table(changes: dict[str, Any], expected: bool) -> None:
    assert has_table(config("llama") | changes) is expected


def test_the_output_projection_is_optional_only_when_tied() -> None:
    shapes = expected_tensors(config("llama"))
    del shapes["lm_head.weight"]
    require_expected(config("llama", tie_word_embeddings=True), shapes, "here")
    with pytest.raises(WeightError, match=r"1 missing: lm_head\.weight"):
        require_expected(config("llama"), shapes, "here")


def test_a_tied_output_projection_must_still_have_its_shape() -> None:
    shapes = expected_tensors(config("llama")) | {"lm_head.weight": (5, 9)}
    with pytest.raises(WeightError, match=r"lm_head\.weight is \[5, 9\], expected \[5, 8\]"):
        require_expected(config("llama", tie_word_embeddings=True), shapes, "here")


def test_rotary_buffers_are_ignored() -> None:
    shapes = expected_tensors(config("llama")) | {"model.layers.0.self_attn.rotary_emb.inv_freq": (2,)}
    require_expected(config("llama"), shapes, "here")


def test_all_differences_come_in_one_error_and_long_lists_are_cut() -> None:
    shapes = expected_tensors(config("llama"))
    del shapes["model.norm.weight"]
    shapes["model.embed_tokens.weight"] = (4, 8)
    shapes |= {f"extra.{index:02d}": (1,) for index in range(23)}
    with pytest.raises(WeightError) as caught:
        require_expected(config("llama"), shapes, "/models/x")
    message = str(caught.value)
    assert message.startswith("/models/x: ")
    assert "1 missing: model.norm.weight;" in message
    assert "23 unexpected: extra.00, " in message
    assert "extra.19 and 3 more;" in message
    assert "extra.20" not in message
    assert "1 of another shape: model.embed_tokens.weight is [4, 8], expected [5, 8]" in message
