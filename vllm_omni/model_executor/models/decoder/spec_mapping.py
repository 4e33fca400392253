"""What a family's `config.json` says about its decoder stack, in the terms of the shared stack.

Adding a family that the stack can compute is one function here and one row in `FAMILIES`. Loads neither torch nor vLLM,
so that a model which cannot be served is refused before an engine starts.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from vllm_omni.errors import ConfigError
from vllm_omni.quantization.artifact import SOURCE_ARCHITECTURE_KEY
from vllm_omni.quantization.tensor_table import head_defaults

# `hidden_act` to the stack's name of it. GELU is the exact one, with erf.
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu": "gelu"}

# Heads that the native core computes (`csrc/checks.cpp`).
HEAD_DIM_MULTIPLE = 8
MAX_HEAD_DIM = 512

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"


@dataclass(frozen=True)
class DecoderShape:
    """The stack of one model.

    Attributes:
        norm_eps: Added to the mean square in every normalisation.
        activation: `silu` or `gelu`.
        windows: For each layer, the keys that a query sees, itself included; 0: all before it.
        ties_embeddings: The output layer is the embedding's own matrix.
        has_qkv_bias: Query, key and value projections have a bias.
        has_o_bias: The output projection of attention has a bias.
        has_qk_norm: Each head of queries and keys is normalised before the rotation.
    """

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    norm_eps: float
    activation: str
    windows: tuple[int, ...]
    ties_embeddings: bool
    has_qkv_bias: bool = False
    has_o_bias: bool = False
    has_qk_norm: bool = False

    @property
    def attention_scale(self) -> float:
        """What scores are multiplied by."""
        return float(self.head_dim**-0.5)

    @property
    def head_name(self) -> str:
        """Tensor name of the output layer's matrix."""
        return EMBEDDING if self.ties_embeddings else HEAD

    def layer_matrices(self, layer: int) -> dict[str, tuple[str, int, int]]:
        """The stack's name of each matrix of a layer to its tensor name, rows and columns."""
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        hidden, inner = self.hidden_size, self.intermediate_size
        sizes = {
            "q": ("self_attn.q_proj", queries, hidden),
            "k": ("self_attn.k_proj", keys, hidden),
            "v": ("self_attn.v_proj", keys, hidden),
            "o": ("self_attn.o_proj", hidden, queries),
            "gate": ("mlp.gate_proj", inner, hidden),
            "up": ("mlp.up_proj", inner, hidden),
            "down": ("mlp.down_proj", hidden, inner),
        }
        return {
            field: (f"model.layers.{layer}.{name}.weight", rows, columns)
            for field, (name, rows, columns) in sizes.items()
        }

    def layer_vectors(self, layer: int) -> dict[str, tuple[str, int]]:
        """The stack's name of each vector of a layer to its tensor name and size."""
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        vectors = {
            "input_norm": ("input_layernorm.weight", self.hidden_size),
            "post_norm": ("post_attention_layernorm.weight", self.hidden_size),
        }
        if self.has_qk_norm:
            vectors["q_norm"] = ("self_attn.q_norm.weight", self.head_dim)
            vectors["k_norm"] = ("self_attn.k_norm.weight", self.head_dim)
        if self.has_qkv_bias:
            vectors["q_bias"] = ("self_attn.q_proj.bias", queries)
            vectors["k_bias"] = ("self_attn.k_proj.bias", keys)
            vectors["v_bias"] = ("self_attn.v_proj.bias", keys)
        if self.has_o_bias:
            vectors["o_bias"] = ("self_attn.o_proj.bias", self.hidden_size)
        return {field: (f"model.layers.{layer}.{name}", size) for field, (name, size) in vectors.items()}


def shape_of(config: Mapping[str, Any]) -> DecoderShape:
    """The stack that an artifact's configuration describes.

    Args:
        config: `config.json` of an artifact, or `to_dict()` of the configuration object made from it.

    Raises:
        ConfigError: The family is not known, a number is missing or impossible, or the model has a part that the stack
            does not compute.
    """
    family = config.get(SOURCE_ARCHITECTURE_KEY)
    if not isinstance(family, str) or family not in FAMILIES:
        raise ConfigError(
            f"config.json: {SOURCE_ARCHITECTURE_KEY} is {family!r}; accepted: {', '.join(sorted(FAMILIES))}. "
            "Serve the checkpoint that the artifact was made from"
        )
    return FAMILIES[family](config, _common(config))


