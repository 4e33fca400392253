"""`AsyncOmni`: the engine for asyncio applications, and the client that vLLM's serving classes sit on.

Importing this file is light. The constructor checks configuration and checkpoint first, and only then imports torch and
vLLM and loads the model.
"""

import logging
import uuid
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_omni.edge.weight_path import describe_paths
from vllm_omni.engine.stage import StageRequest
from vllm_omni.entrypoints.omni_base import StartOptions, prepare, start_orchestrator
from vllm_omni.errors import ConfigError, RequestError
from vllm_omni.outputs import OmniRequestOutput

if TYPE_CHECKING:
    from vllm.engine.protocol import StreamingInput
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM

    from vllm_omni.config.deployment import Deployment

logger = logging.getLogger("vllm_omni.engine")

INTERNAL_ID_DIGITS = 8


class AsyncOmni:
    """Loads a model and generates, many requests at a time, on the event loop that first calls `generate`.

    A virtual subclass of vLLM's `EngineClient`: what vLLM's OpenAI serving classes call is here.

    Args:
        model: Checkpoint directory, or an id that the local Hugging Face cache holds.
        deploy_profile: Packaged profile, such as "edge". Exclusive with `deploy_config`.
        deploy_config: Path of a deploy YAML, or the name of a packaged one.
        stage_overrides: Values of single stages, by stage id.
        log_stats: Collect what `/metrics` shows.
        log_requests: Log arrival and end of each request.
        overrides: Any key of the deploy schema or vLLM engine field, for every stage; None values are ignored.

    Raises:
        ConfigError: Configuration is wrong; raised before anything heavy is imported.
        WeightError: The checkpoint is damaged.
        EngineError: The engine could not start.
    """

    def __init__(
        self,
        model: str,
        *,
        deploy_profile: str | None = None,
        deploy_config: str | Path | None = None,
        stage_overrides: Mapping[str, Mapping[str, Any]] | str | None = None,
        log_stats: bool = False,
        log_requests: bool = False,
        **overrides: Any,
    ):
        deployment = prepare(
            model,
            deploy_config=deploy_config,
            deploy_profile=deploy_profile,
            stage_overrides=stage_overrides,
            overrides=overrides,
        )
        self._start(deployment, StartOptions(log_stats, log_requests))

    @classmethod
    def from_deployment(cls, deployment: "Deployment", options: StartOptions) -> "AsyncOmni":
        """An engine for a deployment that `prepare` has checked already."""
        omni = cls.__new__(cls)
        omni._start(deployment, options)
        return omni

    def _start(self, deployment: "Deployment", options: StartOptions) -> None:
        self.deployment = deployment
        self.log_stats = options.log_stats
        self._internal_ids: dict[str, set[str]] = {}
        self._orchestrator = start_orchestrator(deployment, options)

        from vllm_omni.engine.compat import EngineClient

        EngineClient.register(AsyncOmni)
        self.default_sampling_params_list = [self._default_sampling_params(stage) for stage in self._stages]

    # What callers use.

    async def generate(
        self,
        prompt: "str | list[int] | Mapping[str, Any] | AsyncGenerator[StreamingInput, None]",
        sampling_params: "SamplingParams | None" = None,
        request_id: str = "",
        *,
        sampling_params_list: "Sequence[SamplingParams] | None" = None,
        output_modalities: Sequence[str] | None = None,
        lora_request: Any = None,
        **options: Any,
    ) -> AsyncGenerator[OmniRequestOutput, None]:
        """Generates from one prompt and yields results as they arrive.

        Args:
            prompt: Text, token ids, `{"prompt": ...}` or `{"prompt_token_ids": ...}`.
            sampling_params: Its `output_kind` says whether results hold new text only (`DELTA`), all text so far
                (`CUMULATIVE`) or come once (`FINAL_ONLY`). None: the model's defaults, as deltas.
            request_id: The caller's name for the request, on each result; empty: one is made up.
            sampling_params_list: One entry per stage; wins over `sampling_params`.
            output_modalities: Modalities wanted; this pipeline makes only `text`.
            lora_request: Refused; adapters are not supported.
            options: Keywords of vLLM's `AsyncLLM.generate`: `priority`, `trace_headers`, `tokenization_kwargs`, ...

        Raises:
            RequestError: The request is at fault.
            CapacityError: Too many requests are in flight.
            StageError: The engine died under the request.
        """
        if lora_request is not None:
            raise RequestError("lora_request: LoRA adapters are not supported; merge the adapter and serve that")
        self._check_modalities(output_modalities)
        params = self._resolve_sampling_params(sampling_params, sampling_params_list)
        request_id = request_id or uuid.uuid4().hex[:INTERNAL_ID_DIGITS]
        internal_id = f"{request_id}-{uuid.uuid4().hex[:INTERNAL_ID_DIGITS]}"
        self._internal_ids.setdefault(request_id, set()).add(internal_id)
        try:
            request = StageRequest(internal_id, prompt, params, params.n, options)
            async with aclosing(self._orchestrator.run(request)) as messages:
                async for message in messages:
                    output = message.output or _aborted_before_start()
                    output.request_id = request_id
                    yield output
        finally:
            self._forget(request_id, internal_id)

    async def abort(self, request_id: str | Iterable[str], internal: bool = False) -> None:
        """Stops requests by the callers' ids; their `generate` ends with finish reason `abort`. Ignores unknown ids."""
        request_ids = [request_id] if isinstance(request_id, str) else list(request_id)
        for caller_id in request_ids:
            for internal_id in tuple(self._internal_ids.get(caller_id, ())):
                await self._orchestrator.abort(internal_id)

    async def abort_all(self) -> int:
        """Stops every request in flight and returns how many there were."""
        return await self._orchestrator.abort_all()

    async def wait_idle(self, timeout_s: float) -> bool:
        """Waits until nothing is in flight; False when `timeout_s` passed first."""
        return await self._orchestrator.wait_idle(timeout_s)

    def shutdown(self, timeout: float | None = None) -> None:
        """Ends all requests and frees the engine. Idempotent; blocks for at most about `timeout` seconds a stage."""
        limit_s = self.deployment.config.orchestrator.shutdown_timeout_s if timeout is None else timeout
        self._orchestrator.shutdown(limit_s)

    close = shutdown

    async def check_health(self) -> None:
        """Returns when the engine can serve; raises StageError otherwise."""
        await self._orchestrator.check_health()

    def check_capacity(self, num_requests: int = 1) -> None:
        """Returns when that many more sequences fit; raises CapacityError, or RequestError when they never fit."""
        self._orchestrator.check_capacity(num_requests)

    def check_admission(self, n: int = 1, request_id: str | None = None) -> None:
        """What vLLM's serving classes ask before they answer: `check_capacity`."""
        self.check_capacity(n)

    @property
    def model(self) -> str:
        return str(self.deployment.facts.path)

    @property
    def num_stages(self) -> int:
        return len(self._stages)

    @property
    def num_requests(self) -> int:
        """Requests in flight, running and waiting."""
        return self._orchestrator.num_requests

    @property
    def max_requests(self) -> int:
        """Bound of `num_requests`."""
        return self._orchestrator.max_requests

    def describe(self) -> dict[str, Any]:
        """Facts about what runs, for `/health`."""
        config, facts = self.vllm_config, self.deployment.facts
        dtype = str(config.model_config.dtype).removeprefix("torch.")
        return describe_paths(config.additional_config, dtype) | {
            "stage_topology": self.deployment.config.stage_topology,
            "dtype": dtype,
            "quantization": config.model_config.quantization or facts.quant_method,
            "max_model_len": config.model_config.max_model_len,
            "kv_cache_bytes": config.cache_config.kv_cache_memory_bytes,
        }

    @property
    def is_running(self) -> bool:
        return not self.errored

    @property
    def is_stopped(self) -> bool:
        return self.errored

    @property
    def errored(self) -> bool:
        """Whether no request can be served any more."""
        return self._orchestrator.fatal_error is not None

    @property
    def dead_error(self) -> BaseException:
        from vllm_omni.engine.compat import EngineDeadError

        return EngineDeadError()

    # What vLLM's serving classes use.

    @property
    def _stages(self) -> Sequence[Any]:
        return self._orchestrator.stages

    @property
    def _llm(self) -> "AsyncLLM":
        """vLLM's client of the stage that owns the tokenizer."""
        owners = [stage.stage_id for stage in self.deployment.pipeline.stages if stage.owns_tokenizer]
        return self._stages[owners[0]].llm

    @property
    def vllm_config(self) -> Any:
        return self._llm.vllm_config

    @property
    def model_config(self) -> Any:
        return self._llm.model_config

    @property
    def renderer(self) -> Any:
        return self._llm.renderer

    @property
    def input_processor(self) -> Any:
        return self._llm.input_processor

    def get_tokenizer(self) -> Any:
        return self._llm.get_tokenizer()

    async def get_supported_tasks(self) -> tuple[str, ...]:
        return await self._llm.get_supported_tasks()

    async def is_tracing_enabled(self) -> bool:
        return await self._llm.is_tracing_enabled()

    async def do_log_stats(self) -> None:
        await self._llm.do_log_stats()

    async def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        return await self._llm.reset_prefix_cache(reset_running_requests, reset_connector)

    async def reset_mm_cache(self) -> None:
        await self._llm.reset_mm_cache()

    async def reset_encoder_cache(self) -> None:
        await self._llm.reset_encoder_cache()

    async def start_profile(self, profile_prefix: str | None = None, **options: Any) -> None:
        await self._llm.start_profile(profile_prefix, **options)

    async def stop_profile(self) -> None:
        await self._llm.stop_profile()

    def __getattr__(self, name: str) -> Any:
        if name in UNSUPPORTED_CLIENT_METHODS:
            raise NotImplementedError(f"AsyncOmni.{name}: {UNSUPPORTED_CLIENT_METHODS[name]}")
        raise AttributeError(f"'AsyncOmni' object has no attribute {name!r}")

    def _check_modalities(self, wanted: Sequence[str] | None) -> None:
        made = {stage.final_output_type for stage in self.deployment.pipeline.stages if stage.final_output}
        unknown = set(wanted or ()) - made
        if unknown:
            raise RequestError(f"output_modalities={sorted(unknown)}: this pipeline makes {sorted(filter(None, made))}")

    def _default_sampling_params(self, stage: Any) -> "SamplingParams":
        """The model's own defaults with the stage's `default_sampling_params` over them."""
        from vllm_omni.engine.compat import SamplingParams

        values = dict(stage.llm.model_config.get_diff_sampling_param())
        max_new_tokens = values.pop("max_new_tokens", None)
        if max_new_tokens is not None:
            values["max_tokens"] = max_new_tokens
        configured = self.deployment.config.stages[stage.stage_id].default_sampling_params or {}
        try:
            return SamplingParams(**values | configured)
        except (ValueError, TypeError) as error:
            raise ConfigError(f"stages[{stage.stage_id}].default_sampling_params: {error}") from error

    def _resolve_sampling_params(
        self, single: "SamplingParams | None", per_stage: "Sequence[SamplingParams] | None"
    ) -> "SamplingParams":
        from vllm_omni.engine.compat import RequestOutputKind

        if per_stage is not None:
            if len(per_stage) != self.num_stages:
                raise RequestError(
                    f"sampling_params_list has {len(per_stage)} entries; this pipeline has {self.num_stages} stages"
                )
            return checked_params(per_stage[0])
        if single is not None:
            return checked_params(single)
        params = self.default_sampling_params_list[0].clone()
        params.output_kind = RequestOutputKind.DELTA
        return params

    def _forget(self, request_id: str, internal_id: str) -> None:
        ids = self._internal_ids[request_id]
        ids.discard(internal_id)
        if not ids:
            del self._internal_ids[request_id]


