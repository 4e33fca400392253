"""The edge profile compiles nothing: not the model, not vLLM's helpers, not at the start and not on first use.

The script imports vLLM before this package, as sorted imports do: the engine must come out the same.
"""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.engine

SCRIPT = """
import asyncio, sys
from vllm import SamplingParams
from vllm.platforms import current_platform

from vllm_omni import AsyncOmni

async def main():
    before = current_platform.get_device_name()
    omni = AsyncOmni(model=sys.argv[1], deploy_profile="edge", quantization="none")
    params = SamplingParams(max_tokens=3, temperature=1.0, top_k=5, top_p=0.9, logprobs=2, prompt_logprobs=1)
    async for output in omni.generate("Hello", params):
        pass
    omni.shutdown()
    print("platform", type(current_platform).__name__, before, current_platform.get_device_name())

asyncio.run(main())
"""


def test_nothing_is_compiled(smollm2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    caches = {name: tmp_path / name for name in ("TORCHINDUCTOR_CACHE_DIR", "VLLM_CACHE_ROOT", "XDG_CACHE_HOME")}
    for name, path in caches.items():
        monkeypatch.setenv(name, str(path))
    # A compiler that is called fails the run.
    monkeypatch.setenv("CXX", "/bin/false")
    run = subprocess.run([sys.executable, "-c", SCRIPT, str(smollm2)], capture_output=True, text=True, timeout=240)
    assert run.returncode == 0, run.stderr
    assert "platform OmniCpuPlatform cpu cpu" in run.stdout
    compiled = [path for root in caches.values() for path in root.rglob("*") if path.suffix in (".so", ".cpp", ".o")]
    assert compiled == []
