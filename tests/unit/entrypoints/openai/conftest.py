import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

LIMIT_S = 10.0


@dataclass
class Answer:
    """What an ASGI application sent."""

    messages: list[dict[str, Any]] = field(default_factory=list)

    @property
    def status(self) -> int:
        """Of the only response; fails when there are none or several."""
        (start,) = [message for message in self.messages if message["type"] == "http.response.start"]
        return start["status"]

    @property
    def headers(self) -> dict[str, str]:
        return {name.decode(): value.decode() for name, value in self.messages[0]["headers"]}

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.messages)

    @property
    def json(self) -> Any:
        return json.loads(self.body)


App = Callable[[Any, Any, Any], Awaitable[None]]
Call = Callable[..., Awaitable[Answer]]


async def call_app(
    app: App,
    path: str = "/v1/models",
    *,
    method: str = "GET",
    headers: Sequence[tuple[str, str]] = (),
    chunks: Sequence[bytes] = (b"",),
    kind: str = "http",
) -> Answer:
    """One request to an ASGI application, its body in the given chunks; then the client is gone."""
    scope = {
        "type": kind,
        "path": path,
        "method": method,
        "headers": [(name.encode(), value.encode()) for name, value in headers],
    }
    last = len(chunks) - 1
    arriving = [
        {"type": "http.request", "body": chunk, "more_body": number < last} for number, chunk in enumerate(chunks)
    ]
    answer = Answer()

    async def receive() -> dict[str, Any]:
        return arriving.pop(0) if arriving else {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        answer.messages.append(message)

    await asyncio.wait_for(app(scope, receive, send), LIMIT_S)
    return answer


# Given to tests as a fixture because test modules do not import each other.
@pytest.fixture
def call() -> Call:
    return call_app
