import argparse
import os
from pathlib import Path

import pytest

from benchmarks.edge_harness.bench_decode import build_parser, main, make_arms, pin_cores, require_program
from benchmarks.edge_harness.decode_arms import LlamaArm, OmniArm
from benchmarks.edge_harness.decode_models import DecodeModels
from benchmarks.edge_harness.measurement import Workload
from vllm_omni.errors import ConfigError

MODELS = DecodeModels(
    artifact=Path("/models/a"),
    artifact_bytes=10,
    ggufs={"Q4_0": Path("/models/q.gguf")},
    gguf_bytes={"Q4_0": 12},
    vocab_size=300,
    is_real=False,
)


def parse(*words: str) -> argparse.Namespace:
    return build_parser().parse_args(["--geometry", "qwen3-0.6b", "--work-dir", "/models", *words])


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (("--types", "Q4_0,Q4_k"), "did you mean 'Q4_"),
        (("--arms", "native,native"), "names one arm twice"),
        (("--rounds", "0"), "whole number of 1 or more"),
        (("--depths", "4096,512"), "in rising order"),
        (("--depths", "512,long"), "whole numbers separated by commas"),
        (("--gguf", "model.gguf"), "not allowed with"),
    ],
)
def test_wrong_words_are_refused_with_a_hint(
    words: tuple[str, ...], hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse(*words)
    assert hint in capsys.readouterr().err


def test_ours_come_first_and_the_peer_is_named_by_its_type() -> None:
    arms = make_arms(parse("--llama-bench", "/llama/llama-bench"), MODELS)
    assert [arm.name for arm in arms] == ["native", "engine", "llama Q4_0"]
    native, _, llama = arms
    assert isinstance(native, OmniArm)
    assert native.weight_bytes == 10
    assert llama == LlamaArm("llama Q4_0", Path("/llama/llama-bench"), Path("/models/q.gguf"), 2)


def test_an_arm_with_an_int8_cache_says_so_to_its_process() -> None:
    (arm,) = make_arms(parse("--arms", "native-int8", "--depths", "512,4096"), MODELS)
    words = arm.commands(Workload(0, 3, 1, 300, (512, 4096)))[0]
    assert words[-4:] == ["--depths", "512,4096", "--kv", "int8"]


def test_without_a_program_this_package_runs_alone() -> None:
    assert [arm.name for arm in make_arms(parse("--arms", "native"), MODELS)] == ["native"]
    assert [arm.name for arm in make_arms(parse("--servers"), MODELS)] == ["serve"]


def test_the_server_lies_beside_the_benchmark(tmp_path: Path) -> None:
    args = parse("--servers", "--llama-bench", str(tmp_path / "llama-bench"))
    with pytest.raises(ConfigError, match="llama-server is no program"):
        make_arms(args, MODELS)
    (tmp_path / "llama-server").touch(mode=0o755)
    serve, llama = make_arms(args, MODELS)
    assert serve.commands(None)[0][1:3] == ["serve", "/models/a"]  # type: ignore[arg-type]
    assert llama.commands(None)[0][0] == str(tmp_path / "llama-server")  # type: ignore[arg-type]


def test_a_missing_program_is_an_error_that_says_how_to_build_it(tmp_path: Path) -> None:
    require_program(None)
    with pytest.raises(ConfigError, match="build_llama_cpp"):
        require_program(tmp_path / "llama-bench")


def test_more_threads_than_cores_are_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    cores = os.sched_getaffinity(0)
    with pytest.raises(ConfigError, match="at most that"):
        pin_cores(len(cores) + 1)
    assert os.sched_getaffinity(0) == cores
    assert main(["--geometry", "qwen3-0.6b", "--work-dir", str(tmp_path), "--llama-bench", "/no/such/file"]) == 2
    assert "is no program" in capsys.readouterr().err


def test_paths_hold_in_the_directory_of_a_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    args = build_parser().parse_args(["--gguf", "m.gguf", "--work-dir", "w", "--llama-bench", "llama-bench"])
    assert (args.gguf, args.work_dir, args.llama_bench) == (
        tmp_path / "m.gguf",
        tmp_path / "w",
        tmp_path / "llama-bench",
    )
