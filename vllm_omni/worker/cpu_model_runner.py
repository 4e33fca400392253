"""vLLM's model runner with a short way for steps in which every request gets one token of a packed model.

vLLM prepares each step for any mix of prompts, drafts, graph capture and parallelism, in milliseconds of Python. A step
of plain decoding needs five small arrays, which this file fills; whatever else a step may be goes vLLM's way. Before
and after it (`_update_states`, `sample_tokens`) both ways are the same.
"""

from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.gpu_model_runner import ExecuteModelState

from vllm_omni.model_executor.models.decoder.model import OmniDecoderForCausalLM
from vllm_omni.worker.decode_step import DecodeInputs, is_plain_decode


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
        if runner.vllm_config.kv_transfer_config is not None or runner.vllm_config.ec_transfer_config is not None:
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
        if self.execute_model_state is not None or self.num_prompt_logprobs:
            return False
        return is_plain_decode(scheduler_output, self.requests)
