"""vLLM's model runner with a short way for steps in which every request gets one token of a packed model.

vLLM prepares each step for any mix of prompts, drafts, graph capture and parallelism, in milliseconds of Python. A step
of plain decoding needs five small arrays, which this file fills; whatever else a step may be goes vLLM's way. Before
and after it (`_update_states`, `sample_tokens`) both ways are the same.
"""

from typing import Any

import numpy as np
import torch
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.gpu_model_runner import ExecuteModelState

from vllm_omni.model_executor.models.decoder.model import OmniDecoderForCausalLM
from vllm_omni.model_executor.models.decoder.step import DecoderStep, GroupRows


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

    def fill(self, batch: Any) -> DecoderStep:
        """The step that computes the next token of every request.

        Args:
            batch: vLLM's `InputBatch`; its last known token of each request is the one to compute.
        """
        count = batch.num_reqs
        rows, computed = self._rows[:count], batch.num_computed_tokens_cpu[:count]
        self._positions[:count] = computed
        self._token_ids[:count] = batch.token_ids_cpu[rows, computed]
        np.add(computed, 1, out=self._seq_lens[:count])
        tables = batch.block_table.block_tables
        return DecoderStep(
            positions=torch.from_numpy(self._positions[:count]),
            groups=tuple(self._group(table, slots, count) for table, slots in zip(tables, self._slots, strict=True)),
            token_ids=torch.from_numpy(self._token_ids[:count]),
        )

    def _group(self, table: Any, slots: np.ndarray, count: int) -> GroupRows:
        blocks, offsets = np.divmod(self._positions[:count], table.block_size)
        numbers = table.block_table.np
        slots[:count] = numbers[self._rows[:count], blocks].astype(np.int64) * table.block_size + offsets
        return GroupRows(
            query_start=torch.from_numpy(self._rows[: count + 1]),
            seq_lens=torch.from_numpy(self._seq_lens[:count]),
            block_table=torch.from_numpy(numbers[:count]),
            slots=torch.from_numpy(slots[:count]),
        )


class OmniCPUModelRunner(CPUModelRunner):
    """The runner of a packed model; `adopt` makes it of the runner that vLLM's worker constructed."""

    decode_inputs: DecodeInputs | None = None

    @classmethod
    def adopt(cls, runner: CPUModelRunner) -> None:
        """Turns `runner` into one of this class. Call when its cache is allocated.

        Does nothing where the model is vLLM's own, or the engine does what the short way leaves out.
        """
        if not isinstance(runner.get_model(), OmniDecoderForCausalLM) or runner.speculative_config is not None:
            return
        if runner.enable_prompt_embeds or runner.use_async_scheduling:
            return
        runner.__class__ = cls
        assert isinstance(runner, cls)
        runner.decode_inputs = DecodeInputs(runner.max_num_reqs, len(runner.input_batch.block_table.block_tables))

    def execute_model(self, scheduler_output: SchedulerOutput, intermediate_tensors: Any = None) -> Any:
        """Computes the logits of a step; `sample_tokens` goes on from there."""
        if self.decode_inputs is None or not self._is_plain_decode(scheduler_output):
            return super().execute_model(scheduler_output, intermediate_tensors)
        self._update_states(scheduler_output)
        self.discard_request_mask.np[: self.input_batch.num_reqs] = False
        hidden = self.model.compute_step(self.decode_inputs.fill(self.input_batch))
        logits = self.model.compute_logits(hidden)
        self.execute_model_state = ExecuteModelState(
            scheduler_output, logits, None, None, hidden, hidden, None, None, None, None
        )
        self.kv_connector_output = None
        return None

    def _is_plain_decode(self, scheduler_output: SchedulerOutput) -> bool:
        """Whether every request of the step computes its last known token, and nothing else happens in it."""
        counts, cached = scheduler_output.num_scheduled_tokens, scheduler_output.scheduled_cached_reqs
        if self.execute_model_state is not None or self.num_prompt_logprobs:
            return False
        if not counts or scheduler_output.scheduled_new_reqs or scheduler_output.scheduled_spec_decode_tokens:
            return False
        if scheduler_output.total_num_scheduled_tokens != len(counts) or len(cached.req_ids) != len(counts):
            return False
        if cached.resumed_req_ids:
            return False
        return all(
            computed + 1 == self.requests[name].num_tokens
            for name, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True)
        )
