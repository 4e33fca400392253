"""Results as callers see them. Loads neither torch nor vLLM."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass
class OmniRequestOutput:
    """The result of one stage for one request, whole or a part of a stream.

    Attributes:
        request_id: The caller's id.
        prompt: The prompt's text, where it was given as text.
        prompt_token_ids: Token ids the model received.
        prompt_logprobs: Per prompt token, when asked for.
        outputs: One vLLM `CompletionOutput` per sequence: index, text, token_ids, finish_reason, stop_reason, logprobs.
        finished: Whether this stage's output is complete. The end of the generator ends the request.
        metrics: vLLM's `RequestStateStats` where statistics are collected.
        num_cached_tokens: Prompt tokens found in the prefix cache.
        stage_id: The stage that produced it.
        final_output_type: `text` for language models.
    """

    request_id: str = ""
    prompt: str | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: Any = None
    outputs: list[Any] = field(default_factory=list)
    finished: bool = True
    metrics: Any = None
    lora_request: Any = None
    encoder_prompt: str | None = None
    encoder_prompt_token_ids: list[int] | None = None
    num_cached_tokens: int | None = None
    num_cache_creation_tokens: int | None = None
    prompt_token_id_logprobs: Any = None
    kv_transfer_params: Any = None
    ec_transfer_params: Any = None
    stage_id: int | None = None
    replica_id: int | None = None
    final_output_type: str = "text"

    @property
    def is_pipeline_output(self) -> bool:
        """Whether a pipeline stage made this output."""
        return self.stage_id is not None

    @property
    def text(self) -> str:
        """Text of the first sequence; empty when there is none."""
        return self.outputs[0].text if self.outputs else ""

    @classmethod
    def from_stage_output(cls, output: Any, request_id: str, stage_id: int) -> "OmniRequestOutput":
        """Wraps a vLLM `RequestOutput`; fields are shared, not copied."""
        wrapped = cls(request_id=request_id)
        wrapped.__dict__.update(vars(output))
        wrapped.request_id = request_id
        wrapped.stage_id = stage_id
        return wrapped

    def to_dict(self) -> Mapping[str, Any]:
        """Plain values of the fields that a client reads."""
        return {
            "request_id": self.request_id,
            "prompt_token_ids": self.prompt_token_ids,
            "finished": self.finished,
            "stage_id": self.stage_id,
            "final_output_type": self.final_output_type,
            "outputs": [
                {
                    "index": output.index,
                    "text": output.text,
                    "token_ids": list(output.token_ids),
                    "finish_reason": output.finish_reason,
                    "stop_reason": output.stop_reason,
                }
                for output in self.outputs
            ],
        }
