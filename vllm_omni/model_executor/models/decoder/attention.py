"""What vLLM needs to know of a layer's attention: how its cache is laid out, and which rows a step has.

No layer computes attention by itself here: the whole stack is one call, which finds each layer's cache where vLLM has
put it. `csrc/README.md` draws a page.
"""

from dataclasses import replace
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionImplBase,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    FullAttentionSpec,
    KVCacheLayout,
    KVCacheSpec,
    KVQuantMode,
    SlidingWindowSpec,
)

from vllm_omni.errors import ConfigError
from vllm_omni.model_executor.models.decoder.step import GroupRows
from vllm_omni.native.spec import kv_cell_bytes

BLOCK_SIZE_MULTIPLE = 16
# vLLM's names of cache types to the native core's.
CACHE_KINDS = {"auto": "bfloat16", "bfloat16": "bfloat16", "int8_per_token_head": "int8"}


def cache_kind(cache_dtype: str) -> str:
    """The native core's name of a cache type.

    Raises:
        ConfigError: Artifacts have no cache of that type.
    """
    if cache_dtype not in CACHE_KINDS:
        raise ConfigError(f"kv_cache_dtype is {cache_dtype!r}; accepted for an artifact: auto, bfloat16, int8")
    return CACHE_KINDS[cache_dtype]


class GroupRowsBuilder(AttentionMetadataBuilder[GroupRows]):
    """Takes vLLM's tensors as they are: nothing is computed or copied for a step."""

    def __init__(
        self, kv_cache_spec: KVCacheSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> GroupRows:
        common = common_attn_metadata
        return GroupRows(
            query_start=common.query_start_loc_cpu,
            seq_lens=common.seq_lens,
            block_table=common.block_table_tensor,
            slots=common.slot_mapping,
        )


class OmniAttentionBackend(AttentionBackend):
    """Names the cache layout and the metadata that the decoder stack reads."""

    supported_dtypes = [torch.float32, torch.bfloat16, torch.float16]
    supported_kv_cache_dtypes = ["auto", "bfloat16", "int8_per_token_head"]

    @staticmethod
    def get_name() -> str:
        return "OMNI_DECODER"

    @staticmethod
    def get_impl_cls() -> type[AttentionImplBase]:
        """There is none. vLLM asks only about context parallelism, and takes this answer for "not supported"."""
        raise NotImplementedError("the decoder stack computes attention, no layer does")

    @staticmethod
    def get_builder_cls() -> type[GroupRowsBuilder]:
        return GroupRowsBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: KVCacheSpec | None = None) -> list[int | MultipleOf]:
        return [MultipleOf(BLOCK_SIZE_MULTIPLE)]

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        """Pages of a layer follow each other; heads are outermost in a page."""
        return (KVCacheLayout.LBHNC,)


class OmniAttention(AttentionLayerBase):
    """One layer's cache, registered under `prefix` where vLLM looks for attention layers.

    Args:
        vllm_config: The engine's configuration; the layer enters itself in it.
        prefix: Unique name with the layer's number, such as `model.layers.3.self_attn`.
        num_heads: Query heads.
        num_kv_heads: Heads of keys and values.
        head_dim: Size of a head.
        window: Keys that a query sees, itself included; 0: all before it.

    Attributes:
        kv_cache: [blocks, kv heads, tokens of a block, cell] bfloat16 or int8, once vLLM has bound it.
    """

    def __init__(
        self, vllm_config: VllmConfig, prefix: str, *, num_heads: int, num_kv_heads: int, head_dim: int, window: int
    ):
        self.prefix = prefix
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.window = window
        self.kv_cache = torch.empty(0)
        layers = vllm_config.compilation_config.static_forward_context
        assert prefix not in layers, f"two attention layers are named {prefix}"
        layers[prefix] = self

    def get_attn_backend(self) -> type[AttentionBackend]:
        return OmniAttentionBackend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> AttentionSpec:
        """vLLM's description of the layer's pages.

        Raises:
            ConfigError: The cache type is not one of the native core's.
        """
        cache = vllm_config.cache_config
        fields: dict[str, Any] = {
            "block_size": cache.block_size,
            "num_kv_heads": self.num_kv_heads,
            "head_size": self.head_dim,
            "dtype": torch.bfloat16,
        }
        spec: AttentionSpec = FullAttentionSpec(**fields)
        if self.window:
            spec = SlidingWindowSpec(**fields, sliding_window=self.window)
        if cache_kind(cache.cache_dtype) == "bfloat16":
            return spec
        return replace(
            spec,
            dtype=torch.int8,
            kv_quant_mode=KVQuantMode.INT8_PER_TOKEN_HEAD,
            state_content_bytes=kv_cell_bytes(self.head_dim, "int8"),
        )
