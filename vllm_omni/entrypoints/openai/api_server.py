"""The server process: socket, engine start in the background, uvicorn, and an orderly end.

The socket is bound first, so that a port in use is found before the model is loaded, and `/health` answers while it
loads. SIGTERM and SIGINT let requests under way finish for a moment, end the rest with finish reason `abort`, and free
the engine; the process then exits with 0.
"""

import asyncio
import contextlib
import importlib
import ipaddress
import logging
import signal
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import uvicorn

from vllm_omni import envs
from vllm_omni.config.deployment import Deployment
from vllm_omni.edge.memory import paused_collection, release_freed_memory
from vllm_omni.entrypoints.omni_base import StartOptions
from vllm_omni.entrypoints.openai.errors import App
from vllm_omni.entrypoints.openai.gateway import Gateway
from vllm_omni.entrypoints.openai.middleware import AdmissionMiddleware, ApiKeyMiddleware, BodyLimitMiddleware
from vllm_omni.errors import ConfigError

if TYPE_CHECKING:
    from fastapi import FastAPI

    from vllm_omni.entrypoints.async_omni import AsyncOmni

logger = logging.getLogger("vllm_omni.server")

# Shares of `shutdown_timeout_s`: for requests under way to finish by themselves, for those aborted to deliver their
# last message, for the engine thread, and for the connections to close.
DRAIN_SHARE = 0.4
ABORT_SHARE = 0.1
ENGINE_SHARE = 0.3
CONNECTIONS_SHARE = 0.2
ENGINE_WATCH_INTERVAL_S = 1.0
DATE_HEADER_INTERVAL_S = 1.0
IDLE_POLL_S = 0.02


@dataclass(frozen=True)
class ServerOptions:
    """What `serve` needs beyond the deployment.

    Attributes:
        host: Address to bind; anything but loopback is said at WARNING when no key is set.
        port: 0 lets the operating system choose.
        api_keys: Keys of which a client must send one; empty: none needed.
        served_model_names: Names that clients may use.
        log_stats: Collect what `/metrics` shows.
        log_requests: Log arrival and end of each request.
        uvicorn_log_level: For connection-level messages.
    """

    host: str
    port: int
    api_keys: tuple[str, ...]
    served_model_names: tuple[str, ...]
    log_stats: bool = True
    log_requests: bool = False
    uvicorn_log_level: str = "warning"


