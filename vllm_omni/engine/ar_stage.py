"""The autoregressive stage: vLLM's engine in this process.

`AsyncLLM` does input processing, detokenisation and statistics on the event loop; its engine core runs in a thread
(`core_thread`). This file turns a stage's configuration into engine arguments and a request into a task.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from typing import Any

from vllm_omni import envs
from vllm_omni.config.deploy_config import StageDeployConfig
from vllm_omni.edge.memory import release_freed_memory
from vllm_omni.engine.compat import AsyncEngineArgs, AsyncLLM, EngineDeadError, UsageContext, build_async_llm
from vllm_omni.engine.inline_client import InlineCoreClient
from vllm_omni.engine.request_output import StageRequestOutput
from vllm_omni.engine.stage import Stage, StageOutput, StageRequest
from vllm_omni.errors import EngineError, StageError

logger = logging.getLogger("vllm_omni.ar_stage")

# Fields of a stage that this package acts on; all others are engine arguments of the same name.
OWN_FIELDS = frozenset(
    {
        "stage_id",
        "devices",
        "num_threads",
        "tool_call_parser",
        "chat_template",
        "default_sampling_params",
        "engine_extras",
    }
)
# vLLM's value for "the longest sequence that fits the KV cache".
FIT_MAX_MODEL_LEN = -1
# Sampling defaults that vLLM reads from a generation config, under that file's names.
GENERATION_CONFIG_NAMES = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_tokens": "max_new_tokens",
}


def engine_arguments(model: str, stage: StageDeployConfig) -> dict[str, Any]:
    """Keywords for vLLM's `AsyncEngineArgs` from a stage's configuration.

    With an explicit KV size and no `max_model_len`, the longest sequence is what fits that size and the model.
    """
    fields = stage.model_dump(exclude=set(OWN_FIELDS), exclude_none=True)
    arguments = {"model": model, **fields, **(stage.engine_extras or {})}
    if stage.kv_cache_memory_bytes is not None and stage.max_model_len is None:
        arguments["max_model_len"] = FIT_MAX_MODEL_LEN
    defaults = stage.default_sampling_params or {}
    overrides = {GENERATION_CONFIG_NAMES[key]: value for key, value in defaults.items() if key in GENERATION_CONFIG_NAMES}
    if overrides:
        arguments["override_generation_config"] = overrides | arguments.get("override_generation_config", {})
    return arguments


class ARStage(Stage):
    """Runs vLLM for one pipeline stage, core in a thread.

    Args:
        stage_id: Position in the pipeline.
        model: Checkpoint directory.
        config: The stage's part of the deploy configuration.
        log_stats: Collect statistics for `/metrics`.
        log_requests: Log arrival and end of each request.
    """

    def __init__(
        self, stage_id: int, model: str, config: StageDeployConfig, *, log_stats: bool, log_requests: bool = False
    ):
        self.stage_id = stage_id
        self._model = model
        self._config = config
        self._log_stats = log_stats
        self._log_requests = log_requests
        self._llm: AsyncLLM | None = None
        self._client: InlineCoreClient | None = None
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._messages: asyncio.Queue[StageOutput] = asyncio.Queue()

    @property
    def llm(self) -> AsyncLLM:
        """vLLM's engine client; raises EngineError before `start` and after `shutdown`."""
        if self._llm is None:
            raise EngineError(f"stage {self.stage_id} is not running")
        return self._llm

    @property
    def max_num_seqs(self) -> int:
        """Requests that one step computes together."""
        return self.llm.vllm_config.scheduler_config.max_num_seqs

    def start(self) -> None:
        try:
            arguments = AsyncEngineArgs(**engine_arguments(self._model, self._config))
            vllm_config = arguments.create_engine_config(UsageContext.OPENAI_API_SERVER)
        except (ValueError, TypeError) as error:
            raise EngineError(f"vLLM refused the configuration of stage {self.stage_id}: {error}") from error
        self._llm = build_async_llm(
            vllm_config, self._make_client, log_stats=self._log_stats, log_requests=self._log_requests
        )
        if envs.VLLM_OMNI_CPU_RELEASE_MEMORY:
            release_freed_memory()

    def _make_client(self, **arguments: Any) -> InlineCoreClient:
        self._client = InlineCoreClient(**arguments)
        return self._client

    async def submit(self, request: StageRequest) -> None:
        name = f"omni-request-{request.request_id}"
        self._tasks[request.request_id] = asyncio.create_task(self._generate(request), name=name)

    async def abort(self, request_id: str) -> None:
        task = self._tasks.get(request_id)
        if task is None:
            return
        if request_id in self.llm.output_processor.external_req_ids:
            # vLLM makes the final output itself, with what was generated so far.
            await self.llm.abort(request_id)
        else:
            # Still being tokenised: vLLM does not know the request yet.
            task.cancel()
            self._messages.put_nowait(StageOutput(request_id, finished=True))

    async def outputs(self) -> AsyncIterator[StageOutput]:
        while True:
            yield await self._messages.get()

    async def check_health(self) -> None:
        if self._client is None or not self._client.is_alive or self.llm.errored:
            raise StageError(f"stage {self.stage_id}: the engine core has died; see the log", self.stage_id)

    def shutdown(self, timeout_s: float) -> None:
        llm, self._llm = self._llm, None
        if llm is not None:
            llm.shutdown(timeout=timeout_s)
        elif self._client is not None:
            self._client.shutdown(timeout_s)

    async def _generate(self, request: StageRequest) -> None:
        """Runs one request and turns whatever happens to it into messages."""
        options: Mapping[str, Any] = request.options
        try:
            async for output in self.llm.generate(
                request.prompt, request.sampling_params, request.request_id, **options
            ):
                result = StageRequestOutput.from_stage_output(output, request.request_id, self.stage_id)
                self._messages.put_nowait(StageOutput(request.request_id, result, finished=output.finished))
        except EngineDeadError as error:
            dead = StageError(f"stage {self.stage_id}: the engine core has died; see the log", self.stage_id)
            dead.__cause__ = error
            self._messages.put_nowait(StageOutput(request.request_id, error=dead))
        except Exception as error:
            self._messages.put_nowait(StageOutput(request.request_id, error=error))
        finally:
            self._tasks.pop(request.request_id, None)
