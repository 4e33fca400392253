"""Each shim is still needed, does what it says, and can be switched off. Fresh interpreters throughout."""

import subprocess
import sys

import pytest

ENGINE_IMPORT = "import vllm.v1.engine.async_llm"
REPORT = "import sys; print('torch._inductor.lowering' in sys.modules)"


def run(script: str) -> str:
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=240)
    assert run.returncode == 0, run.stderr
    return run.stdout.strip().splitlines()[-1]


def with_shim(compiles_nothing: bool) -> str:
    return f"""
from vllm_omni.platforms.cpu.shims.eager_import import eager_import
import torch
original = torch.compile
with eager_import(compiles_nothing={compiles_nothing}):
    {ENGINE_IMPORT}
assert torch.compile is original
{REPORT}
"""


def test_vllm_alone_imports_the_compiler() -> None:
    """When this fails, vLLM is fixed and the shim `eager_import` can go."""
    assert run(f"{ENGINE_IMPORT}; {REPORT}") == "True"


def test_with_the_shim_it_does_not() -> None:
    assert run(with_shim(compiles_nothing=True)) == "False"


def test_a_stage_that_compiles_keeps_the_compiler() -> None:
    assert run(with_shim(compiles_nothing=False)) == "True"


def test_the_switch_keeps_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_OMNI_SHIM_EAGER_IMPORT", "0")
    assert run(with_shim(compiles_nothing=True)) == "True"


def test_code_that_does_compile_still_finds_the_patches() -> None:
    script = with_shim(compiles_nothing=True) + "\nfrom vllm.compilation import compiler_interface\n" + REPORT
    assert run(script) == "True"
