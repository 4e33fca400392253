"""Every key is described, and `docs/configuration/deploy_yaml.md` shows the same texts.

`python tests/unit/config/test_deploy_config.py` prints the tables for that page.
"""

import ast
import importlib.util
import types
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import pytest
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from vllm_omni.config.deploy_config import (
    SAMPLING_FIELDS,
    ConnectorConfig,
    DeployConfig,
    OrchestratorConfig,
    PlatformDeployConfig,
    StageDeployConfig,
    parse_bytes,
)

MODELS = (DeployConfig, StageDeployConfig, OrchestratorConfig, ConnectorConfig, PlatformDeployConfig)
FIELDS = [(model, name, field) for model in MODELS for name, field in model.model_fields.items()]
WORDS = {int: "whole number", float: "number", bool: "true or false", str: "text", dict: "map", Any: "any"}
DOCUMENT = Path(__file__).parents[3] / "docs" / "configuration" / "deploy_yaml.md"


def type_words(annotation: Any) -> str:
    origin = get_origin(annotation)
    if origin in (Union, types.UnionType):
        return type_words(next(part for part in get_args(annotation) if part is not type(None)))
    if origin is Annotated:
        return type_words(get_args(annotation)[0])
    if origin is Literal:
        return " or ".join(f"`{word}`" for word in get_args(annotation))
    if origin is list:
        return "list of maps"
    if origin is dict or (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
        return "map"
    return WORDS[annotation]


def default_words(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if value is None:
        return "unset"
    if isinstance(value, BaseModel):
        return "its defaults"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def table_row(name: str, field: FieldInfo) -> str:
    unit = field.json_schema_extra["unit"]  # type: ignore[index,call-overload]
    cells = (f"`{name}`", type_words(field.annotation), default_words(field), unit, field.description)
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


@pytest.mark.parametrize(
    ("model", "name", "field"), FIELDS, ids=[f"{model.__name__}.{name}" for model, name, _ in FIELDS]
)
def test_every_field_states_meaning_and_unit_and_is_documented(
    model: type[BaseModel], name: str, field: FieldInfo
) -> None:
    assert field.description and field.description.endswith(".")
    assert field.json_schema_extra and field.json_schema_extra["unit"]  # type: ignore[call-overload]
    assert table_row(name, field) in DOCUMENT.read_text(), f"{model.__name__}.{name} differs from {DOCUMENT.name}"


def test_every_model_forbids_unknown_keys() -> None:
    assert all(model.model_config["extra"] == "forbid" and model.model_config["strict"] for model in MODELS)


def test_optional_stage_fields_default_to_none() -> None:
    stage = StageDeployConfig(stage_id=0)
    assert {value for name, value in stage.model_dump().items() if name != "stage_id"} == {None}


@pytest.mark.parametrize(
    ("given", "expected"),
    [("512MiB", 512 << 20), ("1GiB", 1 << 30), ("1.5 GiB", 3 << 29), ("2KiB", 2048), ("7B", 7), ("42", 42), (5, 5)],
)
def test_parse_bytes(given: Any, expected: int) -> None:
    assert parse_bytes(given) == expected


@pytest.mark.parametrize("given", ["512MB", "lots", "", "-1GiB", "1 GiB 2", "1e9"])
def test_parse_bytes_refuses_other_text(given: str) -> None:
    with pytest.raises(ValueError, match="B, KiB, MiB or GiB"):
        parse_bytes(given)


def test_sampling_fields_exist_in_vllm() -> None:
    package = importlib.util.find_spec("vllm")
    if package is None or not package.submodule_search_locations:
        pytest.skip("vLLM is not installed")
    tree = ast.parse(Path(package.submodule_search_locations[0], "sampling_params.py").read_text())
    declared = {
        statement.target.id
        for node in tree.body
        if isinstance(node, ast.ClassDef) and node.name == "SamplingParams"
        for statement in node.body
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
    }
    assert declared >= SAMPLING_FIELDS


if __name__ == "__main__":
    for model in MODELS:
        print(f"\n{model.__name__}\n\n| key | type | default | unit | meaning |\n|---|---|---|---|---|")
        print("\n".join(table_row(name, field) for name, field in model.model_fields.items()))
