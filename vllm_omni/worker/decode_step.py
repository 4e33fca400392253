"""A step in which every request gets one token: which steps are of that kind, and what they compute from."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from vllm_omni.model_executor.models.decoder.step import DecoderStep, GroupRows


def is_plain_decode(scheduler_output: Any, requests: Mapping[str, Any]) -> bool:
    """Whether every request of the step computes its last known token, and nothing else happens in it.

    Args:
        scheduler_output: vLLM's `SchedulerOutput`.
        requests: vLLM's state of each request by id.
    """
    counts, cached = scheduler_output.num_scheduled_tokens, scheduler_output.scheduled_cached_reqs
    if not counts or scheduler_output.scheduled_new_reqs or scheduler_output.scheduled_spec_decode_tokens:
        return False
    if scheduler_output.total_num_scheduled_tokens != len(counts) or len(cached.req_ids) != len(counts):
        return False
    if cached.resumed_req_ids:
        return False
    return all(
        computed + 1 == requests[name].num_tokens
        for name, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True)
    )


class DecodeInputs:
    """Arrays of a decode-only step, filled in place: one row for each request, in the order of vLLM's batch.

    Args:
        max_num_seqs: Rows to have room for.
        num_groups: KV groups of the model.
    """

    def __init__(self, max_num_seqs: int, num_groups: int):
        self._rows = np.arange(max_num_seqs + 1, dtype=np.int32)
        self._positions = np.zeros(max_num_seqs, np.int64)
        self._token_ids = np.zeros(max_num_seqs, np.int32)
        self._seq_lens = np.zeros(max_num_seqs, np.int32)
        self._slots = np.zeros((num_groups, max_num_seqs), np.int64)
        # For a number of rows the step, and the block tables that it shows.
        self._steps: dict[int, tuple[DecoderStep, list[np.ndarray]]] = {}

    def fill(self, batch: Any) -> DecoderStep:
        """The step that computes the next token of every request.

        Args:
            batch: vLLM's `InputBatch`; its last known token of each request is the one to compute.

        Returns:
            Views of arrays that the next call changes; the same object while number of rows and tables are the same.
        """
        count = batch.num_reqs
        rows, computed = self._rows[:count], batch.num_computed_tokens_cpu[:count]
        self._positions[:count] = computed
        self._token_ids[:count] = batch.token_ids_cpu[rows, computed]
        np.add(computed, 1, out=self._seq_lens[:count])
        numbers = [table.block_table.np for table in batch.block_table.block_tables]
        for table, each, slots in zip(batch.block_table.block_tables, numbers, self._slots, strict=True):
            blocks, offsets = np.divmod(computed, table.block_size)
            np.multiply(each[rows, blocks], table.block_size, out=slots[:count])
            slots[:count] += offsets
        return self._step(count, numbers)

    def _step(self, count: int, numbers: list[np.ndarray]) -> DecoderStep:
        step, shown = self._steps.get(count, (None, []))
        if step is None or any(new is not old for new, old in zip(numbers, shown, strict=True)):
            step = DecoderStep(
                positions=torch.from_numpy(self._positions[:count]),
                groups=tuple(self._group(each, slots, count) for each, slots in zip(numbers, self._slots, strict=True)),
                token_ids=torch.from_numpy(self._token_ids[:count]),
            )
            self._steps[count] = step, numbers
        return step

    def _group(self, numbers: np.ndarray, slots: np.ndarray, count: int) -> GroupRows:
        return GroupRows(
            query_start=torch.from_numpy(self._rows[: count + 1]),
            seq_lens=torch.from_numpy(self._seq_lens[:count]),
            block_table=torch.from_numpy(numbers[:count]),
            slots=torch.from_numpy(slots[:count]),
        )
