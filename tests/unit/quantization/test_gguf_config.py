from typing import Any

import numpy as np
import pytest

from vllm_omni.errors import WeightError
from vllm_omni.quantization.gguf_config import hf_config, hf_generation_config, permuted_heads
from vllm_omni.quantization.gguf_file import open_gguf


def config_of(sample: Any) -> dict[str, Any]:
    return hf_config(open_gguf(sample.write()), "bfloat16")


def test_llama(sample: Any) -> None:
    assert config_of(sample) == {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 263,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 128,
        "rope_theta": 50000.0,
        "rope_parameters": {"rope_theta": 50000.0, "rope_type": "default"},
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 0,
    }


def test_an_output_tensor_unties_the_embedding(sample: Any) -> None:
    sample.tensors["output.weight"] = sample.tensors["token_embd.weight"]
    assert config_of(sample)["tie_word_embeddings"] is False


def test_a_sliding_window_makes_it_mistral(sample: Any) -> None:
    sample.metadata["llama.attention.sliding_window"] = 64
    config = config_of(sample)
    assert (config["model_type"], config["architectures"]) == ("mistral", ["MistralForCausalLM"])
    assert config["sliding_window"] == 64


def test_query_and_key_rows_are_permuted_for_llama_and_mistral_only() -> None:
    config = {"num_attention_heads": 4, "num_key_value_heads": 2}
    for model_type, expected in {"llama": [4, 2, None], "mistral": [4, 2, None], "qwen2": [None] * 3}.items():
        names = ("blk.0.attn_q.weight", "blk.0.attn_k.bias", "blk.0.attn_v.weight")
        assert [permuted_heads({**config, "model_type": model_type}, name) for name in names] == expected


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({"type": "linear", "factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        (
            {"type": "yarn", "factor": 2.0, "original_context_length": 64},
            {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64},
        ),
    ],
)
def test_rope_scaling(sample: Any, metadata: dict[str, Any], expected: dict[str, Any]) -> None:
    sample.metadata |= {f"llama.rope.scaling.{key}": value for key, value in metadata.items()}
    assert config_of(sample)["rope_parameters"] == {"rope_theta": 50000.0, **expected}


def test_unknown_rope_factors_are_refused(sample: Any) -> None:
    sample.tensors["rope_freqs.weight"] = np.array([1.0, 2.0, 3.0, 32.0], np.float32)
    with pytest.raises(WeightError, match=r"rope_freqs\.weight does not follow the Llama 3\.1 rule"):
        config_of(sample)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"llama.expert_count": 8}, "llama.expert_count is 8, accepted: dense models only"),
        ({"llama.rope.dimension_count": 4}, "rope.dimension_count is 4, accepted: the head dimension, 8"),
        ({"llama.rope.scaling.type": "longrope"}, "rope.scaling.type is 'longrope', accepted: none, linear, yarn"),
        ({"llama.attention.value_length": 4}, "value_length is 4, accepted: the key length, 8"),
        ({"llama.attention.head_count": [4, 2]}, r"head_count is \[4, 2\], accepted: a whole number"),
        ({"llama.attention.layer_norm_rms_epsilon": 0.0}, "accepted: a positive number"),
        ({"llama.block_count": None}, "llama.block_count is None"),
        ({"tokenizer.ggml.eos_token_id": None}, "no tokenizer.ggml.eos_token_id"),
        ({"tokenizer.ggml.eos_token_id": 263}, "eos_token_id is 263, accepted: 0 to 262"),
    ],
)
def test_an_unaccepted_property_is_named(sample: Any, changes: dict[str, Any], message: str) -> None:
    merged = {**sample.metadata, **changes}
    sample.metadata = {key: value for key, value in merged.items() if value is not None}
    with pytest.raises(WeightError, match=message):
        config_of(sample)


def test_an_unaccepted_architecture_lists_the_accepted(sample: Any) -> None:
    sample.architecture = "gemma3"
    with pytest.raises(WeightError, match=r"general.architecture is 'gemma3', accepted: llama, qwen2, qwen3"):
        config_of(sample)


def test_a_file_without_embedding_is_refused(sample: Any) -> None:
    del sample.tensors["token_embd.weight"]
    with pytest.raises(WeightError, match=r"no tensor token_embd.weight"):
        config_of(sample)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, [0, 2]),
        ({"tokenizer.chat_template": "plain"}, [0]),
        ({"tokenizer.ggml.eos_token_id": 2}, [2]),
        ({"tokenizer.ggml.eot_token_id": 3}, [0, 3, 2]),
    ],
)
def test_generation_ends_at_every_end(sample: Any, changes: dict[str, Any], expected: list[int]) -> None:
    sample.metadata |= changes
    assert hf_generation_config(open_gguf(sample.write()))["eos_token_id"] == expected