def decodable_shape(config: Mapping[str, Any]) -> DecoderShape:
    """As `shape_of`, of a model that the stack computes too, whichever path runs it.

    Raises:
        ConfigError: As `shape_of`; or heads are of another size than the native core takes, or the position embeddings
            are not known.
    """
    from vllm_omni.model_executor.models.decoder.rope import rope_angles

    shape = shape_of(config)
    if shape.head_dim % HEAD_DIM_MULTIPLE or shape.head_dim > MAX_HEAD_DIM:
        raise ConfigError(
            f"config.json: head_dim is {shape.head_dim}; accepted in packed weights: multiples of {HEAD_DIM_MULTIPLE} "
            f"up to {MAX_HEAD_DIM}. Serve the checkpoint unpacked"
        )
    rotary_dim = rope_angles(config, shape.head_dim).rotary_dim
    if rotary_dim > shape.head_dim:
        raise ConfigError(
            f"config.json: {rotary_dim} of {shape.head_dim} head dimensions are rotated; accepted: at most all of them"
        )
    return shape


def _common(config: Mapping[str, Any]) -> DecoderShape:
    """What all families write alike."""
    num_layers, heads = _count(config, "num_hidden_layers"), _count(config, "num_attention_heads")
    hidden = _count(config, "hidden_size")
    kv_default, dim_default = head_defaults(config, heads, hidden)
    kv_heads, head_dim = _count(config, "num_key_value_heads", kv_default), _count(config, "head_dim", dim_default)
    if heads % kv_heads or head_dim % 2:
        raise ConfigError(
            f"config.json: {heads} heads, {kv_heads} key/value heads, head_dim {head_dim}; accepted: heads that "
            "key/value heads divide, and an even head_dim. The checkpoint is damaged"
        )
    activation = config.get("hidden_act", "silu")
    if activation not in ACTIVATIONS:
        raise ConfigError(f"config.json: hidden_act is {activation!r}; accepted: {', '.join(ACTIVATIONS)}")
    return DecoderShape(
        num_layers=num_layers,
        hidden_size=hidden,
        intermediate_size=_count(config, "intermediate_size"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=_count(config, "vocab_size"),
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        activation=ACTIVATIONS[activation],
        windows=(0,) * num_layers,
        ties_embeddings=bool(config.get("tie_word_embeddings", False)),
    )


def _count(config: Mapping[str, Any], key: str, default: int | None = None, least: int = 1) -> int:
    value = config.get(key)
    value = default if value is None else value
    if type(value) is not int or value < least:
        raise ConfigError(f"config.json: {key} is {value!r}; accepted: a whole number, {least} or more")
    return value


def _llama(config: Mapping[str, Any], common: DecoderShape) -> DecoderShape:
    if config.get("mlp_bias"):
        raise ConfigError("config.json: mlp_bias is true; accepted: false, the decoder's MLP has no bias")
    has_bias = bool(config.get("attention_bias"))
    return replace(common, has_qkv_bias=has_bias, has_o_bias=has_bias)


def _qwen2(config: Mapping[str, Any], common: DecoderShape) -> DecoderShape:
    return replace(common, has_qkv_bias=True, windows=_layer_windows(config, common.num_layers))


def _qwen3(config: Mapping[str, Any], common: DecoderShape) -> DecoderShape:
    has_bias = bool(config.get("attention_bias"))
    windows = _layer_windows(config, common.num_layers)
    return replace(common, has_qk_norm=True, has_qkv_bias=has_bias, has_o_bias=has_bias, windows=windows)


def _mistral(config: Mapping[str, Any], common: DecoderShape) -> DecoderShape:
    return replace(common, windows=(_count(config, "sliding_window", 0, least=0),) * common.num_layers)


def _layer_windows(config: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """Qwen's rule: layers from `max_window_layers` on have the window, unless `layer_types` says which do."""
    window = _count(config, "sliding_window", 0, least=0) if config.get("use_sliding_window") else 0
    if not window:
        return (0,) * num_layers
    first = _count(config, "max_window_layers", num_layers, least=0)
    types = config.get("layer_types") or ["full_attention"] * first + ["sliding_attention"] * num_layers
    if len(types) < num_layers:
        raise ConfigError(
            f"config.json: layer_types names {len(types)} layers, num_hidden_layers is {num_layers}; accepted: one "
            "name for each layer. The checkpoint is damaged"
        )
    return tuple(window if kind == "sliding_attention" else 0 for kind in types[:num_layers])


FAMILIES: Mapping[str, Callable[[Mapping[str, Any], DecoderShape], DecoderShape]] = {
    "LlamaForCausalLM": _llama,
    "MistralForCausalLM": _mistral,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
}
