"""Imports go one way only: walks the syntax trees of the package and fails on any edge that is not listed here."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "vllm_omni"

# A part may import parts of the layers before its own, and itself. Parts of the first layer may import each other.
LAYERS = (
    ("errors", "envs", "version", "outputs"),
    ("edge", "config"),
    ("distributed", "native", "quantization"),
    ("model_executor",),
    ("platforms",),
    ("worker",),
    ("engine",),
    ("entrypoints",),
)
HEAVY = {"torch", "vllm", "transformers"}
HEAVY_PLACES = ("engine", "platforms", "worker", "model_executor", "entrypoints/openai")
LIGHT_FILES_IN_HEAVY_PLACES = {
    "engine/stage.py": "the contract: an orchestrator is tested with a fake stage",
    "engine/orchestrator.py": "does not know what a stage is made of",
    "platforms/cpu/threads.py": "runs before torch is imported",
    "entrypoints/openai/api_server.py": "binds the port and answers for health before vLLM is imported",
    "entrypoints/openai/gateway.py": "answers while vLLM is being imported",
    "entrypoints/openai/middleware.py": "plain ASGI",
    "entrypoints/openai/errors.py": "plain ASGI",
}
# Files elsewhere that import vLLM inside a function.
HEAVY_FUNCTIONS = {}
# The root offers the entry points lazily; nothing else reaches upwards.
UPWARD_IMPORTS = {
    ("__init__.py", "entrypoints"): "`vllm_omni.AsyncOmni` and `vllm_omni.Omni`, when first used",
}


@dataclass(frozen=True)
class Import:
    """One import statement.

    Attributes:
        file: Importing file, relative to the package.
        target: Imported module, as far down as it is one.
        when: `load`, `call` (inside a function) or `types` (under TYPE_CHECKING).
    """

    file: str
    target: str
    line: int
    when: str

    @property
    def part(self) -> str | None:
        """The part of this package that is imported; None for other packages and the root."""
        words = self.target.split(".")
        return words[1] if words[0] == "vllm_omni" and len(words) > 1 else None

    def __str__(self) -> str:
        return f"{self.file}:{self.line} imports {self.target}"


def is_module(name: str) -> bool:
    path = PACKAGE.joinpath(*name.split(".")[1:])
    return name.split(".")[0] == "vllm_omni" and (path.with_suffix(".py").is_file() or (path / "__init__.py").is_file())


def targets(node: ast.Import | ast.ImportFrom) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    assert node.module is not None
    names = [f"{node.module}.{alias.name}" for alias in node.names]
    return [name if is_module(name) else node.module for name in names]


def walk(node: ast.AST, file: str, when: str) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.Import, ast.ImportFrom)):
            yield from (Import(file, target, child.lineno, when) for target in targets(child))
        elif isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            yield from walk(child, file, "types")
        elif isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            yield from walk(child, file, "call" if when == "load" else when)
        else:
            yield from walk(child, file, when)


def trees() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        yield path.relative_to(PACKAGE).as_posix(), ast.parse(path.read_text())


IMPORTS = [found for file, tree in trees() for found in walk(tree, file, "load")]
FILES = {file for file, _ in trees()}


def part_of(file: str) -> str:
    return file.split("/")[0].removesuffix(".py")


def layer(part: str) -> int:
    return next(number for number, parts in enumerate(LAYERS) if part in parts)


def is_allowed(importer: str, imported: str) -> bool:
    return importer == imported or layer(imported) < layer(importer) or layer(importer) == layer(imported) == 0


def test_every_part_has_a_layer() -> None:
    parts = {part_of(file) for file in FILES} - {"__init__"}
    assert parts - {part for parts in LAYERS for part in parts} == set()


def test_imports_go_one_way() -> None:
    wrong = [
        str(found)
        for found in IMPORTS
        if found.part is not None
        and (found.file, found.part) not in UPWARD_IMPORTS
        and not is_allowed(part_of(found.file) if found.file != "__init__.py" else "version", found.part)
    ]
    assert wrong == []


def test_imports_are_absolute() -> None:
    relative = [
        f"{file}:{node.lineno}"
        for file, tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.level
    ]
    assert relative == []


def test_no_module_depends_on_itself_even_through_a_local_import() -> None:
    graph: dict[str, set[str]] = {}
    for found in IMPORTS:
        if found.part is not None and found.when != "types":
            module = "vllm_omni." + found.file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
            graph.setdefault(module, set()).add(found.target)
    try:
        tuple(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail(f"import cycle: {' -> '.join(error.args[1])}; move the shared type down")


def is_heavy(found: Import) -> bool:
    return found.target.split(".")[0] in HEAVY


def is_heavy_place(file: str) -> bool:
    return file not in LIGHT_FILES_IN_HEAVY_PLACES and file.startswith(tuple(f"{place}/" for place in HEAVY_PLACES))


def test_torch_and_vllm_stay_in_their_places() -> None:
    wrong = [
        str(found)
        for found in IMPORTS
        if is_heavy(found)
        and found.when != "types"
        and not is_heavy_place(found.file)
        and not (found.when == "call" and found.file in HEAVY_FUNCTIONS)
    ]
    assert wrong == []


def test_in_the_engine_only_compat_imports_vllm() -> None:
    files = {
        found.file for found in IMPORTS if found.file.startswith("engine/") and found.target.split(".")[0] == "vllm"
    }
    assert files == {"engine/compat.py"}


def test_light_files_load_no_heavy_module_of_this_package() -> None:
    """A file that is light by this list must not get torch or vLLM through a neighbour."""
    loads = [found for found in IMPORTS if found.when == "load"]
    new = {found.file for found in loads if is_heavy(found)}
    heavy_files: set[str] = set()
    while new:
        heavy_files |= new
        new = {found.file for found in loads if file_of(found.target) in heavy_files} - heavy_files
    assert {file for file in heavy_files if not is_heavy_place(file)} == set()


def file_of(module: str) -> str | None:
    path = "/".join(module.split(".")[1:])
    return next((file for file in (f"{path}.py", f"{path}/__init__.py") if file in FILES), None)


# The tables above hold only what is needed.


def test_no_exception_is_stale() -> None:
    assert set(LIGHT_FILES_IN_HEAVY_PLACES) <= FILES
    assert set(HEAVY_FUNCTIONS) == {
        found.file for found in IMPORTS if is_heavy(found) and found.when == "call" and not is_heavy_place(found.file)
    }
    assert set(UPWARD_IMPORTS) == {
        (found.file, found.part)
        for found in IMPORTS
        if found.file == "__init__.py" and found.part not in (None, "version")
    }


CODE = """
import os
from typing import TYPE_CHECKING
from vllm_omni import envs
if TYPE_CHECKING:
    import torch
class A:
    def f(self):
        from vllm.outputs import RequestOutput
"""


def test_the_walk_tells_load_call_and_types_apart() -> None:
    found = {(each.target, each.when) for each in walk(ast.parse(CODE), "x.py", "load")}
    assert found == {
        ("os", "load"),
        ("typing", "load"),
        ("vllm_omni.envs", "load"),
        ("torch", "types"),
        ("vllm.outputs", "call"),
    }


@pytest.mark.parametrize(
    ("importer", "imported", "allowed"),
    [
        ("envs", "errors", True),
        ("config", "edge", False),
        ("errors", "config", False),
        ("engine", "config", True),
        ("config", "engine", False),
        ("entrypoints", "platforms", True),
        ("worker", "platforms", True),
        ("platforms", "worker", False),
        ("engine", "engine", True),
    ],
)
def test_directions(importer: str, imported: str, allowed: bool) -> None:
    assert is_allowed(importer, imported) == allowed
