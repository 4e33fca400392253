"""Stage fields that follow from a checkpoint being a quantized artifact, and values that it rules out."""

from collections.abc import Mapping
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
# Values of `quantization` under which a plain checkpoint is replaced by its artifact.
PACKING = ("auto", QUANT_METHOD)
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
            _fix(tree, stage_id, fields)
            _fix_block_size(tree, stage_id, fields.get("block_size"))
        elif fields.get("quantization") not in PACKING:
            _refuse_artifact_values(tree, stage_id, fields, facts)


def _fix(tree: LayeredTree, stage_id: int, fields: Mapping[str, Any]) -> None:
    for field, meanings in MEANINGS.items():
        path = f"stages[{stage_id}].{field}"
        given = fields.get(field)
        value = "auto" if given is None else given
        if value not in meanings:
            raise ConfigError(
                f"{path} is {given!r} ({tree.source_of(path)}); accepted for {REASON}: {', '.join(meanings)}. Remove "
                "the value, or serve the checkpoint that the artifact was made from"
            )
        if meanings[value] != given:
            source = REASON if value == "auto" else f"{given} ({tree.source_of(path)})"
            tree.set_stage_field(stage_id, field, meanings[value], source)


def _fix_block_size(tree: LayeredTree, stage_id: int, given: Any) -> None:
    path = f"stages[{stage_id}].block_size"
    if given is None:
        tree.set_stage_field(stage_id, "block_size", BLOCK_SIZE, REASON)
    elif isinstance(given, int) and given % BLOCK_SIZE_MULTIPLE:
        raise ConfigError(
            f"{path} is {given} ({tree.source_of(path)}); accepted for {REASON}: multiples of {BLOCK_SIZE_MULTIPLE}"
        )


def _refuse_artifact_values(tree: LayeredTree, stage_id: int, fields: Mapping[str, Any], facts: ModelFacts) -> None:
    for field, values in ARTIFACT_ONLY.items():
        if fields.get(field) in values:
            path = f"stages[{stage_id}].{field}"
            raise ConfigError(
                f"{path} is {fields[field]!r} ({tree.source_of(path)}); accepted only for {REASON}, and "
                f"{facts.path} is none. Make one with `vllm-omni quantize {facts.path} --out DIR`, or remove the value"
            )
