"""A start that fails after the weights were loaded leaves no threads of the native core and little memory behind."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from vllm_omni.native.library import native_status

pytestmark = pytest.mark.engine

# The cache alone would be 64 MiB a start; what stays is vLLM's own record of a model.
MAX_LEFT_BYTES = 40 << 20
CODE = """
import gc, json, os, sys
from vllm_omni import AsyncOmni
from vllm_omni.edge.memory import anonymous_bytes
from vllm_omni.errors import EngineError

def start_in_vain():
    try:
        # Loaded, and then found to have no room for one sequence.
        AsyncOmni(sys.argv[1], deploy_profile="edge", kv_cache_memory_bytes=4 << 20, max_model_len=8192)
    except EngineError as error:
        return str(error)

def left():
    gc.collect()
    return {"threads": len(os.listdir("/proc/self/task")), "bytes": anonymous_bytes()}

message = start_in_vain()
first = left()
start_in_vain()
print(json.dumps({"message": message, "first": first, "second": left()}))
"""


@pytest.fixture(scope="module")
def facts(smollm2_artifact: Path) -> dict[str, Any]:
    """Threads and bytes after one and after two starts in vain."""
    if native_status().isa is None:
        pytest.skip(f"no native core: {native_status().reason}")
    command = [sys.executable, "-c", CODE, str(smollm2_artifact)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert run.returncode == 0, run.stderr[-4000:]
    return dict(json.loads(run.stdout.strip().splitlines()[-1]))


def test_the_error_tells_what_was_missing(facts: dict[str, Any]) -> None:
    assert "KV cache" in facts["message"]


def test_threads_end(facts: dict[str, Any]) -> None:
    assert facts["second"]["threads"] == facts["first"]["threads"]


def test_memory_is_freed(facts: dict[str, Any]) -> None:
    assert facts["second"]["bytes"] - facts["first"]["bytes"] < MAX_LEFT_BYTES
