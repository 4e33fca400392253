"""What one step of the decoder stack is given, and what computes it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from vllm_omni.model_executor.models.decoder.rope import RopeAngles


@dataclass(frozen=True)
class GroupRows:
    """The rows of a step as the layers of one KV group see them: these share a block table.

    Attributes:
        query_start: [seqs + 1] int32, first row of each sequence, then the number of rows.
        seq_lens: [seqs] int32, tokens in the cache after the step.
        block_table: [seqs, blocks] int32; rows may lie apart.
        slots: [rows] int64, block * block size + place; negative: not stored.
    """

    query_start: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slots: torch.Tensor


@dataclass(frozen=True)
class DecoderStep:
    """The rows of one step. Rows of a sequence are consecutive and in order of position.

    Attributes:
        positions: [rows] int64.
        groups: One entry for each KV group.
        token_ids: [rows] int32, looked up in the embedding; None where `inputs` are given.
        inputs: [rows, hidden size] float32.
    """

    positions: torch.Tensor
    groups: tuple[GroupRows, ...]
    token_ids: torch.Tensor | None = None
    inputs: torch.Tensor | None = None


class DecoderPath(Protocol):
    """The stack on one implementation. Call order: `bind_cache`, then any number of the others, `close` at the end.

    All calls come from one thread. Pages stay where they are until the next `bind_cache` or `close`.
    """

    def bind_cache(
        self, pages: Sequence[torch.Tensor], groups: Sequence[int], angles: RopeAngles, num_positions: int
    ) -> None:
        """Takes what is known once the cache is allocated.

        Args:
            pages: For each layer [blocks, kv heads, tokens of a block, elements of a token], bfloat16 or int8.
            groups: For each layer the number of its KV group.
            angles: Of the rotary position embeddings.
            num_positions: Tokens of the longest sequence.
        """

    def step(self, step: DecoderStep, hidden: torch.Tensor) -> None:
        """Computes all layers and the final norm into `hidden` [rows, hidden size] float32."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, vocabulary] float32 of `hidden` [rows, hidden size] float32."""

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[rows, hidden size] float32 of `token_ids` [rows]."""

    def close(self) -> None:
        """Frees threads and lets go of cache and weights. Idempotent."""
