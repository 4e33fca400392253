"""Which tensors a decoder checkpoint must have, derived from its `config.json`.

Covers the model types of `TABLE_MODEL_TYPES`, unquantized, as causal language models. Other checkpoints have no
table here and are not judged.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from vllm_omni.errors import WeightError

Shape = tuple[int, ...]
MAX_LISTED = 20
TIED_NAME = "lm_head.weight"
# A buffer that old exports saved; it is computed from the configuration.
IGNORED_SUFFIX = "rotary_emb.inv_freq"


@dataclass(frozen=True)
class FamilyDefaults:
    """What a family takes for keys that its `config.json` may omit.

    Attributes:
        num_key_value_heads: None: as many as query heads.
        head_dim: None: hidden_size / num_attention_heads.
        has_qkv_bias: Query, key and value projections always have a bias, the output projection never.
        has_qk_norm: Queries and keys are normed per head.
    """

    num_key_value_heads: int | None = None
    head_dim: int | None = None
    has_qkv_bias: bool = False
    has_qk_norm: bool = False


TABLE_MODEL_TYPES: Mapping[str, FamilyDefaults] = {
    "llama": FamilyDefaults(),
    "mistral": FamilyDefaults(num_key_value_heads=8),
    "qwen2": FamilyDefaults(num_key_value_heads=32, has_qkv_bias=True),
    "qwen3": FamilyDefaults(num_key_value_heads=32, head_dim=128, has_qk_norm=True),
}


def head_defaults(config: Mapping[str, Any], num_heads: int, hidden_size: int) -> tuple[int, int]:
    """Key/value heads and head size of a configuration that leaves them out."""
    defaults = TABLE_MODEL_TYPES.get(str(config.get("model_type")), FamilyDefaults())
    # A null means as many as query heads; only a missing key takes the family's default.
    kv_heads = None if "num_key_value_heads" in config else defaults.num_key_value_heads
    return kv_heads or num_heads, defaults.head_dim or hidden_size // num_heads


def has_table(config: Mapping[str, Any]) -> bool:
    """Whether `expected_tensors` applies: a listed model type, a causal language model, not quantized."""
    architectures = config.get("architectures") or ["ForCausalLM"]
    return (
        config.get("model_type") in TABLE_MODEL_TYPES
        and not config.get("quantization_config")
        and str(architectures[0]).endswith("ForCausalLM")
    )


def expected_tensors(config: Mapping[str, Any]) -> dict[str, Shape]:
    """Name to shape of every tensor, the output projection included even where it is tied.

    Raises:
        WeightError: A key that decides shapes is missing or not a positive whole number.
    """
    hidden, vocab = _size(config, "hidden_size"), _size(config, "vocab_size")
    table: dict[str, Shape] = {
        "model.embed_tokens.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
        TIED_NAME: (vocab, hidden),
    }
    layer = _layer_tensors(config, hidden)
    for index in range(_size(config, "num_hidden_layers")):
        table.update({f"model.layers.{index}.{name}": shape for name, shape in layer.items()})
    return table


def require_expected(config: Mapping[str, Any], shapes: Mapping[str, Shape], origin: str) -> None:
    """Compares a checkpoint's tensors with its table and reports every difference in one error.

    Args:
        config: A configuration for which `has_table` holds.
        shapes: Name to shape of what is there.
        origin: Where it was found, for the message.

    Raises:
        WeightError: Tensors are missing, unexpected or of another shape.
    """
    expected = expected_tensors(config)
    optional = {TIED_NAME} if config.get("tie_word_embeddings") else set()
    missing = [name for name in expected if name not in shapes and name not in optional]
    unexpected = [name for name in shapes if name not in expected and not name.endswith(IGNORED_SUFFIX)]
    mismatched = [
        f"{name} is {list(shape)}, expected {list(expected[name])}"
        for name, shape in shapes.items()
        if name in expected and tuple(shape) != expected[name]
    ]
    kinds = {"missing": missing, "unexpected": unexpected, "of another shape": mismatched}
    problems = [f"{len(names)} {kind}: {_listed(names)}" for kind, names in kinds.items() if names]
    if problems:
        raise WeightError(
            f"{origin}: the tensors are not those of its configuration (model_type {config['model_type']}): "
            + "; ".join(problems)
            + ". Use a complete checkpoint together with its own config.json"
        )


def _layer_tensors(config: Mapping[str, Any], hidden: int) -> dict[str, Shape]:
    defaults = TABLE_MODEL_TYPES[config["model_type"]]
    num_heads = _size(config, "num_attention_heads")
    kv_default, dim_default = head_defaults(config, num_heads, hidden)
    num_kv_heads = _size(config, "num_key_value_heads", kv_default)
    head_dim = _size(config, "head_dim", dim_default)
    mlp = _size(config, "intermediate_size")
    rows = {
        "self_attn.q_proj": (num_heads * head_dim, hidden),
        "self_attn.k_proj": (num_kv_heads * head_dim, hidden),
        "self_attn.v_proj": (num_kv_heads * head_dim, hidden),
        "self_attn.o_proj": (hidden, num_heads * head_dim),
        "mlp.gate_proj": (mlp, hidden),
        "mlp.up_proj": (mlp, hidden),
        "mlp.down_proj": (hidden, mlp),
    }
    table: dict[str, Shape] = {f"{name}.weight": shape for name, shape in rows.items()}
    table |= {f"{name}.bias": rows[name][:1] for name in _biased(config, defaults, rows)}
    table |= {f"{name}.weight": (hidden,) for name in ("input_layernorm", "post_attention_layernorm")}
    if defaults.has_qk_norm:
        table |= {f"self_attn.{name}.weight": (head_dim,) for name in ("q_norm", "k_norm")}
    return table


def _biased(config: Mapping[str, Any], defaults: FamilyDefaults, names: Iterable[str]) -> list[str]:
    if defaults.has_qkv_bias:
        return ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]
    prefixes = tuple(
        prefix
        for prefix, key in (("self_attn.", "attention_bias"), ("mlp.", "mlp_bias"))
        if config.get(key) and config["model_type"] != "mistral"
    )
    return [name for name in names if name.startswith(prefixes)]


def _size(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    value = default if value is None else value
    if type(value) is not int or value < 1:
        raise WeightError(
            f"config.json: {key} is {config.get(key)!r}, accepted: a whole number, 1 or more; "
            f"needed for model_type {config.get('model_type')}"
        )
    return value


def _listed(names: list[str]) -> str:
    rest = len(names) - MAX_LISTED
    return ", ".join(names[:MAX_LISTED]) + (f" and {rest} more" if rest > 0 else "")
