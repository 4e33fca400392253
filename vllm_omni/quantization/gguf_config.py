"""`config.json` and `generation_config.json` from GGUF metadata.

Covers the architectures of `ARCHITECTURES`. Nothing is guessed: a property that changes the model's function and has
no counterpart here (experts, partial rotary embeddings, unknown rope scaling) is refused.
"""

import math
from typing import Any

import numpy as np

from vllm_omni.errors import WeightError
from vllm_omni.quantization.gguf_file import GgufFile
from vllm_omni.quantization.gguf_tensors import ROPE_FACTORS_NAME, decode_tensor

# GGUF architecture to Hugging Face class; the model type has the same name. Mistral files say `llama`.
ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
# The model types whose query and key rows are stored in pair order: those of the architecture `llama`.
PAIRED_ROWS_MODEL_TYPES = ("llama", "mistral")
# Key in Hugging Face files to word in GGUF's.
SPECIAL_TOKENS = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
# Ends of turn that chat templates write; a model stops at the one that its template uses.
TURN_ENDS = ("<|im_end|>", "<|eot_id|>")
DEFAULT_ROPE_THETA = 10000.0
# Fixed by the Llama 3.1 release; only the factor differs between models.
LLAMA3_LOW, LLAMA3_HIGH, LLAMA3_ORIGINAL_TOKENS = 1.0, 4.0, 8192


class _Facts:
    """Typed access to the metadata of one architecture."""

    def __init__(self, source: GgufFile):
        self.source = source
        self.architecture: str = source.metadata.get("general.architecture", "")
        if self.architecture not in ARCHITECTURES:
            raise WeightError(
                f"{source.path}: general.architecture is {self.architecture!r}, accepted: {', '.join(ARCHITECTURES)}"
            )

    def refused(self, key: str, accepted: str) -> WeightError:
        value = self.source.metadata.get(self._key(key))
        return WeightError(f"{self.source.path}: {self._key(key)} is {value!r}, accepted: {accepted}")

    def get(self, key: str) -> Any:
        return self.source.metadata.get(self._key(key))

    def count(self, key: str, default: int | None = None) -> int:
        value = self.get(key)
        value = default if value is None else value
        if type(value) is not int or value < 1:
            raise self.refused(key, "a whole number, 1 or more")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key)
        value = default if value is None else value
        if not isinstance(value, int | float) or not value > 0:
            raise self.refused(key, "a positive number")
        return float(value)

    def _key(self, key: str) -> str:
        return f"{self.architecture}.{key}"


def hf_config(source: GgufFile, dtype: str) -> dict[str, Any]:
    """The model configuration.

    Args:
        source: The parsed file.
        dtype: Type of the tensors to be written.

    Raises:
        WeightError: The architecture or a property of it is not accepted, or a needed key is missing.
    """
    facts = _Facts(source)
    if facts.get("expert_count"):
        raise facts.refused("expert_count", "dense models only (absent or 0)")
    config: dict[str, Any] = {"architectures": [ARCHITECTURES[facts.architecture]], "model_type": facts.architecture}
    config |= _sizes(facts)
    config |= _rope(facts, config["head_dim"])
    config |= {
        "rms_norm_eps": facts.number("attention.layer_norm_rms_epsilon"),
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in source.tensors,
        "dtype": dtype,
    }
    return config | _family(facts) | special_ids(source)


def hf_generation_config(source: GgufFile) -> dict[str, Any]:
    """Token ids that generation needs; `eos_token_id` lists every end, the chat template's end of turn included."""
    ids = special_ids(source)
    tokens = source.metadata["tokenizer.ggml.tokens"]
    template = source.metadata.get("tokenizer.chat_template", "")
    ends = [ids["eos_token_id"], *token_ids(source, {"eot": "eot", "eom": "eom"}).values()]
    ends += [tokens.index(end) for end in TURN_ENDS if end in template and end in tokens]
    return ids | {"eos_token_id": list(dict.fromkeys(ends))}


def special_ids(source: GgufFile) -> dict[str, int]:
    """The ids among beginning, end and padding of text that the file names; the end must be there."""
    ids = token_ids(source, SPECIAL_TOKENS)
    if "eos_token_id" not in ids:
        raise WeightError(f"{source.path}: it has no tokenizer.ggml.eos_token_id; generation could not stop")
    return ids


def token_ids(source: GgufFile, words: dict[str, str]) -> dict[str, int]:
    """The ids that the file has, by the names asked for; `words` maps a name to GGUF's word for it."""
    keys = {name: f"tokenizer.ggml.{word}_token_id" for name, word in words.items()}
    ids = {name: source.metadata[key] for name, key in keys.items() if key in source.metadata}
    num_tokens = len(source.metadata.get("tokenizer.ggml.tokens", ()))
    for name, index in ids.items():
        if type(index) is not int or not 0 <= index < num_tokens:
            raise WeightError(f"{source.path}: {keys[name]} is {index!r}, accepted: 0 to {num_tokens - 1}")
    return ids


