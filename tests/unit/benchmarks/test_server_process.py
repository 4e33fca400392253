import os
import sys
from pathlib import Path

import pytest

from benchmarks.edge_harness.arms import free_port
from benchmarks.edge_harness.process_tree import read_process
from benchmarks.edge_harness.server_process import ServerProcess
from vllm_omni.errors import EngineError

# A tiny HTTP server with a child that outlives it unless it is stopped.
SERVER = """
import http.server, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
class Ready(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/ready" else 503)
        self.end_headers()
print("child", child.pid, flush=True)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Ready).serve_forever()
"""


def start(tmp_path: Path, program: str, environment: dict[str, str] | None = None) -> ServerProcess:
    port = free_port()
    return ServerProcess([sys.executable, "-c", program, str(port)], environment or {}, port, tmp_path / "log.txt")


@pytest.fixture
def short_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.edge_harness.server_process.ORPHAN_TIMEOUT_S", 0.1)


def test_a_server_is_ready_and_then_gone_with_its_children(tmp_path: Path, short_patience: None) -> None:
    with start(tmp_path, SERVER) as server:
        assert 0 < server.wait_ready("/ready", 30) < 30
        tree = server.tree()
        assert len(tree) == 2
    assert len(server.killed) == 1
    # A killed orphan may stay a moment until its new parent collects it; it is then a zombie, which counts as gone.
    left = [read_process(process.pid) for process in tree]
    assert [found for found, process in zip(left, tree, strict=True) if found == process] == []


def test_another_status_is_not_ready(tmp_path: Path, short_patience: None) -> None:
    with start(tmp_path, SERVER) as server, pytest.raises(EngineError, match="not ready in 1 s"):
        server.wait_ready("/other", 1)


def test_a_server_that_ends_is_an_error_with_its_output(tmp_path: Path) -> None:
    with start(tmp_path, "raise SystemExit('no memory left')") as server:
        with pytest.raises(EngineError, match=r"(?s)code 1 .*no memory left"):
            server.wait_ready("/ready", 30)
        assert server.tree() == []


def test_variables_reach_the_server_and_not_this_process(tmp_path: Path) -> None:
    program = "import os; print('value=' + os.environ['SERVE_COMPARE_TEST'])"
    with (
        start(tmp_path, program, {"SERVE_COMPARE_TEST": "here"}) as server,
        pytest.raises(EngineError, match="value=here"),
    ):
        server.wait_ready("/ready", 30)
    assert "SERVE_COMPARE_TEST" not in os.environ


def test_stopping_twice_is_harmless(tmp_path: Path) -> None:
    server = start(tmp_path, "import signal; signal.pause()")
    server.stop()
    server.stop()
    assert server.killed == []
