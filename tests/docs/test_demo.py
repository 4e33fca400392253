"""The demo's script, as `make demo` runs it."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.margins import QUESTION, Margins

pytestmark = pytest.mark.engine

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, str(ROOT / "examples" / "demo.py"), "--model"]


def test_the_demo_prints_the_answer_and_its_speed(smollm2_artifact: Path, margins: Margins) -> None:
    run = subprocess.run([*COMMAND, str(smollm2_artifact)], capture_output=True, text=True, timeout=240)
    assert run.returncode == 0, run.stderr
    assert f"> {QUESTION.text}\n{margins.require(QUESTION).text}\n" in run.stdout
    assert re.search(r"TTFT \d+ ms, decode [\d.]+ tok/s, \d+ tokens", run.stdout)


def test_a_server_that_does_not_start_ends_the_demo(tmp_path: Path) -> None:
    run = subprocess.run([*COMMAND, str(tmp_path / "missing")], capture_output=True, text=True, timeout=60)
    assert run.returncode == 1
    assert "the server ended with exit code 2" in run.stderr
