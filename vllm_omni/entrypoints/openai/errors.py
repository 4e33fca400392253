"""Error bodies in OpenAI's shape, for answers that are given before a request reaches vLLM's handlers."""

import json
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


def error_body(status: int, error_type: str, message: str, param: str | None = None) -> dict[str, Any]:
    """`{"error": {message, type, param, code}}`."""
    return {"error": {"message": message, "type": error_type, "param": param, "code": status}}


async def send_json(send: Send, status: int, body: Any, headers: Mapping[str, str] | None = None) -> None:
    """Sends one complete JSON response over ASGI."""
    content = json.dumps(body).encode()
    fields = {"content-type": "application/json", "content-length": str(len(content)), **(headers or {})}
    raw = [(name.encode(), value.encode()) for name, value in fields.items()]
    await send({"type": "http.response.start", "status": status, "headers": raw})
    await send({"type": "http.response.body", "body": content})


async def send_error(
    send: Send, status: int, error_type: str, message: str, headers: Mapping[str, str] | None = None
) -> None:
    """Sends one error in OpenAI's shape."""
    await send_json(send, status, error_body(status, error_type, message), headers)
