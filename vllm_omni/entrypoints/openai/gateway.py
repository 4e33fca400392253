"""The outermost application: answers for health from the first second, and forwards to the server once it is ready.

```
starting ──install(app)──> ready ──begin_shutdown()──> draining
```
"""

from collections.abc import Awaitable, Callable
from typing import Any

from vllm_omni.entrypoints.openai.errors import App, Receive, Scope, Send, send_error, send_json

HealthReport = Callable[[], Awaitable[dict[str, Any]]]
START_RETRY_AFTER_S = 2


class Gateway:
    """An ASGI application around the real one.

    `/health` is 200 while the process lives and its engine has not died. `/health/ready` is 200 only when requests are
    served at full speed: the model is loaded, kernels are warm, and no shutdown has begun.
    """

    def __init__(self) -> None:
        self.state = "starting"
        self._app: App | None = None
        self._report: HealthReport | None = None

    def install(self, app: App, report: HealthReport) -> None:
        """Opens the server.

        Args:
            app: Receives everything but the health paths.
            report: Facts for the health body; raises when the engine is dead.
        """
        self._app, self._report = app, report
        self.state = "ready"

    def begin_shutdown(self) -> None:
        """Refuses new requests; those under way go on."""
        self.state = "draining"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        elif scope["type"] == "http" and scope["path"] in ("/health", "/health/ready"):
            await self._health(send, needs_ready=scope["path"] == "/health/ready")
        elif self.state == "ready" and self._app is not None:
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            headers = {"retry-after": str(START_RETRY_AFTER_S)}
            await send_error(send, 503, "ServiceUnavailableError", f"the server is {self.state}", headers)
        else:
            await send({"type": "websocket.close", "code": 1013})

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        while True:
            message = await receive()
            await send({"type": f"{message['type']}.complete"})
            if message["type"] == "lifespan.shutdown":
                return

    async def _health(self, send: Send, *, needs_ready: bool) -> None:
        body: dict[str, Any] = {"status": self.state}
        status = 200 if self.state == "ready" or not needs_ready else 503
        if self._report is not None:
            try:
                body |= await self._report()
            except Exception as error:
                body |= {"status": "failed", "error": str(error)}
                status = 503
        await send_json(send, status, body)
