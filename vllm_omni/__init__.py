"""vLLM-Omni Edge: language models on small CPU machines, with vLLM as the engine.

Importing the package loads neither torch nor vLLM; `Omni` and `AsyncOmni` do, when first used.
"""

from typing import TYPE_CHECKING, Any

from vllm_omni.version import __version__, __version_tuple__

if TYPE_CHECKING:
    from vllm_omni.entrypoints.async_omni import AsyncOmni
    from vllm_omni.entrypoints.omni import Omni

__all__ = ["AsyncOmni", "Omni", "__version__", "__version_tuple__"]


def __getattr__(name: str) -> Any:
    if name == "Omni":
        from vllm_omni.entrypoints.omni import Omni

        return Omni
    if name == "AsyncOmni":
        from vllm_omni.entrypoints.async_omni import AsyncOmni

        return AsyncOmni
    raise AttributeError(f"module 'vllm_omni' has no attribute {name!r}")
