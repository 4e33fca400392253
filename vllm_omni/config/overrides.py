"""Command-line flags and keywords as changes of the configuration tree.

A name belongs to every stage, to one stage (`stage_<N>_<field>`, `stage_overrides`), to the top level, or to the
orchestrator; any other must be a vLLM engine field. Text given for a value that is not text is read as a YAML scalar or
JSON.
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, get_args

import yaml

from vllm_omni.config.deploy_config import PIPELINE_WIDE_FIELDS, DeployConfig, OrchestratorConfig, StageDeployConfig
from vllm_omni.config.engine_fields import accepted_engine_fields, accepts_text
from vllm_omni.config.layers import LayeredTree
from vllm_omni.errors import ConfigError, nearest

STAGE_FIELDS = frozenset(StageDeployConfig.model_fields) - {"stage_id"}
ORCHESTRATOR_FIELDS = frozenset(OrchestratorConfig.model_fields)
TOP_LEVEL_FIELDS = frozenset({"async_chunk", "stage_topology", "pipeline"})
STAGE_FIELD_PATTERN = re.compile(r"stage_(\d+)_(\w+)")


@dataclass(frozen=True)
class StageOverride:
    """One value for one stage, or for every stage where `stage_id` is None."""

    stage_id: int | None
    field: str
    value: Any
    source: str


def apply_overrides(
    tree: LayeredTree,
    overrides: Mapping[str, Any],
    stage_overrides: Mapping[str, Mapping[str, Any]] | str | None,
) -> None:
    """Lays overrides over the tree: those of every stage first, then those of one stage. None values are left out.

    Raises:
        ConfigError: A name is unknown, a stage does not exist, a text cannot be read, or a stage field is given twice.
    """
    given = {name: value for name, value in overrides.items() if value is not None}
    flat = {name: value for name, value in given.items() if STAGE_FIELD_PATTERN.fullmatch(name)}
    for name in sorted(given.keys() - flat.keys()):
        _apply_global(tree, name, given[name])
    for override in _stage_overrides(flat, stage_overrides):
        _apply_to_stage(tree, override)


def flag_name(name: str) -> str:
    return "--" + name.replace("_", "-")


def _apply_global(tree: LayeredTree, name: str, value: Any) -> None:
    source = flag_name(name)
    if name in STAGE_FIELDS:
        for stage_id in tree.stages:
            _apply_to_stage(tree, StageOverride(stage_id, name, value, source))
    elif name in TOP_LEVEL_FIELDS:
        tree.set_top_field(name, _typed(value, DeployConfig.model_fields[name].annotation, source), source)
    elif name in ORCHESTRATOR_FIELDS:
        annotation = OrchestratorConfig.model_fields[name].annotation
        tree.set_top_field(name, _typed(value, annotation, source), source, parent="orchestrator")
    else:
        accepted = STAGE_FIELDS | TOP_LEVEL_FIELDS | ORCHESTRATOR_FIELDS | accepted_engine_fields()
        if name not in accepted:
            raise ConfigError(f"{source} is no known setting; {nearest(name, accepted)}")
        for stage_id in tree.stages:
            _apply_to_stage(tree, StageOverride(stage_id, name, value, source))


def _stage_overrides(
    flat: Mapping[str, Any], nested: Mapping[str, Mapping[str, Any]] | str | None
) -> Iterable[StageOverride]:
    """All single-stage overrides of both spellings, in a fixed order."""
    result = [
        StageOverride(int(stage_id), field, value, f"--stage-overrides {stage_id}.{field}")
        for stage_id, fields in _nested_map(nested).items()
        for field, value in fields.items()
    ]
    for name, value in flat.items():
        stage_id, field = STAGE_FIELD_PATTERN.fullmatch(name).groups()  # type: ignore[union-attr]
        twin = [other.source for other in result if (other.stage_id, other.field) == (int(stage_id), field)]
        if twin:
            raise ConfigError(f"{flag_name(name)} and {twin[0]} set the same field; give one of them")
        result.append(StageOverride(int(stage_id), field, value, flag_name(name)))
    return result


def _nested_map(nested: Mapping[str, Mapping[str, Any]] | str | None) -> Mapping[str, Mapping[str, Any]]:
    accepted = 'accepted: {"<stage id>": {field: value}}, as a map or JSON text, such as {"0": {"max_num_seqs": 2}}'
    if isinstance(nested, str):
        try:
            nested = json.loads(nested)
        except json.JSONDecodeError as error:
            raise ConfigError(f"--stage-overrides is not valid JSON: {error}; {accepted}") from error
    if nested is None:
        return {}
    if not isinstance(nested, Mapping):
        raise ConfigError(f"--stage-overrides is {nested!r}; {accepted}")
    for stage_id, fields in nested.items():
        if not (isinstance(stage_id, str) and stage_id.isdecimal()) or not isinstance(fields, Mapping):
            raise ConfigError(f"--stage-overrides has {stage_id!r}: {fields!r}; {accepted}")
    return nested


def _apply_to_stage(tree: LayeredTree, override: StageOverride) -> None:
    stage_id, field, source = override.stage_id, override.field, override.source
    if stage_id not in tree.stages:
        raise ConfigError(f"{source}: there is no stage {stage_id}; accepted: {sorted(tree.stages)}")
    if field in STAGE_FIELDS:
        value = _typed(override.value, StageDeployConfig.model_fields[field].annotation, source)
        tree.set_stage_field(stage_id, field, value, source)
        return
    if field not in accepted_engine_fields():
        accepted = STAGE_FIELDS | accepted_engine_fields()
        raise ConfigError(f"{source}: {field!r} is no field of stage {stage_id}; {nearest(field, accepted)}")
    value = override.value if accepts_text(field) else _parsed(override.value, source)
    tree.set_stage_field(stage_id, "engine_extras", {field: value}, source)


def _typed(value: Any, annotation: Any, source: str) -> Any:
    """`value`, read from text unless the field takes text."""
    return value if _takes_text(annotation) else _parsed(value, source)


def _takes_text(annotation: Any) -> bool:
    """Whether text is a value of the type: text itself, or a choice of words. A map with text keys is not."""
    if annotation is str or isinstance(annotation, str):
        return True
    return getattr(annotation, "__origin__", None) is not dict and any(map(_takes_text, get_args(annotation)))


def _parsed(value: Any, source: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise ConfigError(f"{source} is {value!r}, which is neither a YAML scalar nor JSON: {error}") from error


def apply_pipeline_wide(tree: LayeredTree) -> None:
    """Gives each stage the pipeline-wide values that it does not set itself."""
    for name in PIPELINE_WIDE_FIELDS:
        value = tree.top.get(name)
        for stage_id in [stage_id for stage_id, fields in tree.stages.items() if fields.get(name) is None]:
            if value is not None:
                tree.set_stage_field(stage_id, name, value, tree.source_of(name))
