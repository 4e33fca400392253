"""`OmniDecoderForCausalLM`: the class that vLLM runs for an artifact directory.

It keeps vLLM's interface and hands each step to a path: the native core where its library is there, torch otherwise.
Generation only, on one process; adapters and parallelism are refused.
"""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context

from vllm_omni.edge.forward_path import choose_forward_path
from vllm_omni.edge.weight_path import FACTS_KEY, choose_weight_path
from vllm_omni.errors import ConfigError
from vllm_omni.model_executor.models.decoder.attention import OmniAttention, cache_kind
from vllm_omni.model_executor.models.decoder.native_path import NativePath, native_matrix
from vllm_omni.model_executor.models.decoder.rope import rope_angles
from vllm_omni.model_executor.models.decoder.spec_mapping import HEAD, decodable_shape
from vllm_omni.model_executor.models.decoder.step import DecoderPath, DecoderStep
from vllm_omni.model_executor.models.decoder.torch_path import TorchMatrix, TorchPath
from vllm_omni.model_executor.models.decoder.weights import MappedWeights, decoder_weights
from vllm_omni.native.library import native_status
from vllm_omni.native.ops import Team
from vllm_omni.quantization.artifact import read_artifact

logger = logging.getLogger("vllm_omni.decoder")


class OmniDecoderForCausalLM(nn.Module):
    """A decoder-only language model over packed, mapped weights.

    Call order: construction, `load_artifact`, `attach_cache` (again after the cache moved), then steps; `close` ends
    the native core's threads. All from the engine thread.

    Args:
        vllm_config: The engine's configuration; what runs is written into its `additional_config`.
        prefix: Part of the names under which the attention layers are registered.

    Raises:
        ConfigError: The model or the configuration asks for something that this class does not do.
    """

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        super().__init__()
        _refuse_unsupported(vllm_config)
        self.vllm_config = vllm_config
        self.hf_config: dict[str, Any] = vllm_config.model_config.hf_config.to_dict()
        self.shape = decodable_shape(self.hf_config)
        self.attention = [
            OmniAttention(
                vllm_config,
                f"{prefix}.layers.{layer}.self_attn".removeprefix("."),
                num_heads=self.shape.num_heads,
                num_kv_heads=self.shape.num_kv_heads,
                head_dim=self.shape.head_dim,
                window=self.shape.windows[layer],
            )
            for layer in range(self.shape.num_layers)
        ]
        self._paths: dict[str, DecoderPath] = {}
        self._group_layers: tuple[str, ...] = ()
        self._has_native = False
        self._torch_threads: int | None = None
        max_rows = vllm_config.scheduler_config.max_num_batched_tokens
        # Pages of it come into being as steps need them.
        self._hidden = torch.empty((max_rows, self.shape.hidden_size), dtype=torch.float32)

    def load_artifact(self, directory: Path) -> None:
        """Maps the weights of `directory` and starts the path that will compute with them.

        Raises:
            WeightError: The directory is no intact artifact, or not of this model.
        """
        mapped = MappedWeights(read_artifact(directory))
        status = native_status()
        path, reason = choose_weight_path(status.isa, status.reason)
        self._has_native = status.isa is not None
        if self._has_native:
            native = self._native_path(mapped)
            self._paths = {"native_step": native, "native_prefill": native}
            self._leave_cores_to_native(native.num_threads)
        else:
            self._paths = {"torch": self._torch_path(mapped)}
        facts: dict[str, Any] = {"weight_path": path, "forward_path": "native" if self._has_native else "torch"}
        if self._has_native:
            facts |= {"native_isa": status.isa, "numerics": status.numerics}
        self._publish(facts)
        log = logger.info if self._has_native else logger.warning
        log("event=forward_path_chosen weight_path=%s reason=%s", path, reason)

    def attach_cache(self, groups: Sequence[Sequence[str]]) -> None:
        """Takes the pages that vLLM has bound to the attention layers.

        Args:
            groups: For each KV group the names of its layers.
        """
        group_of = {name: number for number, names in enumerate(groups) for name in names}
        pages = [layer.kv_cache for layer in self.attention]
        layer_groups = [group_of[layer.prefix] for layer in self.attention]
        length = self.vllm_config.model_config.max_model_len
        angles = rope_angles(self.hf_config, self.shape.head_dim)
        for path in dict.fromkeys(self._paths.values()):
            path.bind_cache(pages, layer_groups, angles, length)
        self._group_layers = tuple(names[0] for names in groups)

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """[rows, hidden size] float32 after the final norm; valid until the next call."""
        metadata = get_forward_context().attn_metadata
        if metadata is None:
            # vLLM measures memory with a run that has no cache.
            return self._hidden[: len(positions)].zero_()
        assert isinstance(metadata, dict)
        step = DecoderStep(
            positions=positions,
            groups=tuple(metadata[name] for name in self._group_layers),
            token_ids=input_ids if inputs_embeds is None else None,
            inputs=None if inputs_embeds is None else inputs_embeds.float(),
        )
        return self.compute_step(step)

    def compute_step(self, step: DecoderStep) -> torch.Tensor:
        """As `forward`, with everything that it takes from the forward context in `step`."""
        num_rows = len(step.positions)
        hidden = self._hidden[:num_rows]
        self._paths[choose_forward_path(num_rows, has_native=self._has_native)].step(step, hidden)
        return hidden

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[rows, vocabulary] float32."""
        return self._any_path.logits(hidden_states.float().contiguous())

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """[rows, hidden size] float32."""
        return self._any_path.embed(input_ids)

    def close(self) -> None:
        """Ends the native core's threads and gives the cores back to torch. Idempotent."""
        for path in self._paths.values():
            path.close()
        if self._torch_threads is not None:
            _set_torch_threads(self._torch_threads)
            self._torch_threads = None

    @property
    def _any_path(self) -> DecoderPath:
        return next(iter(self._paths.values()))

    def _native_path(self, mapped: MappedWeights) -> NativePath:
        weights = decoder_weights(mapped, self.shape, native_matrix)
        assert weights.embedding is not None
        head = weights.embedding
        if not self.shape.ties_embeddings:
            head = native_matrix(mapped.matrix(HEAD, self.shape.vocab_size, self.shape.hidden_size))
        return NativePath(Team(torch.get_num_threads()), self.shape, weights, head)

    def _torch_path(self, mapped: MappedWeights) -> TorchPath:
        weights = decoder_weights(mapped, self.shape, TorchMatrix.of)
        assert weights.embedding is not None
        head = weights.embedding
        if not self.shape.ties_embeddings:
            head = TorchMatrix.of(mapped.matrix(HEAD, self.shape.vocab_size, self.shape.hidden_size))
        return TorchPath(self.shape, weights, head)

    def _leave_cores_to_native(self, num_threads: int) -> None:
        """Has torch compute in the engine thread alone: a second team would take the cores from the native one."""
        self._torch_threads = torch.get_num_threads()
        _set_torch_threads(1)
        logger.info("event=threads_moved native_threads=%d torch_threads=1", num_threads)

    def _publish(self, facts: dict[str, Any]) -> None:
        additional = self.vllm_config.additional_config
        assert isinstance(additional, dict)
        additional[FACTS_KEY] = facts


def _set_torch_threads(num_threads: int) -> None:
    # vLLM's CPU worker replaces `torch.set_num_threads` by a function that only warns.
    torch._C.set_num_threads(num_threads)


def _refuse_unsupported(vllm_config: VllmConfig) -> None:
    """Raises ConfigError for settings that this model would otherwise ignore."""
    parallel = vllm_config.parallel_config
    for name in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"):
        if getattr(parallel, name) != 1:
            raise ConfigError(f"{name} is {getattr(parallel, name)}; accepted for an artifact: 1")
    if vllm_config.lora_config is not None:
        raise ConfigError("LoRA adapters are not supported for an artifact; merge the adapter and quantize again")
    cache_kind(vllm_config.cache_config.cache_dtype)
