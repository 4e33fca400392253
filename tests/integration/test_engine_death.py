"""The engine dies under its requests: they fail, health says so, and a server exits for its supervisor."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.engine

# Breaks the engine core of a running server from inside and waits for the process to end by itself.
SCRIPT = """
import asyncio, sys, threading, time
from vllm_omni.engine.core_thread import CoreThread
from vllm_omni.entrypoints.cli.main import main

def fail():
    raise RuntimeError("broken on purpose")

original = CoreThread._handle
def handle(self, core, work):
    original(self, core, work)
    if getattr(work, "sampling_params", None) is not None and work.sampling_params.max_tokens == 7:
        core.step_fn = fail
CoreThread._handle = handle
main(sys.argv[1:])
"""


def test_server_fails_requests_and_exits_when_the_engine_dies(smollm2: Path, tmp_path: Path) -> None:
    from tests.server import RunningServer, free_port

    port = free_port()
    arguments = [
        "serve",
        str(smollm2),
        "--served-model-name",
        "smollm2",
        "--deploy-profile",
        "edge",
        "--quantization",
        "none",
        "--port",
        str(port),
    ]
    log = tmp_path / "server.log"
    with log.open("wb") as output:
        process = subprocess.Popen([sys.executable, "-c", SCRIPT, *arguments], stdout=output, stderr=subprocess.STDOUT)
    server = RunningServer(process, port, log)
    try:
        server.wait_ready()
        answer = server.complete(max_tokens=7)
        assert answer.status == 503
        assert answer.error["message"]
        assert process.wait(15) == 1
        assert "event=engine_core_died" in server.tail(200)
        assert "event=engine_dead action=exit" in server.tail(200)
    finally:
        server.stop()
