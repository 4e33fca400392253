import socket
from pathlib import Path

import pytest

from benchmarks.edge_harness.arms import EDGE, HOST, STOCK, Arm, Settings, cache_environment, free_port, server_command

PYTHON = Path("/venv/bin/python")
SETTINGS = Settings(Path("/models/small"), dtype="float32", kv_bytes=1024)


def command(arm: Arm, settings: Settings = SETTINGS) -> list[str]:
    return server_command(arm, settings, 8123, PYTHON)


def flags(words: list[str]) -> dict[str, str]:
    """The flags from `--port` on, which both arms have."""
    tail = words[words.index("--port") :]
    return dict(zip(tail[::2], tail[1::2], strict=True))


def test_edge_is_the_console_script_of_the_same_environment() -> None:
    assert command(EDGE)[:5] == ["/venv/bin/vllm-omni", "serve", "/models/small", "--deploy-profile", "edge"]
    assert command(EDGE)[5:7] == ["--quantization", "none"]


def test_stock_is_the_server_module_without_plugins() -> None:
    assert command(STOCK)[:5] == [
        "/venv/bin/python",
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        "/models/small",
    ]
    assert STOCK.environment == {"VLLM_PLUGINS": ""}


def test_both_servers_get_the_same_limits() -> None:
    assert flags(command(EDGE)) == flags(command(STOCK))
    assert flags(command(EDGE)) == {
        "--port": "8123",
        "--served-model-name": "bench",
        "--host": "127.0.0.1",
        "--dtype": "float32",
        "--kv-cache-memory-bytes": "1024",
        "--max-num-seqs": "4",
        "--max-num-batched-tokens": "2048",
    }


@pytest.mark.parametrize("arm", [EDGE, STOCK])
def test_a_longest_sequence_goes_to_both(arm: Arm) -> None:
    settings = Settings(Path("/models/small"), dtype="float32", kv_bytes=1024, max_model_len=2048)
    assert flags(command(arm, settings))["--max-model-len"] == "2048"


def test_cold_caches_are_separate_and_below_the_directory() -> None:
    environment = cache_environment(Path("/tmp/x"))
    assert set(environment) == {"VLLM_CACHE_ROOT", "XDG_CACHE_HOME", "TORCHINDUCTOR_CACHE_DIR", "VLLM_OMNI_CACHE_DIR"}
    assert len(set(environment.values())) == 4
    assert all(Path(value).parent == Path("/tmp/x") for value in environment.values())


def test_the_free_port_can_be_bound() -> None:
    with socket.socket() as listener:
        listener.bind((HOST, free_port()))
