import ast
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from vllm_omni import envs
from vllm_omni.errors import ConfigError

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "configuration" / "environment_variables.md"
# Everything of `os` that reads or changes the environment.
ENVIRONMENT_NAMES: set[object] = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
MALFORMED = {
    "VLLM_OMNI_CPU_RELEASE_MEMORY": "maybe",
    "VLLM_OMNI_EDGE_BUILD": "2",
    "VLLM_OMNI_NATIVE_ISA": "avx9",
    "VLLM_OMNI_NUM_THREADS": "many",
    "VLLM_OMNI_SHIM_EAGER_IMPORT": "perhaps",
    "VLLM_OMNI_SHIM_EMBEDDING_PACK": "sometimes",
    "VLLM_OMNI_SHIM_NGRAM_DRAFTS": "never",
    "VLLM_OMNI_SHIM_PROCESS_GROUPS": "one",
    "VLLM_OMNI_TARGET_DEVICE": "tpu",
    "VLLM_LOGGING_LEVEL": "LOUD",
}
PARSERS_WITHOUT_REFUSAL: dict[Callable[[str], Any], str] = {str: "text", envs.parse_path: "a path"}


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in envs.VARIABLES:
        monkeypatch.delenv(name, raising=False)


# Reading.


@pytest.mark.parametrize("name", sorted(envs.VARIABLES))
def test_an_unset_variable_has_its_default(name: str) -> None:
    assert getattr(envs, name) == envs.VARIABLES[name].default


def test_values_are_read_at_each_access(monkeypatch: pytest.MonkeyPatch) -> None:
    for threads in ("1", "3"):
        monkeypatch.setenv("VLLM_OMNI_NUM_THREADS", threads)
        assert int(threads) == envs.VLLM_OMNI_NUM_THREADS


def test_a_name_that_is_not_registered_is_no_attribute() -> None:
    with pytest.raises(AttributeError, match="VLLM_OMNI_NOTHING"):
        _ = envs.VLLM_OMNI_NOTHING


@pytest.mark.parametrize(("name", "text"), sorted(MALFORMED.items()))
def test_a_malformed_value_names_variable_value_and_what_is_accepted(
    monkeypatch: pytest.MonkeyPatch, name: str, text: str
) -> None:
    monkeypatch.setenv(name, text)
    with pytest.raises(ConfigError) as caught:
        getattr(envs, name)
    assert f"environment variable {name}={text!r} is not valid; accepted: " in str(caught.value)


def test_every_variable_that_can_be_malformed_is_tested() -> None:
    refusing = {name for name, row in envs.VARIABLES.items() if row.parse not in PARSERS_WITHOUT_REFUSAL}
    assert refusing == set(MALFORMED)


# Parsers.


@pytest.mark.parametrize("text", ["1", "true", "YES", " On "])
def test_words_for_true(text: str) -> None:
    assert envs.parse_bool(text) is True


@pytest.mark.parametrize("text", ["0", "false", "No", "off", ""])
def test_words_for_false(text: str) -> None:
    assert envs.parse_bool(text) is False


@pytest.mark.parametrize("text", ["2", "y", "truee"])
def test_other_words_are_no_truth_values(text: str) -> None:
    with pytest.raises(ValueError, match="accepted: 1, true"):
        envs.parse_bool(text)


@pytest.mark.parametrize(("text", "value"), [("1", 1), (" 16 ", 16)])
def test_positive_integers(text: str, value: int) -> None:
    assert envs.parse_positive_int(text) == value


@pytest.mark.parametrize("text", ["", "0", "-2", "1.5", "two"])
def test_bad_positive_integers(text: str) -> None:
    with pytest.raises(ValueError, match="accepted: a whole number, 1 or more"):
        envs.parse_positive_int(text)


def test_a_path_may_begin_with_the_home_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    assert envs.parse_path("~/cache") == Path("/home/somebody/cache")
    assert envs.parse_path("relative") == Path("relative")


