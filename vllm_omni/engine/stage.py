"""The contract between the orchestrator and one pipeline stage.

Imports neither torch nor vLLM: an orchestrator can be tested with a fake stage in milliseconds.
"""

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class StageRequest:
    """One request as a stage receives it.

    Attributes:
        request_id: Unique among the requests in flight, chosen by the orchestrator's caller.
        prompt: Text, token ids, or an input that the stage's own renderer made.
        sampling_params: What the stage samples with; its `output_kind` says how outputs accumulate.
        num_sequences: Sequences it generates (`n`); the queue bound counts these.
        options: Further keywords of the stage's engine (`lora_request`, `priority`, `trace_headers`, ...).
    """

    request_id: str
    prompt: Any
    sampling_params: Any
    num_sequences: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class StageOutput:
    """One message from a stage about one request; exactly one message per request has `finished` or `error` set.

    Attributes:
        output: The stage's result; None when `error` is set, or when the request was aborted before the engine had it.
        finished: No further message follows for this request.
        error: Why the request ended without a result. It concerns this request alone unless `Stage.check_health`
            raises as well.
    """

    request_id: str
    output: Any = None
    finished: bool = False
    error: BaseException | None = None


class Stage(ABC):
    """One step of a pipeline, running wherever the topology puts it.

    Call order: `start` once, then any interleaving of `submit`, `abort`, `check_health` and one reader of `outputs`,
    then `shutdown`. `start` and `shutdown` block and may be called from any thread; the coroutines all run on one event
    loop. The stage owns everything it allocates for a request until the message with `finished` or `error` has left
    `outputs`.
    """

    stage_id: int

    @abstractmethod
    def start(self) -> None:
        """Makes the stage ready for requests: weights loaded, caches allocated, kernels warm. Blocks.

        Raises:
            EngineError: The engine could not start; nothing of it is left running.
        """

    @abstractmethod
    async def submit(self, request: StageRequest) -> None:
        """Takes a request and returns without waiting for its result."""

    @abstractmethod
    async def abort(self, request_id: str) -> None:
        """Stops a request and frees its slot and KV blocks within one engine step; unknown ids are ignored.

        One message with `finished` set follows, holding what was generated and not yet delivered; its `output` is None
        for a request that had not reached the engine.
        """

    @abstractmethod
    def outputs(self) -> AsyncIterator[StageOutput]:
        """Messages of all requests in the order they were made. One reader only, which cancels it to end it."""

    @abstractmethod
    async def check_health(self) -> None:
        """Returns when the stage can serve.

        Raises:
            StageError: The stage is dead; the message says why.
        """

    @abstractmethod
    def shutdown(self, timeout_s: float) -> None:
        """Frees everything within about `timeout_s` seconds. Idempotent, and safe after a failed `start`."""