def checked_params(params: Any) -> "SamplingParams":
    """`params` itself; RequestError if it is anything but vLLM's class."""
    from vllm_omni.engine.compat import SamplingParams

    if not isinstance(params, SamplingParams):
        raise RequestError(
            f"sampling parameters are {params!r}; accepted: a `vllm.SamplingParams`, as SamplingParams(temperature=0)"
        )
    return params


NOT_ON_CPU = "not supported on CPU"
NO_PAUSE = "not supported; `abort_all` stops the requests in flight"
NO_LORA = "LoRA adapters are not supported; merge the adapter and serve that"
UNSUPPORTED_CLIENT_METHODS: Mapping[str, str] = {
    "encode": "pooling models are not served",
    "pause_generation": NO_PAUSE,
    "resume_generation": NO_PAUSE,
    "is_paused": NO_PAUSE,
    "sleep": NOT_ON_CPU,
    "wake_up": NOT_ON_CPU,
    "release_kv_cache_memory": NOT_ON_CPU,
    "add_lora": NO_LORA,
    "remove_lora": NO_LORA,
    "list_loras": NO_LORA,
    "pin_lora": NO_LORA,
}


def _aborted_before_start() -> OmniRequestOutput:
    """The result of a request that was stopped before the engine saw it."""
    from vllm_omni.engine.compat import CompletionOutput
    from vllm_omni.engine.request_output import StageRequestOutput

    empty = CompletionOutput(
        index=0, text="", token_ids=[], cumulative_logprob=None, logprobs=None, finish_reason="abort"
    )
    return StageRequestOutput(prompt_token_ids=[], outputs=[empty], stage_id=0)
