import argparse
import logging
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_omni.entrypoints.cli import main as main_module
from vllm_omni.entrypoints.cli.main import SUBCOMMANDS, build_parser, configure_logging, main
from vllm_omni.errors import (
    CapacityError,
    ConfigError,
    EngineError,
    HardwareError,
    ProfileNotFoundError,
    StageError,
    WeightError,
)
from vllm_omni.version import __version__


@pytest.fixture(autouse=True)
def logging_restored() -> Iterator[logging.Logger]:
    logger = logging.getLogger("vllm_omni")
    before = (list(logger.handlers), logger.level, logger.propagate)
    yield logger
    logger.handlers, level, logger.propagate = before
    logger.setLevel(level)


@pytest.fixture
def replace_command(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Puts a function in the place of every subcommand."""

    def replace(run: Callable[[argparse.Namespace], int], **more: Any) -> None:
        def add_arguments(parser: argparse.ArgumentParser) -> None:
            parser.add_argument("--number", type=int)

        module = SimpleNamespace(add_arguments=add_arguments, run=run, **more)
        monkeypatch.setattr(main_module, "_module", lambda _name: module)

    return replace


def test_no_command_prints_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    text = capsys.readouterr().out
    for name, help_line in SUBCOMMANDS.items():
        assert name in text
        assert help_line in " ".join(text.split())


@pytest.mark.parametrize("flag", ["-v", "--version"])
def test_version(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([flag])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"vllm-omni-edge {__version__}\n"


def test_an_unknown_command_is_refused_with_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["sreve"])
    assert caught.value.code == 2
    text = capsys.readouterr().err
    assert "sreve" in text
    assert all(name in text for name in SUBCOMMANDS)


def test_arguments_come_from_the_command_line_of_the_process(
    replace_command: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_command(lambda args, _rest: args.number)
    monkeypatch.setattr(sys, "argv", ["vllm-omni", "convert", "--number", "7"])
    assert main() == 7


@pytest.mark.parametrize("command", SUBCOMMANDS)
def test_only_the_chosen_command_declares_its_arguments(command: str) -> None:
    def num_actions(chosen: str | None) -> dict[str, int]:
        (action,) = [a for a in build_parser(chosen)._actions if isinstance(a, argparse._SubParsersAction)]
        return {name: len(parser._actions) for name, parser in action.choices.items()}

    none, chosen = num_actions(None), num_actions(command)
    assert {name for name in SUBCOMMANDS if chosen[name] != none[name]} == {command}


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("bad key"), 2),
        (ProfileNotFoundError("bad profile"), 2),
        (WeightError("truncated"), 2),
        (HardwareError("too few processors"), 2),
        (EngineError("did not start"), 1),
        (StageError("died", 0), 1),
        (CapacityError("no memory"), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_exit_codes(
    replace_command: Callable[..., None], capsys: pytest.CaptureFixture[str], error: BaseException, code: int
) -> None:
    def run(_args: argparse.Namespace, _rest: list[str]) -> int:
        raise error

    replace_command(run)
    assert main(["convert"]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert str(error) in captured.err
    assert captured.err.startswith("vllm-omni convert: ") or code == 130


def test_a_bug_is_not_disguised(replace_command: Callable[..., None]) -> None:
    def run(_args: argparse.Namespace, _rest: list[str]) -> int:
        raise AssertionError("bug")

    replace_command(run)
    with pytest.raises(AssertionError, match="bug"):
        main(["convert"])


@pytest.mark.parametrize("flag", ["--numbr", "--num"])
def test_a_command_receives_what_its_parser_does_not_know(replace_command: Callable[..., None], flag: str) -> None:
    received: list[list[str]] = []

    def run(_args: argparse.Namespace, rest: list[str]) -> int:
        received.append(rest)
        return 0

    replace_command(run)
    assert main(["serve", "--number", "1", flag, "x"]) == 0
    assert received == [[flag, "x"]]


def test_a_wrong_type_is_refused_by_the_parser(replace_command: Callable[..., None]) -> None:
    replace_command(lambda _args, _rest: 0)
    with pytest.raises(SystemExit) as caught:
        main(["convert", "--number", "three"])
    assert caught.value.code == 2


def test_logging_goes_to_stderr_once(logging_restored: logging.Logger, capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging()
    configure_logging()
    logging.getLogger("vllm_omni.some_part").info("event=%s", "tested")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("INFO vllm_omni.some_part event=tested\n") == 1
    assert not logging_restored.propagate
