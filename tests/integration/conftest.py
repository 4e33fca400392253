"""A second server with tight limits, and the ordinary OpenAI client of the shared one."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import openai
import pytest

from tests.server import READY_TIMEOUT_S, Answer, RunningServer

API_KEY = "key-of-the-test"
MAX_REQUEST_BYTES = 64 << 10
KEEP_ALIVE_INTERVAL_S = 0.2
STRICT_FLAGS = (
    "--deploy-profile", "edge",
    "--max-num-seqs", "1",
    "--api-key", "another-key", API_KEY,
    "--max-request-bytes", "64KiB",
    "--keep-alive-interval-s", str(KEEP_ALIVE_INTERVAL_S),
)  # fmt: skip


@pytest.fixture(scope="session")
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    """The OpenAI client as anyone would make it; it must not hide an answer by retrying."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0, timeout=120) as made:
        yield made


@dataclass(frozen=True)
class StrictServer:
    """A server with an API key, small bodies, one running request, frequent keep-alives and no usable cache directory.

    Attributes:
        server: The running server.
        loading: What `/health`, `/health/ready` and `/v1/models` answered before it was ready.
        temporary: Its TMPDIR.
        shared_memory: Names in /dev/shm before it started.
    """

    server: RunningServer
    loading: dict[str, Answer]
    temporary: Path
    shared_memory: frozenset[str]

    @property
    def authorization(self) -> dict[str, str]:
        return {"authorization": f"Bearer {API_KEY}"}


def shared_memory_names() -> frozenset[str]:
    """Names in /dev/shm."""
    return frozenset(path.name for path in Path("/dev/shm").iterdir())


@pytest.fixture(scope="session")
def strict(smollm2_artifact: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StrictServer]:
    directory = tmp_path_factory.mktemp("strict")
    temporary = directory / "tmp"
    temporary.mkdir()
    (directory / "file").write_text("a cache directory cannot be made below a file")
    environment = {
        "VLLM_OMNI_CACHE_DIR": str(directory / "file" / "omni"),
        "VLLM_CACHE_ROOT": str(directory / "file" / "vllm"),
        "TMPDIR": str(temporary),
    }
    before = shared_memory_names()
    arguments = [str(smollm2_artifact), "--served-model-name", RunningServer.model, *STRICT_FLAGS]
    server = RunningServer.launch(arguments, directory / "server.log", environment)
    try:
        loading = _observe_loading(server)
        server.wait_ready()
        yield StrictServer(server, loading, temporary, before)
    finally:
        server.stop()


def _observe_loading(server: RunningServer) -> dict[str, Answer]:
    """Waits until the server listens, and asks it at once: the model takes seconds to load."""
    deadline = time.monotonic() + READY_TIMEOUT_S
    while True:
        try:
            paths = ("/health", "/health/ready", "/v1/models")
            return {path: server.get(path) for path in paths}
        except ConnectionRefusedError:
            assert server.process.poll() is None, server.tail()
            assert time.monotonic() < deadline, server.tail()
            time.sleep(0.02)
