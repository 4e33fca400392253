import argparse
import json
from pathlib import Path

import pytest

from benchmarks.edge_harness.arms import EDGE, STOCK
from benchmarks.edge_harness.comparison import path_lines
from benchmarks.edge_harness.serve_compare import build_parser, main, make_plan, settings_facts, vocab_size
from vllm_omni.errors import ConfigError


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 1000}))
    return tmp_path


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """An interpreter path with the `vllm-omni` command beside it."""
    (tmp_path / "vllm-omni").touch()
    return tmp_path / "python"


def parse(*words: str) -> argparse.Namespace:
    return build_parser().parse_args(["--model", "/models/small", *words])


def test_both_arms_run_by_default_edge_first() -> None:
    assert parse().arms == [EDGE, STOCK]


def test_arms_can_be_chosen() -> None:
    assert parse("--arms", "stock").arms == [STOCK]


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (("--arms", "stok"), "did you mean 'stock'"),
        (("--arms", "edge,edge"), "names one server twice"),
        (("--rounds", "0"), "whole number of 1 or more"),
        (("--trials", "two"), "whole number of 1 or more"),
    ],
)
def test_wrong_words_are_refused_with_a_hint(
    words: tuple[str, str], hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_info:
        parse(*words)
    assert exit_info.value.code == 2
    assert hint in capsys.readouterr().err


def test_the_plan_holds_what_was_typed(model: Path, python: Path) -> None:
    args = build_parser().parse_args(
        ["--model", str(model), "--rounds", "2", "--trials", "7", "--dtype", "bfloat16", "--kv-bytes", "99", "--cold"]
    )
    plan = make_plan(args, python)
    assert (plan.rounds, plan.is_cold, plan.workload.trials, plan.workload.vocab_size) == (2, True, 7, 1000)
    assert (plan.settings.model, plan.settings.dtype, plan.settings.kv_bytes) == (model, "bfloat16", 99)
    assert plan.workload.concurrency == plan.settings.max_num_seqs == 4


def test_a_cold_run_says_what_is_not_cold(model: Path, python: Path) -> None:
    warm = make_plan(build_parser().parse_args(["--model", str(model)]), python)
    cold = make_plan(build_parser().parse_args(["--model", str(model), "--cold"]), python)
    assert "cold_start" not in settings_facts(warm)
    assert "page cache" in settings_facts(cold)["cold_start"]
    json.dumps(settings_facts(cold))


def test_a_longest_sequence_that_was_not_given_is_said_to_be_the_servers_choice(model: Path, python: Path) -> None:
    words = ["--model", str(model)]
    assert (
        settings_facts(make_plan(build_parser().parse_args(words), python))["max_model_len"]
        == "what each server chooses"
    )
    words += ["--max-model-len", "2048"]
    assert settings_facts(make_plan(build_parser().parse_args(words), python))["max_model_len"] == 2048


def test_a_missing_command_is_an_error_before_anything_starts(model: Path) -> None:
    with pytest.raises(ConfigError, match="vllm-omni does not exist"):
        make_plan(build_parser().parse_args(["--model", str(model)]), model / "python")


def test_stock_alone_needs_no_command(model: Path) -> None:
    args = build_parser().parse_args(["--model", str(model), "--arms", "stock"])
    assert make_plan(args, model / "python").arms == [STOCK]


def test_the_vocabulary_of_a_nested_config_is_found(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"vocab_size": 77}}))
    assert vocab_size(tmp_path) == 77


def test_a_config_without_vocabulary_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="states no vocab_size"):
        vocab_size(tmp_path)


def test_a_directory_without_config_ends_with_a_usage_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", str(tmp_path), "--arms", "stock"]) == 2
    assert "has no config.json" in capsys.readouterr().err


def test_lines_that_tell_the_path_are_kept() -> None:
    log = "noise\nINFO event=ready url=x\n10% loaded\nUsing CPU attention backend\n"
    assert path_lines(log) == ["INFO event=ready url=x", "Using CPU attention backend"]