def permuted_heads(config: dict[str, Any], gguf_name: str) -> int | None:
    """Heads whose rows of this tensor are stored in pair order; None where rows need no reordering."""
    if config["model_type"] not in PAIRED_ROWS_MODEL_TYPES:
        return None
    if ".attn_q." in gguf_name:
        return config["num_attention_heads"]
    return config["num_key_value_heads"] if ".attn_k." in gguf_name else None


def _sizes(facts: _Facts) -> dict[str, int]:
    embedding = facts.source.tensors.get("token_embd.weight")
    if embedding is None:
        raise WeightError(f"{facts.source.path}: it has no tensor token_embd.weight; only whole models are accepted")
    hidden, num_heads = facts.count("embedding_length"), facts.count("attention.head_count")
    head_dim = facts.count("attention.key_length", hidden // num_heads)
    if facts.count("attention.value_length", head_dim) != head_dim:
        raise facts.refused("attention.value_length", f"the key length, {head_dim}")
    return {
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "intermediate_size": facts.count("feed_forward_length"),
        "num_hidden_layers": facts.count("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": facts.count("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "max_position_embeddings": facts.count("context_length"),
    }


def _family(facts: _Facts) -> dict[str, Any]:
    tensors = facts.source.tensors
    if facts.architecture == "qwen2":
        return {"use_sliding_window": False}
    family: dict[str, Any] = {"attention_bias": "blk.0.attn_q.bias" in tensors}
    if facts.architecture == "qwen3":
        return family | {"use_sliding_window": False}
    if facts.get("attention.sliding_window"):
        window = facts.count("attention.sliding_window")
        return {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": window}
    return family | {"mlp_bias": "blk.0.ffn_up.bias" in tensors}


def _rope(facts: _Facts, head_dim: int) -> dict[str, Any]:
    if facts.count("rope.dimension_count", head_dim) != head_dim or head_dim % 2:
        raise facts.refused("rope.dimension_count", f"the head dimension, {head_dim}, an even number")
    theta = facts.number("rope.freq_base", DEFAULT_ROPE_THETA)
    scaling = _llama3_scaling(facts, theta, head_dim) or _named_scaling(facts)
    return {"rope_theta": theta, "rope_parameters": {"rope_theta": theta, **scaling}}


def _named_scaling(facts: _Facts) -> dict[str, Any]:
    kind = facts.get("rope.scaling.type") or "none"
    if kind == "none":
        return {"rope_type": "default"}
    if kind == "linear":
        return {"rope_type": "linear", "factor": facts.number("rope.scaling.factor")}
    if kind == "yarn":
        original = facts.count("rope.scaling.original_context_length")
        factor = facts.number("rope.scaling.factor")
        return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    raise facts.refused("rope.scaling.type", "none, linear, yarn")


def _llama3_scaling(facts: _Facts, theta: float, head_dim: int) -> dict[str, Any] | None:
    """Llama 3.1 files store the divisors of the rotary frequencies; finds the factor and checks that they agree."""
    tensor = facts.source.tensors.get(ROPE_FACTORS_NAME)
    if tensor is None:
        return None
    stored = decode_tensor(facts.source, tensor)
    factor = float(np.max(stored, initial=1.0))
    expected = _llama3_divisors(theta, head_dim, factor)
    if stored.shape != expected.shape or not np.allclose(stored, expected, rtol=1e-4):
        raise WeightError(
            f"{facts.source.path}: the tensor {ROPE_FACTORS_NAME} does not follow the Llama 3.1 rule, accepted: "
            f"low {LLAMA3_LOW:g}, high {LLAMA3_HIGH:g}, {LLAMA3_ORIGINAL_TOKENS} original tokens"
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": LLAMA3_LOW,
        "high_freq_factor": LLAMA3_HIGH,
        "original_max_position_embeddings": LLAMA3_ORIGINAL_TOKENS,
    }


def _llama3_divisors(theta: float, head_dim: int, factor: float) -> np.ndarray:
    """[head_dim / 2] float64: 1 for short waves, `factor` for long ones, a blend in frequency between."""
    wavelengths = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    blend = (LLAMA3_ORIGINAL_TOKENS / wavelengths - LLAMA3_LOW) / (LLAMA3_HIGH - LLAMA3_LOW)
    blend = np.clip(blend, 0.0, 1.0)
    return 1.0 / ((1.0 - blend) / factor + blend)
