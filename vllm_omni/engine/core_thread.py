"""vLLM's `EngineCore` in a thread of this process.

The thread constructs the core, so that model loading, kernels and every step share one OpenMP team, and then loops:
take what arrived, step, hand outputs over. Nothing is serialised.

```
event loop ──submit(Work)──> queue.SimpleQueue ──> [engine thread: EngineCore.step] ──on_outputs(...)──> event loop
```
"""

import gc
import logging
import queue
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from vllm_omni.engine.compat import (
    EngineCore,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    VllmConfig,
)
from vllm_omni.engine.warm_up import warm_up
from vllm_omni.errors import EngineError

logger = logging.getLogger("vllm_omni.core_thread")

NO_MODEL_RUN_PAUSE_S = 0.001


@dataclass
class Call:
    """A method of the core to run between two steps."""

    method: str
    args: tuple[Any, ...]
    result: Future[Any] = field(default_factory=Future)


@dataclass(frozen=True)
class Abort:
    """Requests to stop."""

    request_ids: list[str]


class Stop:
    """Ends the loop after the current step."""


Work: TypeAlias = EngineCoreRequest | Abort | Call | Stop


class CoreThread:
    """Owns an `EngineCore` and the thread that runs it.

    Args:
        vllm_config: The engine's configuration.
        executor_class: vLLM executor that runs in the calling thread.
        log_stats: Whether the scheduler collects statistics.
        on_outputs: Called in the engine thread with the outputs of each step.
        on_death: Called in the engine thread, once, when the loop ends on an exception.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        executor_class: type,
        log_stats: bool,
        on_outputs: Callable[[EngineCoreOutputs], None],
        on_death: Callable[[BaseException], None],
    ):
        self._make_core = lambda: EngineCore(vllm_config, executor_class, log_stats)
        self._on_outputs = on_outputs
        self._on_death = on_death
        self._work: queue.SimpleQueue[Work] = queue.SimpleQueue()
        self._ready: Future[None] = Future()
        self._core: EngineCore | None = None
        self._takes_calls = True
        self._calls_lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="omni-engine-core", daemon=True)

    def start(self) -> None:
        """Starts the thread; it begins to build the core."""
        self._thread.start()

    def wait_ready(self) -> None:
        """Returns when the core is ready for requests.

        Raises:
            EngineError: The core could not be built; chained to the reason.
        """
        try:
            self._ready.result()
        except Exception as error:
            raise EngineError(f"the engine core could not start: {error}") from error

    def submit(self, work: Work) -> None:
        """Hands work to the thread; returns at once. Callable from any thread."""
        if isinstance(work, Abort) and self._core is not None:
            # Seen between the model's run and the use of its output, so a running step frees the request too.
            self._core.aborts_queue.put_nowait(work.request_ids)
        self._work.put(work)

    def call(self, method: str, *args: Any) -> Future[Any]:
        """Runs `EngineCore.<method>(*args)` between two steps."""
        call = Call(method, args)
        with self._calls_lock:
            if self._takes_calls:
                self._work.put(call)
            else:
                call.result.set_exception(EngineError("the engine core has stopped"))
        return call.result

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def stop(self, timeout_s: float) -> bool:
        """Ends the loop and frees the core. True when the thread has ended within `timeout_s`. Idempotent."""
        if self._thread.ident is None:
            return True
        self._work.put(Stop())
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            # vLLM collects garbage several times while it loads. What the imports left lives as long as the process.
            gc.freeze()
            self._core = self._make_core()
            warm_up(self._core)
        except BaseException as error:
            self._fail_pending_calls()
            self._shutdown_core()
            _free_what_failed(error)
            self._ready.set_exception(error)
            return
        self._ready.set_result(None)
        failure: BaseException | None = None
        try:
            self._loop(self._core)
        except BaseException as error:
            failure = error
            logger.exception("event=engine_core_died")
        self._fail_pending_calls()
        self._shutdown_core()
        if failure is not None:
            self._on_death(failure)

    def _shutdown_core(self) -> None:
        core, self._core = self._core, None
        try:
            if core is not None:
                core.shutdown()
        except Exception:
            logger.exception("event=engine_core_shutdown_failed")

    def _fail_pending_calls(self) -> None:
        with self._calls_lock:
            self._takes_calls = False
        while not self._work.empty():
            work = self._work.get_nowait()
            if isinstance(work, Call):
                work.result.set_exception(EngineError("the engine core has stopped"))

    def _loop(self, core: EngineCore) -> None:
        while True:
            block = not (core.scheduler.has_requests() or core.batch_queue)
            if not self._take_work(core, block):
                return
            outputs, model_executed = core.step_fn()
            for output in (outputs or {}).values():
                self._on_outputs(output)
            core.post_step(model_executed)
            if not model_executed and core.scheduler.has_requests():
                # Waiting for a grammar to compile or a cache to be freed: let the other threads run.
                threading.Event().wait(NO_MODEL_RUN_PAUSE_S)

    def _take_work(self, core: EngineCore, block: bool) -> bool:
        """Handles what has arrived, waiting for the first item if `block`; False when the loop is to end."""
        if block:
            core.aborts_queue.queue.clear()
        while block or not self._work.empty():
            work = self._work.get()
            if isinstance(work, Stop):
                return False
            self._handle(core, work)
            block = block and not core.scheduler.has_requests()
        return True

    def _handle(self, core: EngineCore, work: Work) -> None:
        if isinstance(work, EngineCoreRequest):
            self._add_request(core, work)
        elif isinstance(work, Abort):
            core.abort_requests(work.request_ids)
        elif isinstance(work, Call):
            self._run_call(core, work)

    def _add_request(self, core: EngineCore, request: EngineCoreRequest) -> None:
        """Adds a request; a failure ends that request, not the engine."""
        try:
            core.add_request(*core.preprocess_add_request(request))
        except Exception:
            logger.exception("event=request_rejected_by_core request_id=%s", request.request_id)
            failed = EngineCoreOutput(request.request_id, [], finish_reason=FinishReason.ERROR)
            self._on_outputs(EngineCoreOutputs(outputs=[failed], finished_requests={request.request_id}))

    @staticmethod
    def _run_call(core: EngineCore, call: Call) -> None:
        if not call.result.set_running_or_notify_cancel():
            return
        try:
            call.result.set_result(getattr(core, call.method)(*call.args))
        except Exception as error:
            call.result.set_exception(error)


def _free_what_failed(error: BaseException) -> None:
    """Lets go of a half-built core: the error's frames hold its model, and with it threads and memory."""
    cause: BaseException | None = error
    while cause is not None:
        traceback.clear_frames(cause.__traceback__)
        cause = cause.__cause__ or cause.__context__
    gc.unfreeze()
    gc.collect()
