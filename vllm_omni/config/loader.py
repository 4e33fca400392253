"""Reads deploy YAML files and lays them over their bases; every problem names file, key and what is accepted.

It does not choose a file, and knows nothing of a model or of the command line: see `resolve.py`.
"""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from vllm_omni.config.deploy_config import PLATFORM_NAMES, SAMPLING_FIELDS, DeployConfig, StageDeployConfig
from vllm_omni.config.engine_fields import accepted_engine_fields, engine_arguments_file
from vllm_omni.config.layers import LayeredTree
from vllm_omni.errors import ConfigError, nearest

PACKAGE_DIR = Path(__file__).resolve().parent.parent
DEPLOY_DIR = PACKAGE_DIR / "deploy"


class _StrictLoader(yaml.SafeLoader):
    """YAML's safe types only. A key given twice in one map is an error, instead of the last one winning.

    Merge keys (`<<`) are refused: PyYAML 6.0.4 takes the wrong value where merged maps themselves merge.
    """

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key in [key for key, _ in node.value if isinstance(key, yaml.ScalarNode)]:
            if key.tag == "tag:yaml.org,2002:merge":
                raise _problem_at(key, "merge keys (<<) are not accepted; use base_config, or repeat the keys")
            if key.value in seen:
                raise _problem_at(key, f"key {key.value!r} is given twice; keep one")
            seen.add(key.value)
        return node


def _problem_at(node: yaml.Node, text: str) -> yaml.MarkedYAMLError:
    return yaml.composer.ComposerError(None, None, text, node.start_mark)


def display_path(path: Path) -> str:
    """How messages and `--print-config` name a file: packaged ones relative to the package's parent."""
    resolved = path.resolve()
    return str(resolved.relative_to(PACKAGE_DIR.parent)) if resolved.is_relative_to(PACKAGE_DIR) else str(path)


def read_yaml(path: Path) -> dict[str, Any]:
    """The map in a YAML file.

    Raises:
        ConfigError: The file is missing, unreadable, no YAML, no map, or has a key twice.
    """
    name = display_path(path)
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), Loader=_StrictLoader)
    except FileNotFoundError as error:
        raise ConfigError(f"deploy file {name} does not exist; accepted: the path of a YAML file") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"deploy file {name} cannot be read: {error}; accepted: a readable UTF-8 file") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"deploy file {name}{_position(error)} is not valid YAML: {_problem(error)}") from error
    if not isinstance(values, dict):
        kind = "empty" if values is None else f"a {type(values).__name__}"
        raise ConfigError(f"deploy file {name} is {kind}; accepted: a map of keys such as `stages:`")
    return values


