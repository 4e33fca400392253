"""What stands before vLLM's routes: keys, body size, and the bound of the queue. Plain ASGI, no framework."""

import asyncio
import contextlib
import hmac
from collections.abc import Callable, Sequence

from vllm_omni.entrypoints.openai.errors import App, Message, Receive, Scope, Send, send_error

HEALTH_PATHS = frozenset({"/health", "/health/ready"})
POLICY_VIOLATION = 1008
GENERATION_PATHS = frozenset({"/v1/chat/completions", "/v1/chat/completions/batch", "/v1/completions", "/v1/responses"})


# What a client has to send its body: one that stalls must not keep a place in the queue.
BODY_LIMIT_S = 60.0
# What is read of a body that is refused: a client that is still sending sees a reset connection and not the answer.
DRAIN_LIMIT_BYTES = 64 << 20
DRAIN_LIMIT_S = 5.0


class BodyRefusedError(Exception):
    """The body passed a limit while it was being received."""


class ApiKeyMiddleware:
    """Answers 401 to requests without one of the keys. Health paths need none, so that a supervisor can probe.

    Args:
        keys: Accepted keys; empty accepts every request.
    """

    def __init__(self, app: App, keys: Sequence[str]):
        self.app = app
        self._accepted = [f"Bearer {key}".encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._may_pass(scope):
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": POLICY_VIOLATION})
        else:
            message = "missing or wrong API key; send it as `Authorization: Bearer KEY`"
            await send_error(send, 401, "AuthenticationError", message, {"www-authenticate": "Bearer"})

    def _may_pass(self, scope: Scope) -> bool:
        if not self._accepted or scope["type"] not in ("http", "websocket") or scope["path"] in HEALTH_PATHS:
            return True
        given = dict(scope["headers"]).get(b"authorization", b"")
        return any(hmac.compare_digest(given, accepted) for accepted in self._accepted)


class BodyLimitMiddleware:
    """Bounds a body: 413 over `max_bytes`, by its declared length or once that many bytes arrived; 408 when it is late.

    Args:
        max_bytes: Largest body.
        limit_s: Seconds from the request's head to the end of its body.
    """

    def __init__(self, app: App, max_bytes: int, limit_s: float = BODY_LIMIT_S):
        self.app = app
        self.max_bytes = max_bytes
        self.limit_s = limit_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        declared = dict(scope["headers"]).get(b"content-length", b"0")
        if declared.isdigit() and int(declared) > self.max_bytes:
            await drain(receive)
            await self._refuse(send)
            return
        await self._run_counted(scope, receive, send)

    async def _run_counted(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = _CountedBody(receive, self.max_bytes, self.limit_s)
        started = False

        async def watched_send(message: Message) -> None:
            nonlocal started
            # The framework answers for an exception that it met while reading the body; ours is the better answer.
            if not body.is_refused:
                started = True
                await send(message)

        with contextlib.suppress(BodyRefusedError):
            await self.app(scope, body.receive, watched_send)
        if started or not body.is_refused:
            return
        if body.is_late:
            message = f"the request body was not complete within {self.limit_s:g} s"
            await send_error(send, 408, "RequestTimeoutError", message, {"connection": "close"})
            return
        if body.has_more:
            await drain(receive)
        await self._refuse(send)

    async def _refuse(self, send: Send) -> None:
        message = f"the request body is larger than {self.max_bytes} bytes (orchestrator.max_request_bytes)"
        # What was not read of the body makes the connection useless.
        await send_error(send, 413, "RequestTooLargeError", message, {"connection": "close"})


class _CountedBody:
    """`receive` of one request, bounded in bytes and, until the body is complete, in time."""

    def __init__(self, receive: Receive, max_bytes: int, limit_s: float):
        self._receive = receive
        self._max_bytes = max_bytes
        self._deadline = asyncio.get_running_loop().time() + limit_s
        self._num_bytes = 0
        self.has_more = True
        self.is_late = False

    @property
    def is_refused(self) -> bool:
        return self.is_late or self._num_bytes > self._max_bytes

    async def receive(self) -> Message:
        if not self.has_more:
            return await self._receive()
        try:
            async with asyncio.timeout_at(self._deadline):
                message = await self._receive()
        except TimeoutError as error:
            self.is_late = True
            raise BodyRefusedError from error
        self._num_bytes += len(message.get("body", b""))
        self.has_more = message.get("more_body", False)
        if self.is_refused:
            raise BodyRefusedError
        return message


async def drain(receive: Receive) -> None:
    """Reads and drops the rest of a body, within limits."""
    num_bytes = 0
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(DRAIN_LIMIT_S):
            while num_bytes < DRAIN_LIMIT_BYTES:
                message = await receive()
                num_bytes += len(message.get("body", b""))
                if not message.get("more_body", False):
                    return


class AdmissionMiddleware:
    """Answers 429 with `Retry-After` when the queue is full, before the body of a request is read.

    Args:
        max_requests: Generation requests in flight at a time.
        retry_after_s: What the answer advises.
        on_refused: Called once per refused request.
    """

    def __init__(self, app: App, max_requests: int, retry_after_s: int, on_refused: Callable[[], None]):
        self.app = app
        self.max_requests = max_requests
        self.retry_after_s = retry_after_s
        self.num_requests = 0
        self._on_refused = on_refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        generates = scope["type"] == "http" and scope["method"] == "POST" and scope["path"] in GENERATION_PATHS
        if not generates:
            await self.app(scope, receive, send)
        elif self.num_requests >= self.max_requests:
            self._on_refused()
            message = (
                f"{self.num_requests} requests are in flight and at most {self.max_requests} are accepted "
                "(max_num_seqs + orchestrator.max_queued_requests); retry later"
            )
            await send_error(send, 429, "RateLimitError", message, {"retry-after": str(self.retry_after_s)})
        else:
            self.num_requests += 1
            try:
                await self.app(scope, receive, send)
            finally:
                self.num_requests -= 1
