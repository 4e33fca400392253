import argparse
import logging
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage
from typing import Any

import pytest
import yaml

from tests.checkpoints import CONFIG, Checkpoint
from tests.server import free_port
from vllm_omni.config.deploy_config import OrchestratorConfig, StageDeployConfig
from vllm_omni.entrypoints import omni_base
from vllm_omni.entrypoints.cli import serve
from vllm_omni.entrypoints.cli.main import main
from vllm_omni.entrypoints.openai import api_server
from vllm_omni.errors import ConfigError

FLAG_FIELDS = {name: field for schema in serve.SCHEMAS for name, field in serve.flag_fields(schema)}
BOOL_FIELDS = [name for name, field in FLAG_FIELDS.items() if serve._is_bool(field.annotation)]
VALUE_FIELDS = [name for name in FLAG_FIELDS if name not in BOOL_FIELDS]
MAX_REFUSAL_CPU_S = 2.0


@pytest.fixture(autouse=True)
def isolated(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No key from the environment, and the logger as it was."""
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    logger = logging.getLogger("vllm_omni")
    before = (list(logger.handlers), logger.level, logger.propagate)
    yield
    logger.handlers, level, logger.propagate = before
    logger.setLevel(level)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A sound checkpoint."""
    config = CONFIG | {"torch_dtype": "float32", "max_position_embeddings": 2048}
    return Checkpoint(tmp_path / "tiny-llama", config).write()


def parse(*words: str) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    serve.add_arguments(parser)
    return parser.parse_known_args(words)


def overrides(*words: str) -> dict[str, Any]:
    args, unknown = parse(*words)
    assert serve.parse_unknown(unknown) == ("dir", {})
    return serve.collect_overrides(args)


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


# Flags to overrides.


def test_every_key_of_the_schemas_has_a_flag() -> None:
    names = {*StageDeployConfig.model_fields, *OrchestratorConfig.model_fields}
    assert set(FLAG_FIELDS) == names - serve.FIELDS_WITHOUT_FLAG


@pytest.mark.parametrize("name", VALUE_FIELDS)
def test_a_flag_takes_a_value(name: str) -> None:
    assert overrides("dir", flag(name), "17") == {name: "17"}
    assert overrides("dir", f"{flag(name)}=17") == {name: "17"}


@pytest.mark.parametrize("name", BOOL_FIELDS)
def test_a_truth_value_has_two_flags(name: str) -> None:
    assert overrides("dir", flag(name)) == {name: True}
    assert overrides("dir", f"--no-{flag(name)[2:]}") == {name: False}


@pytest.mark.parametrize("name", FLAG_FIELDS)
def test_help_shows_the_schema_s_text(name: str) -> None:
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    text = " ".join(parser.format_help().split())
    assert f"{flag(name)} V" in text or f"{flag(name)}, --no-" in text
    # Words alone: the help page breaks lines at hyphens.
    assert FLAG_FIELDS[name].description.replace("-", "").split()[-1] in text.replace("- ", "").replace("-", "")


def test_nothing_typed_overrides_nothing() -> None:
    assert overrides("dir") == {}


@pytest.mark.parametrize(("word", "value"), [("--async-chunk", True), ("--no-async-chunk", False)])
def test_async_chunk(word: str, value: bool) -> None:
    assert overrides("dir", word) == {"async_chunk": value}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--swap-space", "4"], {"swap_space": "4"}),
        (["--swap-space=4"], {"swap_space": "4"}),
        (["--text=a=b"], {"text": "a=b"}),
        (["--text="], {"text": ""}),
        (["--disable-cascade-attn"], {"disable_cascade_attn": True}),
        (["--no-enable-thing"], {"enable_thing": False}),
        (["--no-enable-thing", "--other", "-1"], {"enable_thing": False, "other": "-1"}),
        (["--stage-0-max-num-seqs", "2"], {"stage_0_max_num_seqs": "2"}),
        (["--under_score", "x"], {"under_score": "x"}),
        ([], {}),
    ],
)
def test_unlisted_flags_become_overrides(words: list[str], expected: dict[str, Any]) -> None:
    assert serve.parse_unknown(words) == (None, expected)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--model-impl", "vllm"], {"model_impl": "vllm"}),
        (["--disable-cascade-attn"], {"disable_cascade_attn": True}),
        (["--no-disable-cascade-attn"], {"disable_cascade_attn": False}),
        (["--stage-0-enforce-eager"], {"stage_0_enforce_eager": True}),
        (["--stage-0-seed", "1"], {"stage_0_seed": "1"}),
    ],
)
def test_the_model_may_stand_before_and_after_unlisted_flags(words: list[str], expected: dict[str, Any]) -> None:
    for line in (["dir", *words], [*words, "dir"]):
        assert serve.parse_unknown(line) == ("dir", expected)


