"""Keeps torch's compiler from being imported by an engine that compiles nothing.

What is wrong, in vLLM 0.32: `import vllm` runs `vllm.env_override`, which imports torch's inductor in order to patch
it; and helpers of the sampler and of drafting are decorated with `torch.compile`, whose default backend imports it
again. `docs/edge/results.md` has what that costs.

Off: with `VLLM_OMNI_SHIM_EAGER_IMPORT=0`; by itself where a stage compiles, where vLLM is imported already, and once
vLLM's file no longer names the inductor. `tests/integration/test_shims.py` fails when the shim is no longer needed.
"""

import importlib.util
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from vllm_omni import envs

logger = logging.getLogger("vllm_omni.shims")

PATCHING_MODULE = "vllm.env_override"
COMPILER = "torch._inductor"


class DeferredModule(ModuleType):
    """A module whose file runs when an attribute is first looked up: code that does compile still finds the patches."""

    def __init__(self, name: str, path: Path):
        super().__init__(name, "Runs when it is first used.")
        self.__file__ = str(path)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        spec = importlib.util.spec_from_file_location(self.__name__, self.__file__)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        self.__dict__.update(module.__dict__)
        return self.__dict__[name]


def patching_file() -> Path | None:
    """The file of the installed vLLM that imports the compiler; None where there is none. Imports nothing."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin).with_name("env_override.py")
    return path if path.exists() and COMPILER in path.read_text(encoding="utf-8") else None


@contextmanager
def eager_import(*, compiles_nothing: bool) -> Iterator[None]:
    """Within the block vLLM's modules are imported without torch's compiler.

    `torch.compile` returns its function unchanged until the block ends, in every thread.

    Args:
        compiles_nothing: Whether the configuration rules compilation out; False leaves everything as it is.
    """
    path = patching_file()
    if not (compiles_nothing and envs.VLLM_OMNI_SHIM_EAGER_IMPORT) or "vllm" in sys.modules or path is None:
        yield
        return
    import torch

    original = torch.compile
    sys.modules[PATCHING_MODULE] = DeferredModule(PATCHING_MODULE, path)
    torch.compile = _leave_unchanged  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.compile = original
    logger.info("event=shim_used shim=eager_import compiler_imported=%s", f"{COMPILER}.compile_fx" in sys.modules)


def _leave_unchanged(model: Callable[..., Any] | None = None, **_options: Any) -> Any:
    """`torch.compile` as a decorator, with or without arguments, that does nothing."""
    return model if model is not None else lambda function: function
