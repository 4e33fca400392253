"""Keeps a table that is only looked up from being packed for multiplication as well.

What is wrong, in vLLM 0.32: on a CPU, `UnquantizedEmbeddingMethod` gives every embedding a packed copy of its table for
matrix multiplication, the input embedding included, which no model multiplies unless it is the output layer too. With
a tied embedding the table is in memory three times.

Here an input embedding is packed when it is first multiplied, which the warm-up sees to.

Off: with `VLLM_OMNI_SHIM_EMBEDDING_PACK=0`; by itself where vLLM's method packs nothing.
`tests/integration/test_shims.py` fails when the shim is no longer needed.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod

from vllm_omni import envs

logger = logging.getLogger("vllm_omni.shims")


@contextmanager
def embedding_pack() -> Iterator[None]:
    """Within the block, weights that are loaded get no packed copy of an input embedding."""
    if not envs.VLLM_OMNI_SHIM_EMBEDDING_PACK:
        yield
        return
    pack = UnquantizedEmbeddingMethod.process_weights_after_loading
    deferred_bytes = 0

    def pack_output_layers_only(method: UnquantizedEmbeddingMethod, layer: torch.nn.Module) -> None:
        nonlocal deferred_bytes
        if isinstance(layer, ParallelLMHead):
            return pack(method, layer)

        def pack_and_multiply(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
            pack(method, layer)
            return layer.cpu_linear(x, weight, bias)

        layer.cpu_linear = pack_and_multiply
        deferred_bytes += layer.weight.nbytes

    UnquantizedEmbeddingMethod.process_weights_after_loading = pack_output_layers_only
    try:
        yield
    finally:
        UnquantizedEmbeddingMethod.process_weights_after_loading = pack
    logger.info("event=shim_used shim=embedding_pack deferred_bytes=%d", deferred_bytes)