def bind_socket(host: str, port: int) -> socket.socket:
    """A TCP socket that listens.

    Raises:
        ConfigError: The address is not of this machine, or the port is taken or needs privileges.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
        # Two sockets may be bound to one port; only one can listen.
        sock.listen()
    except (OSError, OverflowError) as error:
        sock.close()
        raise ConfigError(
            f"cannot listen on {host}:{port}: {error}; choose another --port (0 lets the system choose) or --host, "
            "or stop what listens there"
        ) from error
    return sock


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def run_server(deployment: Deployment, options: ServerOptions, started_at: float) -> int:
    """Serves until a signal or the death of the engine. Returns the process's exit code.

    Args:
        deployment: Checked configuration.
        options: Address, keys, names.
        started_at: `time.monotonic()` of the process's start, for the ready line.
    """
    sock = bind_socket(options.host, options.port)
    if not is_loopback(options.host) and not options.api_keys:
        logger.warning(
            "event=open_server host=%s reason=reachable from other machines and no --api-key is set", options.host
        )
    with contextlib.closing(sock):
        return asyncio.run(_Server(deployment, options, sock, started_at).run())


def _import_routes() -> None:
    importlib.import_module("vllm_omni.entrypoints.openai.serving")
    importlib.import_module("vllm_omni.entrypoints.openai.route_warm_up")


class _Server(uvicorn.Server):
    """One run of the server: uvicorn without its own signal handling, the gateway, and the engine."""

    def __init__(self, deployment: Deployment, options: ServerOptions, sock: socket.socket, started_at: float):
        self.gateway = Gateway()
        limit_s = deployment.config.orchestrator.shutdown_timeout_s
        super().__init__(
            uvicorn.Config(
                self.gateway,
                log_level=options.uvicorn_log_level,
                log_config=None,
                access_log=False,
                timeout_graceful_shutdown=max(1, int(limit_s * CONNECTIONS_SHARE)),
            )
        )
        self.deployment = deployment
        self.options = options
        self.sock = sock
        self.started_at = started_at
        self.omni: AsyncOmni | None = None
        self.admission: AdmissionMiddleware | None = None
        self.exit_code = 0
        self._stop = asyncio.Event()
        self._close = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def main_loop(self) -> None:
        """Keeps the Date header current until the connections are to be closed.

        uvicorn's own loop wakes ten times a second to see whether that is so.
        """
        while not self._close.is_set():
            await self.on_tick(0)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(DATE_HEADER_INTERVAL_S):
                    await self._close.wait()

    async def run(self) -> int:  # type: ignore[override]
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        serving = loop.create_task(self.serve(sockets=[self.sock]))
        starting = self._start_engine_thread(loop)
        stopped = loop.create_task(self._stop.wait())
        await asyncio.wait({starting, stopped, serving}, return_when=asyncio.FIRST_COMPLETED)
        if starting.done() and not self._stop.is_set():
            self._open(starting)
            watching = loop.create_task(self._watch_engine())
            await asyncio.wait({stopped, serving}, return_when=asyncio.FIRST_COMPLETED)
            watching.cancel()
        stopped.cancel()
        await self._end()
        await serving
        return self.exit_code

    def _on_signal(self, number: int) -> None:
        logger.info("event=shutdown_requested signal=%s", signal.Signals(number).name)
        self._stop.set()

    def _start_engine_thread(self, loop: asyncio.AbstractEventLoop) -> "asyncio.Future[Any]":
        """Loads the engine in a daemon thread: a signal during the load must not wait for it."""
        result: asyncio.Future[Any] = loop.create_future()

        def settle(value: Any, error: BaseException | None) -> None:
            if result.cancelled():
                return
            result.set_exception(error) if error is not None else result.set_result(value)

        def load() -> None:
            value, failure = None, None
            try:
                value = self._load(loop)
            except BaseException as error:
                failure = error
            with contextlib.suppress(RuntimeError):  # The loop is closed: the server has ended meanwhile.
                loop.call_soon_threadsafe(settle, value, failure)

        threading.Thread(target=load, name="omni-load", daemon=True).start()
        return result

    def _load(self, loop: asyncio.AbstractEventLoop) -> Any:
        with paused_collection():
            app = self._build()
        asyncio.run_coroutine_threadsafe(self._warm_up(app), loop).result()
        if envs.VLLM_OMNI_CPU_RELEASE_MEMORY:
            release_freed_memory()
        return self._guard(app)

    def _build(self) -> "FastAPI":
        from vllm_omni.entrypoints.async_omni import AsyncOmni

        options = StartOptions(
            self.options.log_stats, self.options.log_requests, release_memory=False, while_loading=_import_routes
        )
        self.omni = AsyncOmni.from_deployment(self.deployment, options)

        from vllm_omni.entrypoints.openai.serving import ServingOptions, build_app

        return build_app(self.omni, ServingOptions(self.options.served_model_names))

    async def _warm_up(self, app: "FastAPI") -> None:
        from vllm_omni.entrypoints.openai.route_warm_up import warm_up_routes

        has_template = self.deployment.stage(0).chat_template or self.deployment.facts.chat_template
        await warm_up_routes(app, self.options.served_model_names[0], has_chat_template=bool(has_template))

    def _guard(self, app: "FastAPI") -> App:
        """The application behind queue bound, body limit and keys."""
        from vllm_omni.entrypoints.openai.serving import refused_counter

        assert self.omni is not None
        limits = self.deployment.config.orchestrator
        limited = BodyLimitMiddleware(app, limits.max_request_bytes)
        self.admission = AdmissionMiddleware(
            limited, self.omni.max_requests, limits.retry_after_s, refused_counter().inc
        )
        return ApiKeyMiddleware(self.admission, self.options.api_keys)

    def _open(self, starting: "asyncio.Future[Any]") -> None:
        """Opens the gateway; an engine that could not start ends the server with its error."""
        error = starting.exception()
        if error is not None:
            self._close.set()
            raise error
        self.gateway.install(starting.result(), self._health)
        host, port = self.sock.getsockname()[:2]
        logger.info(
            "event=ready url=http://%s:%d seconds=%.1f models=%s",
            host,
            port,
            time.monotonic() - self.started_at,
            ",".join(self.options.served_model_names),
        )

    async def _health(self) -> dict[str, Any]:
        assert self.omni is not None
        await self.omni.check_health()
        return {"num_requests": self.omni.num_requests, "max_requests": self.omni.max_requests} | self.omni.describe()

    async def _watch_engine(self) -> None:
        """Ends the server when its engine has died: a supervisor can then start a new one."""
        assert self.omni is not None
        while not self.omni.errored:
            await asyncio.sleep(ENGINE_WATCH_INTERVAL_S)
        logger.error("event=engine_dead action=exit")
        self.exit_code = 1
        self._stop.set()

    async def _end(self) -> None:
        """Drains, aborts what is left, frees the engine, closes the connections."""
        self.gateway.begin_shutdown()
        if self.omni is not None:
            await self._end_engine(self.omni)
        self._close.set()

    async def _end_engine(self, omni: "AsyncOmni") -> None:
        limit_s = self.deployment.config.orchestrator.shutdown_timeout_s
        if not await self._wait_idle(omni, limit_s * DRAIN_SHARE):
            num_aborted = await omni.abort_all()
            await self._wait_idle(omni, limit_s * ABORT_SHARE)
            logger.info("event=requests_aborted count=%d", num_aborted)
        await asyncio.to_thread(omni.shutdown, limit_s * ENGINE_SHARE)
        logger.info("event=engine_stopped")

    async def _wait_idle(self, omni: "AsyncOmni", timeout_s: float) -> bool:
        """Waits until neither the engine nor a route works on a request; False when `timeout_s` passed first."""
        try:
            async with asyncio.timeout(timeout_s):
                while omni.num_requests or (self.admission is not None and self.admission.num_requests):
                    await asyncio.sleep(IDLE_POLL_S)
        except TimeoutError:
            return False
        return True
