"""Serving text loads no package of other modalities."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.engine

# Serves one chat request in this very process, then looks at what is loaded.
SCRIPT = """
import asyncio, json, sys
import httpx
from vllm_omni.entrypoints.async_omni import AsyncOmni

async def main():
    omni = AsyncOmni(sys.argv[1], deploy_profile="edge", kv_cache_memory_bytes="64MiB", max_num_seqs=1)
    from vllm_omni.entrypoints.openai.serving import ServingOptions, build_app
    transport = httpx.ASGITransport(app=build_app(omni, ServingOptions(("smollm2",))))
    body = {"model": "smollm2", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=None) as client:
        answer = await client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 2
    omni.shutdown()

asyncio.run(main())
print(json.dumps(sorted({name.partition(".")[0] for name in sys.modules})))
"""
OTHER_MODALITIES = {"diffusers", "x_transformers", "whisper", "torchvision", "torchaudio"}


def test_a_text_request_loads_no_package_of_other_modalities(
    smollm2_artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # None of them is installed here; as stand-ins they could be loaded. transformers takes whichever torchvision and
    # torchaudio it finds, so those are kept out of the environment itself (tests/test_environment.py).
    for name in OTHER_MODALITIES - {"torchvision", "torchaudio"}:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    command = [sys.executable, "-c", SCRIPT, str(smollm2_artifact)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert run.returncode == 0, run.stderr
    loaded = set(run.stdout.strip().splitlines()[-1].strip("[]").replace('"', "").split(", "))
    assert "vllm" in loaded
    assert loaded & OTHER_MODALITIES == set()
