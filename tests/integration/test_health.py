"""Health of a loading and of a ready server, and the shape of its process."""

from pathlib import Path

import psutil
import pytest

from tests.integration.conftest import StrictServer
from tests.server import RunningServer
from vllm_omni.native.library import native_status

pytestmark = pytest.mark.engine

# Compute threads for each core, the server's own, and the pools of torch, tokenizers and grammar libraries.
MAX_THREADS = 64


def test_health_is_200_while_loading(strict: StrictServer) -> None:
    answer = strict.loading["/health"]
    assert answer.status == 200
    assert answer.json() == {"status": "starting"}


def test_ready_is_503_while_loading(strict: StrictServer) -> None:
    answer = strict.loading["/health/ready"]
    assert answer.status == 503
    assert answer.json()["status"] == "starting"


def test_a_request_while_loading_is_told_to_come_back(strict: StrictServer) -> None:
    answer = strict.loading["/v1/models"]
    assert answer.status == 503
    assert int(answer.headers["retry-after"]) >= 1
    assert "starting" in answer.error["message"]


@pytest.mark.parametrize("path", ["/health", "/health/ready"])
def test_health_after_loading(server: RunningServer, path: str) -> None:
    answer = server.get(path)
    assert answer.status == 200
    body = answer.json()
    assert body["status"] == "ready"
    assert body["max_requests"] == 10
    assert body["max_model_len"] == 8192
    assert body["stage_topology"] == "inline"


def test_health_says_what_computes(server: RunningServer) -> None:
    body, status = server.get("/health").json(), native_status()
    paths = ("native", "native-w4a8") if status.isa else ("torch", "torch-unpacked")
    assert (body["forward_path"], body["weight_path"]) == paths
    assert (body.get("native_isa"), body.get("numerics")) == (status.isa, status.numerics)


def test_the_server_is_one_process(server: RunningServer) -> None:
    process = psutil.Process(server.process.pid)
    with server.stream(max_tokens=8, ignore_eos=True) as response:
        response.readline()
        assert process.children(recursive=True) == []
        assert process.num_threads() <= MAX_THREADS
    server.wait_idle()
    assert process.children(recursive=True) == []


def test_threads_do_not_grow_with_requests(server: RunningServer) -> None:
    process = psutil.Process(server.process.pid)
    assert server.complete(max_tokens=1).status == 200
    before = process.num_threads()
    for _ in range(5):
        assert server.complete(max_tokens=1).status == 200
    assert process.num_threads() <= before + 2


def test_an_unwritable_cache_directory_is_a_warning(strict: StrictServer) -> None:
    lines = strict.server.log.read_text(errors="replace").splitlines()
    warnings = [line for line in lines if " WARNING " in line and "event=verified_cache_unwritable" in line]
    assert len(warnings) == 1
    assert "action=hash_every_start" in warnings[0]
    assert Path(strict.server.log.parent, "file").is_file()
