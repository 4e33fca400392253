"""The engine fields that the installed vLLM accepts, read from its source text: importing vLLM would cost seconds."""

import ast
import functools
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from vllm_omni.errors import ConfigError


def accepted_engine_fields() -> frozenset[str]:
    """Field names of vLLM's EngineArgs. Reads one file at the first call.

    Raises:
        ConfigError: vLLM is not installed, or its source has no such class.
    """
    return frozenset(engine_field_types())


@functools.cache
def engine_field_types() -> Mapping[str, str]:
    """Field name of vLLM's EngineArgs to the text of its type annotation."""
    file = engine_arguments_file()
    if file is None:
        raise ConfigError(
            "vLLM is not installed, so its engine fields cannot be checked; "
            "install the requirements file of this device"
        )
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef) and node.name == "EngineArgs":
            return MappingProxyType(_annotated_names(node))
    raise ConfigError(f"{file} has no class EngineArgs; install the vLLM version that the requirements file pins")


def accepts_text(field: str) -> bool:
    """Whether the type of an engine field is text, alone or among others."""
    return "str" in [part.strip() for part in engine_field_types()[field].split("|")]


def engine_arguments_file() -> Path | None:
    """Path of the installed vLLM's argument module; None if vLLM is not installed."""
    package = importlib.util.find_spec("vllm")
    for directory in (package and package.submodule_search_locations) or ():
        file = Path(directory) / "engine" / "arg_utils.py"
        if file.is_file():
            return file
    return None


def _annotated_names(node: ast.ClassDef) -> dict[str, str]:
    fields = [statement for statement in node.body if isinstance(statement, ast.AnnAssign)]
    return {
        field.target.id: ast.unparse(field.annotation)
        for field in fields
        if isinstance(field.target, ast.Name) and not field.target.id.startswith("_")
    }