@pytest.mark.parametrize("words", [["dir", "stray"], ["-x"], ["--"], ["dir", "--name", "value", "stray"]])
def test_words_that_belong_to_no_flag_are_refused(words: list[str]) -> None:
    with pytest.raises(ConfigError, match=f"unexpected argument '{words[-1]}'"):
        serve.parse_unknown(words)


def test_served_names() -> None:
    assert serve.served_names("/models/tiny", None) == ("/models/tiny", "tiny")
    assert serve.served_names("tiny", None) == ("tiny",)
    assert serve.served_names("/models/tiny", ["a", "b"]) == ("a", "b")


# The whole command, up to the server.


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Receives deployment, options and exit code in place of server and end of process. Every port is free."""
    calls: list[Any] = []

    def run_server(deployment: Any, options: Any, started_at: float) -> int:
        calls.extend((deployment, options))
        return 3

    monkeypatch.setattr(api_server, "run_server", run_server)
    monkeypatch.setattr(api_server, "bind_socket", lambda host, port: socket.socket())
    monkeypatch.setattr(serve, "leave", calls.append)
    return calls


def test_a_sound_checkpoint_reaches_the_server_with_the_defaults(model: Path, served: list[Any]) -> None:
    main(["serve", str(model)])
    deployment, options, exit_code = served
    assert exit_code == 3
    assert deployment.facts.path == model
    assert (options.host, options.port, options.api_keys) == ("127.0.0.1", 8000, ())
    assert options.served_model_names == (str(model), "tiny-llama")
    assert (options.log_stats, options.log_requests) == (True, False)


def test_flags_reach_deployment_and_server(model: Path, served: list[Any]) -> None:
    words = "--omni --deploy-profile edge --max-num-seqs 3 --kv-cache-memory-bytes 64MiB --no-enable-prefix-caching"
    words += " --host 0.0.0.0 --port 0 --api-key k1 k2 --served-model-name n1 n2 --disable-log-stats"
    words += " --enable-log-requests --uvicorn-log-level info --max-queued-requests 5 --model-impl vllm"
    main(["serve", "--model", str(model), *words.split()])
    deployment, options, _exit_code = served
    stage = deployment.stage(0)
    assert (stage.max_num_seqs, stage.kv_cache_memory_bytes, stage.enable_prefix_caching) == (3, 64 << 20, False)
    assert stage.engine_extras["model_impl"] == "vllm"
    assert deployment.config.orchestrator.max_queued_requests == 5
    assert options == api_server.ServerOptions(
        host="0.0.0.0",
        port=0,
        api_keys=("k1", "k2"),
        served_model_names=("n1", "n2"),
        log_stats=False,
        log_requests=True,
        uvicorn_log_level="info",
    )


@pytest.mark.parametrize(("words", "keys"), [([], ("from-env",)), (["--api-key", "typed"], ("typed",))])
def test_a_typed_key_beats_the_environment(
    model: Path, served: list[Any], monkeypatch: pytest.MonkeyPatch, words: list[str], keys: tuple[str, ...]
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "from-env")
    main(["serve", str(model), *words])
    assert served[1].api_keys == keys


def test_the_end_of_the_process_keeps_code_and_output() -> None:
    code = (
        "import sys; from vllm_omni.entrypoints.cli.serve import leave; "
        "sys.stdout.write('out'); sys.stderr.write('err'); leave(5)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stdout, result.stderr) == (5, "out", "err")


def test_print_config_prints_values_with_their_source_and_serves_nothing(
    model: Path, served: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", str(model), "--deploy-profile", "edge", "--print-config", "--max-num-seqs", "2"]) == 0
    text = capsys.readouterr().out
    assert yaml.safe_load(text)["stages"][0]["max_num_seqs"] == 2
    assert "max_num_seqs: 2  # --max-num-seqs\n" in text
    assert served == []


def test_print_config_needs_no_weights(model: Path, served: list[Any]) -> None:
    (model / "model.safetensors").unlink()
    assert main(["serve", str(model), "--print-config"]) == 0
    assert main(["serve", str(model)]) == 2
    assert served == []


# Refusals.

Case = Callable[[Path, Path], Sequence[str]]


def with_file(text: str, name: str = "deploy.yaml") -> Case:
    """The words for a deploy file with that text."""

    def make(model: Path, directory: Path) -> Sequence[str]:
        (directory / name).write_text(text)
        return [str(model), "--deploy-config", str(directory / name)]

    return make


def damaged(model: Path, _directory: Path) -> Sequence[str]:
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    return [str(model)]


REFUSALS: dict[str, tuple[Case, str]] = {
    "unknown flag": (lambda model, _: [str(model), "--max-num-seq", "4"], "did you mean 'max_num_seqs'"),
    "unknown stage flag": (lambda model, _: [str(model), "--stage-0-max-num-seq", "4"], "'max_num_seqs'"),
    "no model": (lambda _model, _: ["--port", "0"], "no model given"),
    "missing model": (lambda model, _: [str(model / "absent")], "absent"),
    "profile and file": (
        lambda model, _: [str(model), "--deploy-profile", "edge", "--deploy-config", "edge/text.yaml"],
        "exclude each other",
    ),
    "unknown profile": (lambda model, _: [str(model), "--deploy-profile", "egde"], "accepted: "),
    "wrong type": (lambda model, _: [str(model), "--max-num-seqs", "four"], "max_num_seqs"),
    "out of range": (lambda model, _: [str(model), "--max-num-seqs", "0"], "max_num_seqs"),
    "missing file": (lambda model, directory: [str(model), "--deploy-config", f"{directory}/no.yaml"], "no.yaml"),
    "unreadable YAML": (with_file("stages: [\n"), "deploy.yaml"),
    "duplicate key": (with_file("stages:\n- stage_id: 0\n  seed: 1\n  seed: 2\n"), "seed"),
    "unknown key": (with_file("stages:\n- stage_id: 0\n  max_num_seq: 1\n"), "'max_num_seqs'"),
    "stage overrides": (lambda model, _: [str(model), "--stage-overrides", "{0: 1"], "--stage-overrides"),
    "LoRA": (lambda model, _: [str(model), "--enable-lora"], "LoRA"),
    "damaged weights": (damaged, "model.safetensors"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_user_errors_exit_with_2_and_say_what_to_do(
    name: str, model: Path, tmp_path: Path, served: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    make_words, text = REFUSALS[name]
    assert main(["serve", *make_words(model, tmp_path)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "vllm-omni serve: error: " in captured.err
    assert text in captured.err.partition("vllm-omni serve: error: ")[2]
    assert served == []


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        yield taken.getsockname()[1]


def test_a_port_in_use_is_found_before_the_checkpoint_is_read_or_packed(
    taken_port: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(omni_base, "prepare", lambda model, **options: pytest.fail("the checkpoint was read"))
    assert main(["serve", "model", "--port", str(taken_port)]) == 2
    assert f"cannot listen on 127.0.0.1:{taken_port}: " in capsys.readouterr().err


def test_a_port_that_was_tried_is_free_for_the_server(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ports: list[int] = []

    def run_server(deployment: Any, options: Any, started_at: float) -> int:
        with api_server.bind_socket(options.host, options.port) as sock:
            ports.append(sock.getsockname()[1])
        return 0

    monkeypatch.setattr(api_server, "run_server", run_server)
    monkeypatch.setattr(serve, "leave", lambda code: None)
    port = free_port()
    main(["serve", str(model), "--port", str(port)])
    assert ports == [port], capsys.readouterr().err


def test_print_config_needs_no_port(model: Path, taken_port: int) -> None:
    assert main(["serve", str(model), "--print-config", "--port", str(taken_port)]) == 0


def test_a_port_that_is_no_number_is_refused_by_the_parser(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["serve", str(model), "--port", "http"])
    assert caught.value.code == 2
    assert "--port" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["unknown flag", "missing model", "duplicate key", "damaged weights"])
def test_refusals_are_quick_and_load_neither_torch_nor_vllm(name: str, model: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from vllm_omni.entrypoints.cli.main import main; code = main(sys.argv[1:]); "
        "print(sorted({'torch', 'vllm', 'transformers'} & set(sys.modules))); sys.exit(code)"
    )
    words = ["serve", "--port", "0", *REFUSALS[name][0](model, tmp_path)]
    before = getrusage(RUSAGE_CHILDREN)
    result = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=60)
    after = getrusage(RUSAGE_CHILDREN)
    assert result.returncode == 2, result.stderr
    assert result.stdout.strip() == "[]"
    assert REFUSALS[name][1] in result.stderr
    # Processor time: on a busy machine it is what a user alone on it waits.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < MAX_REFUSAL_CPU_S