def test_a_choice_is_exact() -> None:
    parse = envs.parse_choice(["cpu", "cuda"])
    assert parse("cuda") == "cuda"
    with pytest.raises(ValueError, match="accepted: cpu, cuda"):
        parse("CUDA")


# Writing.


def test_export_replaces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMNI_TEST_VALUE", "before")
    envs.export({"OMNI_TEST_VALUE": "after"})
    assert os.environ["OMNI_TEST_VALUE"] == "after"


def test_kept_restores_set_and_unset_variables_even_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMNI_TEST_SET", "before")
    monkeypatch.setenv("OMNI_TEST_UNSET", "x")
    monkeypatch.delenv("OMNI_TEST_UNSET")
    with pytest.raises(KeyError), envs.kept(iter(["OMNI_TEST_SET", "OMNI_TEST_UNSET"])):
        envs.export({"OMNI_TEST_SET": "inside", "OMNI_TEST_UNSET": "inside"})
        raise KeyError
    assert os.environ["OMNI_TEST_SET"] == "before"
    assert "OMNI_TEST_UNSET" not in os.environ


# The document.


def documented_rows() -> dict[str, list[str]]:
    """Variable name to its cells: default, accepted, meaning, category."""
    rows = [line for line in DOCUMENT.read_text().splitlines() if line.startswith("| `")]
    cells = [[cell.strip() for cell in row.strip("|").split(" | ")] for row in rows]
    assert len(cells) == len({row[0] for row in cells})
    return {row[0].strip("`"): row[1:] for row in cells}


def shown_default(value: Any) -> str:
    if value is None:
        return "unset"
    if isinstance(value, Path):
        return f"`{Path('~') / value.relative_to(Path.home())}`"
    return f"`{int(value) if isinstance(value, bool) else value}`"


def accepted_text(variable: envs.Variable) -> str:
    """What the parser's own refusal says."""
    if variable.parse in PARSERS_WITHOUT_REFUSAL:
        return PARSERS_WITHOUT_REFUSAL[variable.parse]
    with pytest.raises(ValueError) as caught:
        variable.parse("not accepted by any parser")
    return str(caught.value).removeprefix("accepted: ")


def test_the_document_lists_exactly_the_variables_in_order() -> None:
    assert list(documented_rows()) == sorted(envs.VARIABLES)


@pytest.mark.parametrize("name", sorted(envs.VARIABLES))
def test_a_documented_row_is_true(name: str) -> None:
    variable = envs.VARIABLES[name]
    expected = [
        shown_default(variable.default),
        accepted_text(variable),
        variable.meaning,
        f"`{variable.category}`",
    ]
    assert documented_rows()[name] == expected


# No other reader.


def environment_uses(tree: ast.AST) -> Iterator[int]:
    """Lines that name a part of `os` that touches the environment, in whatever spelling."""
    for node in ast.walk(tree):
        names: set[object] = set()
        if isinstance(node, ast.Attribute):
            names = {node.attr}
        elif isinstance(node, ast.ImportFrom):
            names = {alias.name for alias in node.names}
        elif isinstance(node, ast.Constant):
            names = {node.value}
        if names & ENVIRONMENT_NAMES:
            assert isinstance(node, (ast.Attribute, ast.ImportFrom, ast.Constant))
            yield node.lineno


def test_only_envs_touches_the_environment() -> None:
    package = ROOT / "vllm_omni"
    files = [file for file in package.rglob("*.py") if file != package / "envs.py"]
    assert len(files) > 20
    uses = [
        f"{file.relative_to(ROOT)}:{line}" for file in files for line in environment_uses(ast.parse(file.read_text()))
    ]
    assert uses == []


@pytest.mark.parametrize(
    "code",
    [
        "import os\nos.environ['A']",
        "import os as o\no.getenv('A')",
        "from os import environ as e",
        "getattr(os, 'putenv')",
    ],
)
def test_the_walk_finds_every_spelling(code: str) -> None:
    assert list(environment_uses(ast.parse(code)))
