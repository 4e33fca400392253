"""vLLM's CPU platform, changed where one process on a small machine needs it."""

import logging
from typing import TYPE_CHECKING

from vllm.platforms.cpu import CpuPlatform

from vllm_omni import envs
from vllm_omni.errors import HardwareError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger("vllm_omni.platform")

WORKER_CLASS = "vllm_omni.worker.cpu_worker.OmniCPUWorker"
# vLLM sets these for worker processes that it spawns. There are none here, and children of an embedding
# application must not inherit a preload.
VARIABLES_KEPT = ("LD_PRELOAD", "VLLM_ENABLE_V1_MULTIPROCESSING")


class OmniCpuPlatform(CpuPlatform):
    """Runs the engine in this process; an explicit KV size beats every other setting."""

    # vLLM compiles helpers of its sampler with this, on first use, whatever the model's compilation mode is.
    simple_compile_backend = "eager"

    @classmethod
    def check_and_update_config(cls, vllm_config: "VllmConfig") -> None:
        """Lets vLLM adapt `vllm_config` to the CPU, then restores what was asked for explicitly."""
        requested_kv_bytes = vllm_config.cache_config.kv_cache_memory_bytes
        with envs.kept(VARIABLES_KEPT):
            # vLLM forbids the uniprocess executor while this is "1".
            envs.export({"VLLM_ENABLE_V1_MULTIPROCESSING": "0"})
            super().check_and_update_config(vllm_config)
        if requested_kv_bytes is not None and vllm_config.cache_config.kv_cache_memory_bytes != requested_kv_bytes:
            logger.warning(
                "event=kv_bytes_kept requested_bytes=%d ignored_bytes=%s ignored_source=VLLM_CPU_KVCACHE_SPACE",
                requested_kv_bytes,
                vllm_config.cache_config.kv_cache_memory_bytes,
            )
            vllm_config.cache_config.kv_cache_memory_bytes = requested_kv_bytes
        vllm_config.parallel_config.worker_cls = WORKER_CLASS


def adopt_current_platform() -> None:
    """Makes the platform object of this process one of ours.

    vLLM chooses its platform once, when something first asks for it; an application that imported vLLM before this
    package has vLLM's own, and modules hold on to that object. Changing the object's class reaches all of them.

    Raises:
        HardwareError: vLLM runs on another kind of device in this process.
    """
    # Asking vLLM for its platform may import this very file.
    from vllm.platforms import current_platform

    if isinstance(current_platform, OmniCpuPlatform):
        return
    if type(current_platform) is not CpuPlatform:
        raise HardwareError(
            f"vLLM runs on {type(current_platform).__name__} in this process; accepted: a CPU. Install the build for "
            "this device, or start a process in which no accelerator is visible"
        )
    current_platform.__class__ = OmniCpuPlatform
