"""Sends a few requests through the routes before the server opens, so that the first client does not pay for first use.

What they warm: request validation, the chat template, the streaming writer, and the grammar compiler. They count in
`/metrics` like any request.
"""

import logging
import time
from typing import Any

import httpx

from vllm_omni.entrypoints.openai.errors import App
from vllm_omni.errors import EngineError

logger = logging.getLogger("vllm_omni.warm_up")

NEW_TOKENS = 2
ANSWER_SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}


def warm_up_requests(model: str, *, has_chat_template: bool) -> list[tuple[str, dict[str, Any]]]:
    """Path and body of each request."""
    common = {"model": model, "max_tokens": NEW_TOKENS, "temperature": 0}
    chat = common | {"messages": [{"role": "user", "content": "Hi"}]}
    schema = {"type": "json_schema", "json_schema": {"name": "answer", "schema": ANSWER_SCHEMA}}
    requests = [("/v1/completions", common | {"prompt": "Hi", "response_format": schema})]
    if has_chat_template:
        requests.append(("/v1/chat/completions", chat | {"stream": True}))
    return requests


async def warm_up_routes(app: App, model: str, *, has_chat_template: bool) -> None:
    """Runs the requests one after another.

    Raises:
        EngineError: A route did not answer 200; it would not answer clients either.
    """
    start = time.monotonic()
    requests = warm_up_requests(model, has_chat_template=has_chat_template)
    transport = httpx.ASGITransport(app=app)  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=transport, base_url="http://warm-up", timeout=None) as client:
        for path, body in requests:
            response = await client.post(path, json=body)
            if response.status_code != httpx.codes.OK:
                raise EngineError(f"warm-up: {path} answered {response.status_code}: {response.text[:500]}")
    logger.info("event=routes_warm requests=%d seconds=%.2f", len(requests), time.monotonic() - start)
