import argparse
from collections.abc import Callable, Sequence

import pytest

from benchmarks.edge_harness.command_line import parse_names, run_program
from vllm_omni.errors import ConfigError, EngineError

Run = Callable[[argparse.Namespace, Sequence[str]], None]


def raising(error: BaseException) -> Run:
    def run(args: argparse.Namespace, words: Sequence[str]) -> None:
        raise error

    return run


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser()
    made.add_argument("--rounds")
    return made


@pytest.mark.parametrize(
    ("error", "code"), [(ConfigError("wrong"), 2), (EngineError("failed"), 1), (KeyboardInterrupt(), 130)]
)
def test_the_kind_of_error_is_the_exit_code(
    error: BaseException, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_program("bench", parser(), raising(error), []) == code
    assert capsys.readouterr().err == ("" if code == 130 else f"bench: {error}\n")


def test_a_program_gets_its_words_parsed_and_as_typed() -> None:
    seen: list[object] = []
    code = run_program("bench", parser(), lambda args, words: seen.extend([args.rounds, words]), ["--rounds", "3"])
    assert (code, seen) == (0, ["3", ["--rounds", "3"]])


def test_names_keep_their_order() -> None:
    assert parse_names("b,a", ("a", "b"), "arm") == ["b", "a"]
