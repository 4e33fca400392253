"""The worker that holds the model and the KV cache in the engine thread."""

import logging
import time
from typing import Any

from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_omni.edge.memory import anonymous_bytes
from vllm_omni.platforms.cpu.shims.embedding_pack import embedding_pack

logger = logging.getLogger("vllm_omni.worker")


class OmniCPUWorker(CPUWorker):
    """vLLM's CPU worker with a report of what was requested and what was allocated."""

    def load_model(self, **arguments: Any) -> None:
        """Loads the weights and logs how long it took and what the process has allocated since its start."""
        start = time.monotonic()
        with embedding_pack():
            super().load_model(**arguments)
        logger.info("event=model_loaded seconds=%.2f rss_anon_bytes=%s", time.monotonic() - start, anonymous_bytes())

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        """Allocates the KV cache and logs requested and allocated bytes."""
        super().initialize_from_config(kv_cache_config)
        allocated_bytes = sum(tensor.size for tensor in kv_cache_config.kv_cache_tensors)
        logger.info(
            "event=kv_cache_allocated requested_bytes=%s allocated_bytes=%d num_blocks=%d max_model_len=%d",
            self.cache_config.kv_cache_memory_bytes,
            allocated_bytes,
            kv_cache_config.num_blocks,
            self.model_config.max_model_len,
        )
