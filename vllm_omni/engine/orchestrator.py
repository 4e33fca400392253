"""Per-request state machine: routes requests through the stages of a pipeline and carries aborts and errors.

Imports neither torch nor vLLM, and does not know in which process or thread a stage runs. `start` and `shutdown` block
and may be called from any thread; everything else runs on the event loop that first called `run`.
"""

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import AsyncGenerator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field

from vllm_omni.engine.stage import Stage, StageOutput, StageRequest
from vllm_omni.errors import CapacityError, EngineError, RequestError, StageError

logger = logging.getLogger("vllm_omni.orchestrator")


@dataclass
class RequestState:
    """A request in flight: its queue of messages and the stage that works on it."""

    request: StageRequest
    stage_id: int = 0
    messages: asyncio.Queue[StageOutput] = field(default_factory=asyncio.Queue)


class Orchestrator:
    """Owns the stages and every request in flight.

    Args:
        stages: In pipeline order, ids 0..n-1. One stage is all that a text pipeline has; a request visits stage 0.
        max_requests: Requests in flight, running and waiting together, before `CapacityError`.
        retry_after_s: What `CapacityError` advises.
    """

    def __init__(self, stages: Sequence[Stage], *, max_requests: int, retry_after_s: int):
        self.stages = tuple(stages)
        self.max_requests = max_requests
        self.retry_after_s = retry_after_s
        self._requests: dict[str, RequestState] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._routers: list[asyncio.Task[None]] = []
        self._idle: asyncio.Event | None = None
        self._fatal: BaseException | None = None
        self._closed = False
        self._close_lock = threading.Lock()

    @property
    def num_requests(self) -> int:
        """Sequences in flight, running and waiting together; a request with `n` counts `n` times."""
        return sum(state.request.num_sequences for state in self._requests.values())

    @property
    def fatal_error(self) -> BaseException | None:
        """Why no request can be served any more, or None."""
        if self._closed:
            return StageError("the engine has been shut down")
        return self._fatal

    def start(self, *, stage_timeout_s: float, total_timeout_s: float) -> None:
        """Starts the stages in order and blocks until all are ready.

        Raises:
            EngineError: A stage took longer than `stage_timeout_s`, or all of them longer than `total_timeout_s`; the
                stages have been told to shut down.
            Exception: Whatever kept a stage from starting; every stage has been shut down again.
        """
        deadline = time.monotonic() + total_timeout_s
        try:
            for stage in self.stages:
                self._start_stage(stage, stage_timeout_s, deadline - time.monotonic())
        except BaseException:
            self.shutdown(timeout_s=5.0)
            raise

    def check_capacity(self, num_requests: int = 1) -> None:
        """Returns when `num_requests` more fit.

        Raises:
            CapacityError: The bound is reached; they fit later.
            RequestError: They are more than the bound; they never fit.
        """
        if num_requests > self.max_requests:
            raise RequestError(
                f"{num_requests} sequences are asked for at once (prompts times n) and at most {self.max_requests} are "
                "accepted (max_num_seqs + orchestrator.max_queued_requests); send fewer"
            )
        if self.num_requests + num_requests > self.max_requests:
            raise CapacityError(
                f"{self.num_requests} requests are in flight and at most {self.max_requests} are accepted "
                "(max_num_seqs + orchestrator.max_queued_requests); retry later",
                retry_after_s=self.retry_after_s,
            )

    async def run(self, request: StageRequest) -> AsyncGenerator[StageOutput, None]:
        """Runs one request and yields its messages; the last has `finished` set.

        Closing the iterator early, or cancelling the task that reads it, aborts the request.

        Raises:
            CapacityError: The queue bound is reached; the request was not admitted.
            RequestError: The id is in flight already, or the request alone is over the bound.
            StageError: A stage has died, or the engine has been shut down.
            Exception: Whatever ended the request in a stage.
        """
        state = await self._admit(request)
        finished = False
        try:
            while not finished:
                message = await state.messages.get()
                finished = message.finished or message.error is not None
                if message.error is not None:
                    raise message.error
                yield message
        finally:
            self._release(request.request_id)
            if not finished:
                await self._abort_in_stage(state)

    async def abort(self, request_id: str) -> bool:
        """Stops a request wherever it is; its reader receives the final message. False when it is not in flight."""
        state = self._requests.get(request_id)
        if state is None:
            return False
        await self._abort_in_stage(state)
        return True

    async def abort_all(self) -> int:
        """Aborts every request in flight and returns how many there were."""
        request_ids = list(self._requests)
        for request_id in request_ids:
            await self.abort(request_id)
        return len(request_ids)

    async def wait_idle(self, timeout_s: float) -> bool:
        """Waits until nothing is in flight; False when `timeout_s` passed first."""
        if self._idle is None or not self._requests:
            return True
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    async def check_health(self) -> None:
        """Returns when every stage can serve.

        Raises:
            StageError: A stage is dead, or the engine has been shut down.
        """
        if self.fatal_error is not None:
            raise StageError(str(self.fatal_error)) from self.fatal_error
        for stage in self.stages:
            await stage.check_health()

    def shutdown(self, timeout_s: float) -> None:
        """Ends every request with an error and frees the stages. Idempotent, bounded by about `timeout_s` a stage."""
        with self._close_lock:
            if self._closed:
                return
            self._closed = True
        for stage in reversed(self.stages):
            stage.shutdown(timeout_s)
        if self._loop is not None and not self._loop.is_closed():
            # The loop may close between the test and the call; then there is nobody left to tell.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._end_routing)

    @staticmethod
    def _start_stage(stage: Stage, stage_timeout_s: float, remaining_s: float) -> None:
        done: Future[None] = Future()

        def start() -> None:
            try:
                stage.start()
            except BaseException as error:
                done.set_exception(error)
            else:
                done.set_result(None)

        threading.Thread(target=start, name=f"omni-start-{stage.stage_id}", daemon=True).start()
        setting, limit_s = min(
            ("init_timeout", remaining_s), ("stage_init_timeout", stage_timeout_s), key=lambda x: x[1]
        )
        # A TimeoutError from the stage itself is the stage's own failure.
        if not wait([done], timeout=max(0.0, limit_s)).done:
            raise EngineError(
                f"stage {stage.stage_id} was not ready in time ({setting}); raise orchestrator.{setting} "
                f"(--{setting.replace('_', '-')}) or look above for what it was doing"
            )
        done.result()

    def _bind_loop(self) -> None:
        """Starts the routers on the running loop, which stays the one of this orchestrator."""
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
            self._idle = asyncio.Event()
            self._routers = [
                loop.create_task(self._route(stage), name=f"omni-route-{stage.stage_id}") for stage in self.stages
            ]
        elif self._loop is not loop:
            raise EngineError(
                "this engine belongs to another event loop; use one loop for all calls, or `Omni` in synchronous code"
            )

    async def _admit(self, request: StageRequest) -> RequestState:
        if self.fatal_error is not None:
            raise StageError(f"the engine cannot take requests: {self.fatal_error}") from self.fatal_error
        self._bind_loop()
        assert self._idle is not None
        if request.request_id in self._requests:
            raise RequestError(f"request id {request.request_id!r} is in flight already; ids must be unique")
        self.check_capacity(request.num_sequences)
        state = self._requests[request.request_id] = RequestState(request)
        self._idle.clear()
        try:
            await self.stages[0].submit(request)
        except BaseException:
            self._release(request.request_id)
            raise
        return state

    def _release(self, request_id: str) -> None:
        self._requests.pop(request_id, None)
        if not self._requests and self._idle is not None:
            self._idle.set()

    async def _abort_in_stage(self, state: RequestState) -> None:
        await self.stages[state.stage_id].abort(state.request.request_id)

    async def _route(self, stage: Stage) -> None:
        """Moves a stage's messages to the requests they belong to, until the stage ends."""
        try:
            async for message in stage.outputs():
                state = self._requests.get(message.request_id)
                if state is not None:
                    state.messages.put_nowait(message)
            self._fatal = StageError("its outputs ended unexpectedly", stage.stage_id)
        except Exception as error:
            logger.exception("event=stage_failed stage_id=%d", stage.stage_id)
            self._fatal = error
        self._fail_requests(self._fatal)

    def _end_routing(self) -> None:
        for router in self._routers:
            router.cancel()
        self._fail_requests(StageError("the engine has been shut down"))

    def _fail_requests(self, error: BaseException) -> None:
        for request_id, state in self._requests.items():
            state.messages.put_nowait(StageOutput(request_id, error=error))
