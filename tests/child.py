"""Runs code in a process of its own and takes the facts that it prints."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from vllm_omni.native.library import native_status

TIMEOUT_S = 240.0


def facts_of(code: str, *arguments: Path | str) -> dict[str, Any]:
    """What `code`, run by this interpreter with `arguments`, prints as its last line: one JSON object."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert run.returncode == 0, run.stderr[-4000:]
    return dict(json.loads(run.stdout.strip().splitlines()[-1]))


def require_native_core() -> None:
    """Skips where there is no native core."""
    if native_status().isa is None:
        pytest.skip(f"no native core: {native_status().reason}")
