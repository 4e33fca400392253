"""A start that fails after the weights were loaded leaves no threads of the native core and little memory behind."""

from pathlib import Path
from typing import Any

import pytest

from tests.child import facts_of, require_native_core

pytestmark = pytest.mark.engine

# Of a start; the first ones also allocate what is kept for the process.
MAX_LEFT_BYTES = 20 << 20
CODE = """
import gc, json, sys
from pathlib import Path
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
    names = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    return {"threads": names.count("omni-native"), "bytes": anonymous_bytes()}

message = start_in_vain()
facts = [left()]
for _ in range(3):
    start_in_vain()
    facts.append(left())
print(json.dumps({"message": message, "left": facts}))
"""


@pytest.fixture(scope="module")
def facts(smollm2_artifact: Path) -> dict[str, Any]:
    """Threads and bytes after each of four starts in vain."""
    require_native_core()
    return facts_of(CODE, smollm2_artifact)


def test_the_error_tells_what_was_missing(facts: dict[str, Any]) -> None:
    assert "KV cache" in facts["message"]


def test_threads_end(facts: dict[str, Any]) -> None:
    assert [each["threads"] for each in facts["left"]] == [0] * 4


def test_memory_does_not_grow_with_every_start(facts: dict[str, Any]) -> None:
    assert facts["left"][3]["bytes"] - facts["left"][1]["bytes"] < 2 * MAX_LEFT_BYTES
