"""Shapes of models that are benchmarked with random weights, and the names of their tensors in both file formats."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from vllm_omni.errors import ConfigError
from vllm_omni.quantization.gguf_tensors import GLOBAL_NAMES, LAYER_NAMES
from vllm_omni.quantization.tensor_table import TIED_NAME, Shape, expected_tensors

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
# Longest sequence of a made model: what is timed needs no more, and the rotary tables stay small.
MAX_POSITIONS = 20480
_GGUF_GLOBAL = {hf: gguf for gguf, hf in GLOBAL_NAMES.items()}
_GGUF_LAYER = {hf: gguf for gguf, hf in LAYER_NAMES.items()}


@dataclass(frozen=True)
class Geometry:
    """A decoder's numbers; embeddings are tied.

    Attributes:
        name: As typed after `--geometry`.
        model_type: `llama` or `qwen3`; the architecture has the same name in GGUF.
    """

    name: str
    model_type: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rope_theta: float
    norm_eps: float = 1e-6

    def config(self) -> dict[str, Any]:
        """What `config.json` says about an unquantized checkpoint."""
        return {
            "architectures": [ARCHITECTURES[self.model_type]],
            "model_type": self.model_type,
            "num_hidden_layers": self.num_layers,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab_size,
            "max_position_embeddings": MAX_POSITIONS,
            "rope_theta": self.rope_theta,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
            "rms_norm_eps": self.norm_eps,
            "hidden_act": "silu",
            "attention_bias": False,
            "tie_word_embeddings": True,
            "dtype": "bfloat16",
        }

    def tensors(self) -> dict[str, Shape]:
        """Hugging Face name to shape; the tied output layer is the embedding and not listed."""
        return {name: shape for name, shape in expected_tensors(self.config()).items() if name != TIED_NAME}


GEOMETRIES: Mapping[str, Geometry] = MappingProxyType(
    {
        each.name: each
        for each in (
            Geometry("qwen3-0.6b", "qwen3", 28, 1024, 3072, 16, 8, 128, 151936, 1e6),
            Geometry("qwen3-1.7b", "qwen3", 28, 2048, 6144, 16, 8, 128, 151936, 1e6),
            # Widths and counts of Spark-X2.5-1.7B in a plain stack: the same matrices but for its 8-row head gates.
            Geometry("spark-1.7b", "llama", 28, 2048, 6656, 8, 2, 256, 131072, 1e4),
        )
    }
)


def gguf_name(hf_name: str) -> str:
    """The GGUF name of a tensor.

    Raises:
        ConfigError: It has none.
    """
    if hf_name in _GGUF_GLOBAL:
        return _GGUF_GLOBAL[hf_name]
    if hf_name.startswith("model.layers."):
        layer, _, rest = hf_name.removeprefix("model.layers.").partition(".")
        part, _, kind = rest.rpartition(".")
        if part in _GGUF_LAYER:
            return f"blk.{layer}.{_GGUF_LAYER[part]}.{kind}"
    raise ConfigError(f"tensor {hf_name} has no counterpart in GGUF; accepted: those of Llama and Qwen3 decoders")
