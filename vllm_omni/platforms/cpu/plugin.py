"""Entry points that vLLM calls in every process where this distribution is installed.

Both do nothing until `activate` was called: a stock vLLM server in the same environment stays stock.
"""

import logging
from collections.abc import Iterable

from vllm_omni.quantization.artifact import ARCHITECTURE

logger = logging.getLogger("vllm_omni.platform")

_active = False
_architectures: tuple[str, ...] = ()


def activate(architectures: Iterable[str]) -> None:
    """Makes vLLM take this package's CPU platform in this process; call it before vLLM is imported.

    Args:
        architectures: Model classes about to be served, as the checkpoint names them.
    """
    global _active, _architectures
    _active = True
    _architectures = tuple(architectures)


def platform_class() -> str | None:
    """Dotted path of the platform class, or None where this package does not run the engine."""
    return "vllm_omni.platforms.cpu.platform.OmniCpuPlatform" if _active else None


def register_models() -> None:
    """Loads the classes of the architectures about to be served, this package's own among them. Re-entrant.

    vLLM inspects a class that it knows by name only in a subprocess, which imports vLLM once more; the answer is cached
    in the user's home, so only the first start of a model pays. A class that is loaded already needs neither.
    """
    if not _active:
        return
    if ARCHITECTURE in _architectures:
        from vllm_omni.model_executor.models.decoder.registration import register_decoder

        register_decoder()
    from vllm.model_executor.models.registry import ModelRegistry, _LazyRegisteredModel

    for architecture in _architectures:
        known = ModelRegistry.models.get(architecture)
        if isinstance(known, _LazyRegisteredModel):
            ModelRegistry.register_model(architecture, known.load_model_cls())
