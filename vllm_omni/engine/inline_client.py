"""The engine-core client that `AsyncLLM` talks to when the core runs in a thread of this process."""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from vllm_omni.engine.compat import (
    EngineCoreClient,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineDeadError,
    VllmConfig,
)
from vllm_omni.engine.core_thread import Abort, CoreThread

logger = logging.getLogger("vllm_omni.inline_client")

DEFAULT_STOP_TIMEOUT_S = 5.0


class InlineCoreClient(EngineCoreClient):
    """Starts the core's thread on construction and does not wait for it; `*_async` methods run on one event loop.

    Outputs cross from the engine thread through a deque and one wake-up of the loop, so tokens of several steps that
    pile up while the loop is busy cost one wake-up, not several.

    Args:
        vllm_config: The engine's configuration.
        executor_class: vLLM executor that runs in the calling thread.
        log_stats: Whether the scheduler collects statistics.
        on_death: Called in the engine thread when it has died.
    """

    engine_ranks_managed = (0,)

    def __init__(
        self,
        vllm_config: VllmConfig,
        executor_class: type,
        log_stats: bool,
        on_death: Callable[[], None],
    ):
        # `AsyncLLM.errored` reads `resources.engine_dead`.
        self.resources = SimpleNamespace(engine_dead=False)
        self._on_death = on_death
        self._outputs: deque[EngineCoreOutputs] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._arrived: asyncio.Event | None = None
        self._thread = CoreThread(vllm_config, executor_class, log_stats, self._put_outputs, self._die)
        self._thread.start()

    def wait_ready(self) -> None:
        """Returns when the core is ready for requests; raises EngineError when it could not be built."""
        self._thread.wait_ready()

    @property
    def is_alive(self) -> bool:
        """Whether the engine thread can serve."""
        return self._thread.is_alive() and not self.resources.engine_dead

    async def get_output_async(self) -> EngineCoreOutputs:
        """The next outputs; waits for them.

        Raises:
            EngineDeadError: The engine thread has died and everything it made has been read.
        """
        if self._arrived is None:
            self._loop = asyncio.get_running_loop()
            self._arrived = asyncio.Event()
        while not self._outputs:
            if self.resources.engine_dead:
                raise EngineDeadError()
            self._arrived.clear()
            # An output may have been put between the test above and the clearing.
            if not self._outputs and not self.resources.engine_dead:
                await self._arrived.wait()
        return self._outputs.popleft()

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        if not self.is_alive:
            raise EngineDeadError()
        self._thread.submit(request)

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        if request_ids and self.is_alive:
            self._thread.submit(Abort(list(request_ids)))

    async def _call(self, method: str, *args: Any) -> Any:
        return await asyncio.wrap_future(self._thread.call(method, *args))

    async def get_supported_tasks_async(self) -> Any:
        return await self._call("get_supported_tasks")

    async def reset_prefix_cache_async(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        return await self._call("reset_prefix_cache", reset_running_requests, reset_connector)

    async def reset_mm_cache_async(self) -> None:
        await self._call("reset_mm_cache")

    async def reset_encoder_cache_async(self) -> None:
        await self._call("reset_encoder_cache")

    async def is_sleeping_async(self) -> bool:
        return await self._call("is_sleeping")

    async def collective_rpc_async(
        self, method: Any, timeout: float | None = None, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> list[Any]:
        return await self._call("collective_rpc", method, timeout, args, kwargs)

    async def profile_async(
        self,
        is_start: bool = True,
        profile_prefix: str | None = None,
        delay_iterations: int | None = None,
        max_iterations: int | None = None,
    ) -> None:
        await self._call("profile", is_start, profile_prefix, delay_iterations, max_iterations)

    def dp_engines_running(self) -> bool:
        return False

    def shutdown(self, timeout: float | None = None) -> None:
        """Stops the engine thread. Idempotent."""
        limit_s = DEFAULT_STOP_TIMEOUT_S if timeout is None else timeout
        if not self._thread.stop(limit_s):
            logger.warning("event=engine_thread_outlives_shutdown timeout_s=%g reason=a step is still running", limit_s)
        self.resources.engine_dead = True
        self._wake()

    def _put_outputs(self, outputs: EngineCoreOutputs) -> None:
        if outputs.outputs or outputs.scheduler_stats:
            self._outputs.append(outputs)
            self._wake()

    def _die(self, _error: BaseException) -> None:
        self.resources.engine_dead = True
        self._wake()
        self._on_death()

    def _wake(self) -> None:
        if self._loop is not None and self._arrived is not None:
            # A closed loop has no reader that waits.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._arrived.set)