def _position(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    return f", line {mark.line + 1}, column {mark.column + 1}," if mark else ""


def _problem(error: yaml.YAMLError) -> str:
    return getattr(error, "problem", None) or str(error)


def load_deploy_file(path: Path) -> tuple[LayeredTree, tuple[Path, ...]]:
    """The merged tree of a deploy file and its bases, and the files read, the given one first.

    Raises:
        ConfigError: Any file is wrong, bases form a cycle, or a platform section names a stage that no file has.
    """
    chain = _base_chain(path)
    tree = LayeredTree()
    for file, values in reversed(chain):
        tree.overlay_file(values, display_path(file))
    for source, platform, stage_id in tree.platform_stage_ids():
        if stage_id not in tree.stages:
            raise ConfigError(
                f"{source}: platforms.{platform}.stages names stage {stage_id}; "
                f"accepted: the stages of the file and its bases, {sorted(tree.stages)}"
            )
    _check_contiguous(tree.stages, display_path(path))
    return tree, tuple(file for file, _ in chain)


def _base_chain(path: Path) -> list[tuple[Path, dict[str, Any]]]:
    """The file and its bases, validated one by one, nearest first."""
    chain: list[tuple[Path, dict[str, Any]]] = []
    current: Path | None = path
    while current is not None:
        if current.resolve() in [file.resolve() for file, _ in chain]:
            names = " -> ".join(display_path(file) for file in [*[file for file, _ in chain], current])
            raise ConfigError(f"base_config forms a cycle: {names}; remove one of these base_config lines")
        values = read_yaml(current)
        check_file(values, display_path(current))
        chain.append((current, values))
        current = _base_file(current, values.get("base_config"))
    return chain


def _base_file(overlay: Path, base: str | None) -> Path | None:
    """The file that `base_config` names: relative to the overlay, else a packaged one; None without a base."""
    if base is None:
        return None
    for candidate in (overlay.parent / base, DEPLOY_DIR / base):
        if candidate.is_file():
            return candidate
    raise ConfigError(
        f"{display_path(overlay)}: base_config {base!r} does not exist; "
        f"accepted: a path relative to that file, or a packaged file, such as edge/text.yaml"
    )


def check_file(values: Mapping[str, Any], name: str) -> None:
    """Raises ConfigError listing everything that is wrong with the keys, types and stage ids of one file."""
    if "stage_args" in values:
        raise ConfigError(
            f"{name}: `stage_args` belongs to an older schema; move each entry to `stages:` and its engine arguments "
            "up into the entry (docs/configuration/deploy_yaml.md)"
        )
    validate(values, lambda _: name)
    unknown = [platform for platform in values.get("platforms") or {} if platform not in PLATFORM_NAMES]
    if unknown:
        raise ConfigError(f"{name}: platforms.{unknown[0]} is no platform; {nearest(unknown[0], PLATFORM_NAMES)}")
    for path, entries in _stage_lists(values):
        _check_stage_entries(entries, path, name)


def _stage_lists(values: Mapping[str, Any]) -> Iterable[tuple[str, list[dict[str, Any]]]]:
    yield "stages", values.get("stages") or []
    for platform, section in (values.get("platforms") or {}).items():
        yield f"platforms.{platform}.stages", section.get("stages") or []


def _check_stage_entries(entries: list[dict[str, Any]], path: str, name: str) -> None:
    ids = [entry["stage_id"] for entry in entries]
    twice = sorted({stage_id for stage_id in ids if ids.count(stage_id) > 1})
    if twice:
        raise ConfigError(f"{name}: {path} has stage_id {twice[0]} twice; give each stage one entry")
    for index, entry in enumerate(entries):
        check_stage_maps(entry, f"{path}[{index}]", lambda _: name)


def check_stage_maps(entry: Mapping[str, Any], path: str, source_of: Callable[[str], str]) -> None:
    """Raises ConfigError for an unknown key in `default_sampling_params` or `engine_extras` of one stage."""
    for key in entry.get("default_sampling_params") or {}:
        if key not in SAMPLING_FIELDS:
            full = f"{path}.default_sampling_params.{key}"
            raise ConfigError(f"{source_of(full)}: {full} is no sampling field; {nearest(str(key), SAMPLING_FIELDS)}")
    for key in entry.get("engine_extras") or {}:
        full = f"{path}.engine_extras.{key}"
        if key in StageDeployConfig.model_fields:
            raise ConfigError(f"{source_of(full)}: {full} is a stage key; set it directly, as {path}.{key}")
        if key not in accepted_engine_fields():
            raise ConfigError(
                f"{source_of(full)}: {full} is no vLLM engine field; {nearest(str(key), accepted_engine_fields())}"
            )


def _check_contiguous(stages: Mapping[int, Any], name: str) -> None:
    if sorted(stages) != list(range(len(stages))):
        raise ConfigError(f"{name}: stage ids are {sorted(stages)}; accepted: 0 to N-1 without a gap")


def validate(values: Mapping[str, Any], source_of: Callable[[str], str]) -> DeployConfig:
    """The typed config of a tree.

    Args:
        source_of: Dotted path to the layer that a message names.

    Raises:
        ConfigError: Unknown keys or wrong values; one line for each.
    """
    try:
        return DeployConfig.model_validate(values)
    except ValidationError as error:
        lines = [_describe(problem, source_of) for problem in error.errors()]
    raise ConfigError("\n".join(lines))


def _describe(problem: Any, source_of: Callable[[str], str]) -> str:
    path = _dotted(problem["loc"])
    where = f"{source_of(path)}: {path}"
    if problem["type"] == "extra_forbidden":
        return f"{where} is not a known key; {_unknown_key_hint(problem['loc'])}"
    if problem["type"] == "missing":
        return f"{where} is missing; add it"
    given = problem["input"]
    accepted = problem["msg"].removeprefix("Value error, ").replace("Input should be", "accepted:")
    return f"{where} is {given!r} ({type(given).__name__}); {accepted}"


def _unknown_key_hint(location: tuple[Any, ...]) -> str:
    key, model = str(location[-1]), _model_at(location[:-1])
    if model is StageDeployConfig and engine_arguments_file() and key in accepted_engine_fields():
        return "it is a vLLM engine field: write it under engine_extras"
    return nearest(key, model.model_fields)


def _model_at(location: tuple[Any, ...]) -> type[BaseModel]:
    """The model that holds the keys at a location of pydantic's; steps that name no field are list or map keys."""
    model: type[BaseModel] = DeployConfig
    for step in location:
        if step in model.model_fields:
            model = _nested_model(model.model_fields[step].annotation) or model
    return model


def _nested_model(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((model for part in get_args(annotation) if (model := _nested_model(part))), None)


def _dotted(location: tuple[Any, ...]) -> str:
    steps = [f"[{step}]" if isinstance(step, int) else f".{step}" for step in location if step != "[key]"]
    return "".join(steps).removeprefix(".")
