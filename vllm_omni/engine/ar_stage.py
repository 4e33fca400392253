"""The autoregressive stage: vLLM's engine in this process.

`AsyncLLM` does input processing, detokenisation and statistics on the event loop; its engine core runs in a thread
(`core_thread`). This file turns a stage's configuration into engine arguments and a request into a task.
"""

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from vllm_omni.config.artifact_fields import AUTO, NONE, QUANT_METHOD
from vllm_omni.config.deploy_config import StageDeployConfig
from vllm_omni.engine.compat import (
    AsyncEngineArgs,
    AsyncLLM,
    EngineDeadError,
    UniProcExecutor,
    UsageContext,
    VLLMClientError,
    build_async_llm,
    parse_model_prompt,
)
from vllm_omni.engine.inline_client import InlineCoreClient
from vllm_omni.engine.request_output import StageRequestOutput
from vllm_omni.engine.stage import Stage, StageOutput, StageRequest
from vllm_omni.errors import EngineError, OmniError, RequestError, StageError

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
    if fields.get("quantization") in (AUTO, NONE):
        del fields["quantization"]
    arguments = {"model": model, **fields, **(stage.engine_extras or {})}
    if stage.kv_cache_memory_bytes is not None and stage.max_model_len is None:
        arguments["max_model_len"] = FIT_MAX_MODEL_LEN
    if stage.load_format == QUANT_METHOD:
        # vLLM would look for a method of that name and import all its own on the way.
        arguments["hf_overrides"] = {**(stage.hf_overrides or {}), "quantization_config": None}
    defaults = stage.default_sampling_params or {}
    overrides = {
        GENERATION_CONFIG_NAMES[key]: value for key, value in defaults.items() if key in GENERATION_CONFIG_NAMES
    }
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
        while_loading: Called in the starting thread while the core loads in its own.
    """

    def __init__(
        self,
        stage_id: int,
        model: str,
        config: StageDeployConfig,
        *,
        log_stats: bool,
        log_requests: bool = False,
        while_loading: Callable[[], Any] | None = None,
    ):
        self.stage_id = stage_id
        self._model = model
        self._config = config
        self._log_stats = log_stats
        self._log_requests = log_requests
        self._while_loading = while_loading
        self._llm: AsyncLLM | None = None
        self._client: InlineCoreClient | None = None
        self._tasks: dict[str, asyncio.Task[None]] = {}
        # None only wakes the reader.
        self._messages: asyncio.Queue[StageOutput | None] = asyncio.Queue()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._in_engine: set[str] = set()
        self._is_closed = False
        self._lock = threading.Lock()

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
            self._start()
        except OmniError:
            raise
        except Exception as error:
            raise EngineError(f"stage {self.stage_id} could not start: {error}") from error

    def _start(self) -> None:
        arguments = AsyncEngineArgs(**engine_arguments(self._model, self._config))
        vllm_config = arguments.create_engine_config(UsageContext.OPENAI_API_SERVER)
        # The core loads weights in its thread while this one loads the tokenizer.
        with self._lock:
            self._check_not_closed()
            self._client = InlineCoreClient(vllm_config, UniProcExecutor, self._log_stats, self._on_core_death)
        llm = build_async_llm(
            vllm_config, self._ready_client, log_stats=self._log_stats, log_requests=self._log_requests
        )
        with self._lock:
            if self._is_closed:
                llm.shutdown(timeout=0)
            self._check_not_closed()
            self._llm = llm

    def _check_not_closed(self) -> None:
        """Ends a start that has taken so long that nobody waits for it any more."""
        if self._is_closed:
            raise EngineError(f"stage {self.stage_id} was shut down while it started")

    def _ready_client(self) -> InlineCoreClient:
        """What `AsyncLLM` is given once its own parts are built."""
        assert self._client is not None
        if self._while_loading is not None:
            self._while_loading()
        self._client.wait_ready()
        return self._client

    async def submit(self, request: StageRequest) -> None:
        name = f"omni-request-{request.request_id}"
        task = asyncio.create_task(self._generate(request), name=name)
        self._tasks[request.request_id] = task
        task.add_done_callback(lambda _task: self._tasks.pop(request.request_id, None))

    async def abort(self, request_id: str) -> None:
        task = self._tasks.get(request_id)
        if task is None or self._llm is None:
            return
        if request_id in self._in_engine:
            # vLLM makes the final output itself, with what was generated so far, unless it has made one already.
            await self._llm.abort(request_id)
        else:
            # Still being tokenised: vLLM does not know the request yet.
            task.cancel()
            self._messages.put_nowait(StageOutput(request_id, finished=True))

    async def outputs(self) -> AsyncIterator[StageOutput]:
        self._loop = asyncio.get_running_loop()
        while self._is_alive():
            message = await self._messages.get()
            if message is not None:
                yield message
        raise self._dead_error()

    async def check_health(self) -> None:
        if not self._is_alive():
            raise self._dead_error()

    def _is_alive(self) -> bool:
        return self._client is not None and self._client.is_alive

    def _dead_error(self) -> StageError:
        return StageError(f"stage {self.stage_id}: the engine core has died; see the log", self.stage_id)

    def _on_core_death(self) -> None:
        """Wakes the reader of `outputs`; called in the engine thread."""
        if self._loop is not None:
            # A closed loop has no reader.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._messages.put_nowait, None)

    def shutdown(self, timeout_s: float) -> None:
        with self._lock:
            self._is_closed = True
            llm, self._llm = self._llm, None
        if llm is not None:
            llm.shutdown(timeout=timeout_s)
        elif self._client is not None:
            self._client.shutdown(timeout_s)

    async def _render(self, prompt: Any, tokenization_kwargs: Mapping[str, Any] | None) -> Any:
        """Tokenises a raw prompt off the event loop; what vLLM's serving classes have rendered passes through."""
        if not isinstance(prompt, (str, list, dict)) or (isinstance(prompt, dict) and "type" in prompt):
            return prompt
        renderer = self.llm.renderer
        parsed = parse_model_prompt(self.llm.model_config, prompt)
        token_params = renderer.default_cmpl_tok_params.with_kwargs(**(tokenization_kwargs or {}))
        (rendered,) = await renderer.render_cmpl_async([parsed], token_params)
        return rendered

    async def _generate(self, request: StageRequest) -> None:
        """Runs one request and turns whatever happens to it into messages."""
        try:
            async for output in self._run(request):
                result = StageRequestOutput.from_stage_output(output, request.request_id, self.stage_id)
                self._messages.put_nowait(StageOutput(request.request_id, result, finished=output.finished))
        except Exception as error:
            self._messages.put_nowait(StageOutput(request.request_id, error=self._as_omni_error(request, error)))
        finally:
            self._in_engine.discard(request.request_id)

    async def _run(self, request: StageRequest) -> AsyncIterator[Any]:
        options = dict(request.options)
        prompt = await self._render(request.prompt, options.pop("tokenization_kwargs", None))
        # Asked once and remembered; so `generate` below reaches the engine without letting an abort in between.
        await self.llm.get_supported_tasks()
        self._in_engine.add(request.request_id)
        async for output in self.llm.generate(prompt, request.sampling_params, request.request_id, **options):
            if any(completion.finish_reason == "error" for completion in output.outputs):
                raise EngineError(f"request {request.request_id} failed in the engine; the log has the reason")
            yield output

    def _as_omni_error(self, request: StageRequest, error: Exception) -> Exception:
        """What the caller is to see of an error."""
        if isinstance(error, OmniError):
            return error
        if isinstance(error, EngineDeadError):
            return self._dead_error()
        if isinstance(error, (VLLMClientError, ValueError)):
            refused = RequestError(str(error))
            refused.__cause__ = error
            return refused
        logger.error("event=request_failed request_id=%s", request.request_id, exc_info=error)
        failed = EngineError(f"request {request.request_id} failed: {error.__cause__ or error}")
        failed.__cause__ = error
        return failed
