"""Stage fields that follow from a checkpoint being a quantized artifact, and values that it rules out."""

from collections.abc import Iterator, Mapping
from typing import Any

from vllm_omni.config.layers import LayeredTree
from vllm_omni.config.model_facts import ModelFacts
from vllm_omni.errors import ConfigError

# `quantization_config.quant_method` of an artifact, and the name of the loader that maps its files.
QUANT_METHOD = "omni_int4"
REASON = f"an artifact ({QUANT_METHOD})"
# For each field the values that may be given, with what each means. None: left to vLLM. Unset counts as "auto".
MEANINGS: Mapping[str, Mapping[str, str | None]] = {
    # Activations are float32 between the products, whatever type the checkpoint had.
    "dtype": {"auto": "float32", "float32": "float32", "float": "float32"},
    "kv_cache_dtype": {
        "auto": "bfloat16",
        "bfloat16": "bfloat16",
        "int8": "int8_per_token_head",
        "int8_per_token_head": "int8_per_token_head",
    },
    "load_format": {"auto": QUANT_METHOD, QUANT_METHOD: QUANT_METHOD},
    # The method is the artifact's own business: vLLM has no code of that name.
    "quantization": {"auto": None, QUANT_METHOD: None},
    "attention_backend": {"auto": None},
}
# Values of `quantization` that say what to serve: packed where that is possible, or what was given. vLLM sees neither.
AUTO = "auto"
NONE = "none"
# Those under which a plain checkpoint is replaced by its artifact.
PACKING = (AUTO, QUANT_METHOD)
# vLLM takes 128 tokens on a CPU. A prompt's beginning is reused in whole blocks, so smaller ones reuse more of it.
BLOCK_SIZE = 32
BLOCK_SIZE_MULTIPLE = 16
ARTIFACT_ONLY = {"kv_cache_dtype": ("int8", "int8_per_token_head"), "load_format": (QUANT_METHOD,)}


def apply_artifact(tree: LayeredTree, facts: ModelFacts) -> None:
    """Sets what an artifact fixes, and refuses values that do not go with the checkpoint.

    Raises:
        ConfigError: A layer sets a value that an artifact cannot have, or one that only an artifact can.
    """
    for stage_id, fields in tree.stages.items():
        if facts.quant_method == QUANT_METHOD:
            _refuse(tree, stage_id, fields)
            _fix(tree, stage_id, fields)
        elif fields.get("quantization") not in PACKING:
            _refuse_artifact_values(tree, stage_id, fields, facts)


def refused_values(fields: Mapping[str, Any]) -> Iterator[tuple[str, Any, str]]:
    """Field, value and what is accepted, for each value that an artifact cannot have."""
    for field, meanings in MEANINGS.items():
        value = fields.get(field)
        if value is not None and value not in meanings:
            yield field, value, ", ".join(meanings)
    block_size = fields.get("block_size")
    if isinstance(block_size, int) and block_size % BLOCK_SIZE_MULTIPLE:
        yield "block_size", block_size, f"multiples of {BLOCK_SIZE_MULTIPLE}"


def _refuse(tree: LayeredTree, stage_id: int, fields: Mapping[str, Any]) -> None:
    for field, value, accepted in refused_values(fields):
        path = f"stages[{stage_id}].{field}"
        raise ConfigError(
            f"{path} is {value!r} ({tree.source_of(path)}); accepted for {REASON}: {accepted}. Remove "
            "the value, or serve the checkpoint that the artifact was made from"
        )


def _fix(tree: LayeredTree, stage_id: int, fields: Mapping[str, Any]) -> None:
    for field, meanings in MEANINGS.items():
        given = fields.get(field)
        value = "auto" if given is None else given
        if meanings[value] != given:
            path = f"stages[{stage_id}].{field}"
            source = REASON if value == "auto" else f"{given} ({tree.source_of(path)})"
            tree.set_stage_field(stage_id, field, meanings[value], source)
    if fields.get("block_size") is None:
        tree.set_stage_field(stage_id, "block_size", BLOCK_SIZE, REASON)


def _refuse_artifact_values(tree: LayeredTree, stage_id: int, fields: Mapping[str, Any], facts: ModelFacts) -> None:
    for field, values in ARTIFACT_ONLY.items():
        if fields.get(field) in values:
            path = f"stages[{stage_id}].{field}"
            raise ConfigError(
                f"{path} is {fields[field]!r} ({tree.source_of(path)}); accepted only for {REASON}, and "
                f"{facts.path} is none. Make one with `vllm-omni quantize {facts.path} --out DIR`, or remove the value"
            )
