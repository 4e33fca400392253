"""The worker that holds the model and the KV cache in the engine thread."""

import logging
import time
from typing import Any

from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_omni.edge.memory import anonymous_bytes
from vllm_omni.model_executor.models.decoder.model import OmniDecoderForCausalLM
from vllm_omni.platforms.cpu.shims.embedding_pack import embedding_pack
from vllm_omni.platforms.cpu.shims.ngram_drafts import ngram_drafts_without_numba
from vllm_omni.platforms.cpu.shims.process_groups import process_groups
from vllm_omni.worker.cpu_model_runner import OmniCPUModelRunner

logger = logging.getLogger("vllm_omni.worker")


class OmniCPUWorker(CPUWorker):
    """vLLM's CPU worker with a report of what was requested and what was allocated."""

    def init_device(self) -> None:
        """Constructs process groups and model runner, n-gram drafts also where numba is not installed."""
        if self.speculative_config is not None and self.speculative_config.method == "ngram":
            ngram_drafts_without_numba()
        with process_groups(self.parallel_config.world_size_across_dp):
            super().init_device()

    def load_model(self, **arguments: Any) -> None:
        """Loads the weights and logs how long it took and what the process had allocated before and has now."""
        start, before = time.monotonic(), anonymous_bytes()
        with embedding_pack():
            super().load_model(**arguments)
        logger.info(
            "event=model_loaded seconds=%.2f rss_anon_before_bytes=%s rss_anon_bytes=%s",
            time.monotonic() - start,
            before,
            anonymous_bytes(),
        )

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        """Allocates the KV cache, hands it to a model that reads it itself, and logs the bytes."""
        super().initialize_from_config(kv_cache_config)
        model = self.model_runner.get_model()
        if isinstance(model, OmniDecoderForCausalLM):
            model.attach_cache([group.layer_names for group in kv_cache_config.kv_cache_groups])
            OmniCPUModelRunner.adopt(self.model_runner)
        allocated_bytes = sum(tensor.size for tensor in kv_cache_config.kv_cache_tensors)
        logger.info(
            "event=kv_cache_allocated requested_bytes=%s allocated_bytes=%d num_blocks=%d max_model_len=%d",
            self.cache_config.kv_cache_memory_bytes,
            allocated_bytes,
            kv_cache_config.num_blocks,
            self.model_config.max_model_len,
        )

    def shutdown(self) -> None:
        """Ends the model's own threads before vLLM frees the cache that they read."""
        model = self.model_runner.get_model() if hasattr(self, "model_runner") else None
        if isinstance(model, OmniDecoderForCausalLM):
            model.close()
        super().shutdown()
