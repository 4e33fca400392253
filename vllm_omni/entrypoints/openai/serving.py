"""vLLM's OpenAI serving classes over `AsyncOmni`: which routes exist and how they are configured."""

import functools
import traceback
from dataclasses import dataclass
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from prometheus_client import Counter
from starlette.exceptions import HTTPException
from vllm.entrypoints.openai.chat_completion.api_router import attach_router as attach_chat_router
from vllm.entrypoints.openai.chat_completion.batch_serving import OpenAIServingChatBatch
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.completion.api_router import attach_router as attach_completion_router
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.entrypoints.openai.models.api_router import attach_router as attach_models_router
from vllm.entrypoints.openai.models.protocol import BaseModelPath
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.entrypoints.openai.responses.api_router import attach_router as attach_responses_router
from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses
from vllm.entrypoints.serve.exception_handling.handlers.exception import exception_handler
from vllm.entrypoints.serve.exception_handling.register import init_exception_handler
from vllm.entrypoints.serve.instrumentator.metrics import attach_router as attach_metrics_router
from vllm.entrypoints.serve.tokenize.api_router import attach_router as attach_tokenize_router
from vllm.entrypoints.serve.tokenize.serving import ServingTokenization
from vllm.parser.metrics import init_parser_metrics
from vllm.renderers.chat_utils import load_chat_template
from vllm.renderers.online_renderer import OnlineRenderer
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.metrics.prometheus import get_prometheus_registry

from vllm_omni.entrypoints.async_omni import AsyncOmni
from vllm_omni.entrypoints.openai.errors import error_body
from vllm_omni.errors import CapacityError, RequestError, StageError


@dataclass(frozen=True)
class ServingOptions:
    """What the routes need beyond the engine.

    Attributes:
        served_model_names: Names that clients may use; the first is the one reported.
    """

    served_model_names: tuple[str, ...]


# What OpenAI's API knows; templates render any other name as if the model had been trained on it.
CHAT_ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})


class ServingChat(OpenAIServingChat):
    """vLLM's chat class, which also refuses roles that do not exist."""

    async def create_chat_completion(self, request: Any, raw_request: Request | None = None) -> Any:
        unknown = sorted({str(message["role"]) for message in request.messages} - CHAT_ROLES)
        if unknown:
            raise RequestError(f"messages: unknown role {unknown[0]!r}; accepted: {', '.join(sorted(CHAT_ROLES))}")
        return await super().create_chat_completion(request, raw_request)


class ServingCompletion(OpenAIServingCompletion):
    """vLLM's completion class, which also bounds the prompts of one request: each is a request to the engine."""

    async def create_completion(self, request: Any, raw_request: Request | None = None) -> Any:
        prompt = request.prompt
        if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
            self.engine_client.check_admission(len(prompt) * (request.n or 1))
        return await super().create_completion(request, raw_request)


@functools.cache
def refused_counter() -> Counter:
    """Counts requests answered 429; part of `/metrics`."""
    return Counter(
        "vllm_omni:requests_refused",
        "Requests answered 429 because the queue was full.",
        registry=get_prometheus_registry(),
    )


def build_app(omni: AsyncOmni, options: ServingOptions) -> FastAPI:
    """The application with every route, its serving classes constructed and the chat template compiled."""
    app = FastAPI(title="vLLM-Omni Edge", openapi_url=None)
    for attach in (
        attach_chat_router,
        attach_completion_router,
        attach_responses_router,
        attach_models_router,
        attach_metrics_router,
    ):
        attach(app)
    _fill_state(app.state, omni, options)
    attach_tokenize_router(app)
    init_exception_handler(app)
    # Unknown paths, wrong methods, unreadable bodies: the framework raises its own class; vLLM handles only a subclass.
    app.add_exception_handler(HTTPException, _answer_http_exception)
    app.add_exception_handler(AttributeError, _answer_unchecked_type)
    app.add_exception_handler(KeyError, _answer_unchecked_type)
    app.add_exception_handler(RequestError, _answer_request_error)
    app.add_exception_handler(CapacityError, _answer_capacity_error)
    app.add_exception_handler(StageError, _answer_stage_error)
    app.add_exception_handler(EngineDeadError, _answer_stage_error)
    return app


def _fill_state(state: Any, omni: AsyncOmni, options: ServingOptions) -> None:
    """Sets what vLLM's routers look up on the application."""
    stage = omni.deployment.stage(0)
    limits = omni.deployment.config.orchestrator
    template = load_chat_template(stage.chat_template)
    parsers: dict[str, Any] = {
        "tool_parser": stage.tool_call_parser,
        "enable_auto_tools": stage.tool_call_parser is not None,
        # Arguments of a call follow the tool's schema; vLLM's default leaves them free unless the tool says `strict`.
        "tool_strict_level": "parameter",
        "reasoning_parser": stage.reasoning_parser or "",
    }
    template_options: dict[str, Any] = {"chat_template": template, "chat_template_content_format": "auto"}
    if stage.tool_call_parser is not None:
        init_parser_metrics(model_name=options.served_model_names[0])
    state.engine_client = omni
    # Read by vLLM's routers and exception handlers.
    state.args = SimpleNamespace(
        sse_keep_alive_interval=limits.keep_alive_interval_s,
        log_error_stack=False,
        enable_tokenizer_info_endpoint=False,
    )
    paths = [BaseModelPath(name=name, model_path=omni.model) for name in options.served_model_names]
    models = state.openai_serving_models = OpenAIServingModels(omni, paths)
    renderer = OnlineRenderer(omni.model_config, omni.renderer, request_logger=None, **template_options, **parsers)
    renderer.warmup()
    for attribute, serving_class in (
        ("openai_serving_chat", ServingChat),
        ("openai_serving_chat_batch", OpenAIServingChatBatch),
    ):
        serving = serving_class(
            omni, models, "assistant", online_renderer=renderer, request_logger=None, **template_options, **parsers
        )
        setattr(state, attribute, serving)
    state.openai_serving_completion = ServingCompletion(omni, models, online_renderer=renderer, request_logger=None)
    state.openai_serving_responses = OpenAIServingResponses(
        omni, models, renderer, request_logger=None, **template_options, **parsers
    )
    state.serving_tokenization = ServingTokenization(models, renderer, **template_options)


async def _answer_http_exception(_request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    body = error_body(error.status_code, HTTPStatus(error.status_code).phrase, error.detail)
    return JSONResponse(body, status_code=error.status_code, headers=error.headers)


async def _answer_unchecked_type(request: Request, error: Exception) -> JSONResponse:
    """400 where a validator of vLLM's request models meets a type that it takes for granted, else vLLM's 500."""
    *_, (frame, _line) = traceback.walk_tb(error.__traceback__)
    if not frame.f_globals["__name__"].endswith(".protocol"):
        return await exception_handler(request, error)
    message = f"a field of the request has a wrong type: {error}"
    return JSONResponse(error_body(400, "BadRequestError", message), status_code=400)


async def _answer_request_error(_request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestError)
    body = error_body(error.status_code, error.error_type, error.message)
    return JSONResponse(body, status_code=error.status_code)


async def _answer_capacity_error(_request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, CapacityError)
    refused_counter().inc()
    headers = {} if error.retry_after_s is None else {"retry-after": str(error.retry_after_s)}
    return JSONResponse(error_body(429, "RateLimitError", str(error)), status_code=429, headers=headers)


async def _answer_stage_error(_request: Request, error: Exception) -> JSONResponse:
    return JSONResponse(error_body(503, "ServiceUnavailableError", str(error)), status_code=503)
