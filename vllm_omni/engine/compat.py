"""Every version-sensitive vLLM import of the engine layer, and the one place where a client is injected.

Pinned to vLLM 0.32. When vLLM moves one of these names, this file changes and nothing else.
"""

from collections.abc import Callable
from typing import Any

import vllm.v1.engine.async_llm as async_llm_module
from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.engine.protocol import EngineClient
from vllm.exceptions import VLLMClientError
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.renderers.inputs.preprocess import parse_model_prompt
from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core import EngineCore
from vllm.v1.engine.core_client import EngineCoreClient
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.executor.uniproc_executor import UniProcExecutor

__all__ = [
    "AsyncEngineArgs",
    "AsyncLLM",
    "CompletionOutput",
    "EngineClient",
    "EngineCore",
    "EngineCoreClient",
    "EngineCoreOutput",
    "EngineCoreOutputs",
    "EngineCoreRequest",
    "EngineDeadError",
    "FinishReason",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputsParams",
    "UniProcExecutor",
    "UsageContext",
    "VLLMClientError",
    "VllmConfig",
    "build_async_llm",
    "parse_model_prompt",
]


class _ClientFactory:
    """Stands in for the name `EngineCoreClient` while an `AsyncLLM` is constructed.

    `AsyncLLM.__init__` always calls `EngineCoreClient.make_async_mp_client`, which spawns processes. It offers no
    parameter for another client, so the name it looks up is replaced for the time of the call.
    """

    def __init__(self, get_client: Callable[[], EngineCoreClient]):
        self._get_client = get_client

    def make_async_mp_client(self, **_for_sockets: Any) -> EngineCoreClient:
        return self._get_client()


def build_async_llm(
    vllm_config: VllmConfig, get_client: Callable[[], EngineCoreClient], *, log_stats: bool, log_requests: bool
) -> AsyncLLM:
    """An `AsyncLLM` over the client that `get_client` returns.

    Args:
        vllm_config: The engine's configuration.
        get_client: Called once, after tokenizer and input processing are set up.
        log_stats: Whether statistics are collected for `/metrics` and the periodic log line.
        log_requests: Whether each request's arrival and end are logged.
    """
    original = async_llm_module.EngineCoreClient
    async_llm_module.EngineCoreClient = _ClientFactory(get_client)
    try:
        return AsyncLLM(
            vllm_config=vllm_config,
            executor_class=UniProcExecutor,
            log_stats=log_stats,
            log_requests=log_requests,
            usage_context=UsageContext.OPENAI_API_SERVER,
        )
    finally:
        async_llm_module.EngineCoreClient = original
