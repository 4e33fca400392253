import asyncio
import threading
from collections.abc import AsyncIterator, Iterator

import pytest

from vllm_omni.engine.orchestrator import Orchestrator
from vllm_omni.engine.stage import Stage, StageOutput, StageRequest
from vllm_omni.errors import CapacityError, EngineError, RequestError, StageError

LIMIT_S = 10.0


class FakeStage(Stage):
    """A stage whose messages the test writes.

    Attributes:
        accepted: Ids in the order in which they were submitted.
        aborted: Ids in the order in which they were aborted.
        timeouts_s: One for each `shutdown`.
        gate: `start` waits for it; set unless a test clears it.
    """

    def __init__(self, stage_id: int = 0):
        self.stage_id = stage_id
        self.accepted: asyncio.Queue[str] = asyncio.Queue()
        self.aborted: list[str] = []
        self.timeouts_s: list[float] = []
        self.events: list[str] = []
        self.gate = threading.Event()
        self.gate.set()
        self.start_error: BaseException | None = None
        self.submit_error: Exception | None = None
        self.health_error: StageError | None = None
        self._messages: asyncio.Queue[StageOutput | Exception | None] = asyncio.Queue()

    def start(self) -> None:
        self.events.append(f"start {self.stage_id}")
        self.gate.wait(LIMIT_S)
        if self.start_error is not None:
            raise self.start_error

    async def submit(self, request: StageRequest) -> None:
        if self.submit_error is not None:
            raise self.submit_error
        self.accepted.put_nowait(request.request_id)

    async def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)
        self.say(request_id, "partial", finished=True)

    async def outputs(self) -> AsyncIterator[StageOutput]:
        while (message := await self._messages.get()) is not None:
            if isinstance(message, Exception):
                raise message
            yield message

    async def check_health(self) -> None:
        if self.health_error is not None:
            raise self.health_error

    def shutdown(self, timeout_s: float) -> None:
        self.events.append(f"shutdown {self.stage_id}")
        self.timeouts_s.append(timeout_s)
        self.gate.set()

    async def wait_accepted(self, count: int = 1) -> None:
        for _ in range(count):
            await asyncio.wait_for(self.accepted.get(), LIMIT_S)

    def say(self, request_id: str, text: str, *, finished: bool = False) -> None:
        self._messages.put_nowait(StageOutput(request_id, text, finished=finished))

    def fail(self, request_id: str, error: BaseException) -> None:
        self._messages.put_nowait(StageOutput(request_id, error=error))

    def die(self, error: Exception | None) -> None:
        """Ends `outputs`, with an exception or without."""
        self._messages.put_nowait(error)


def make(*stages: Stage, max_requests: int = 4) -> Orchestrator:
    return Orchestrator(stages, max_requests=max_requests, retry_after_s=3)


def start(orchestrator: Orchestrator) -> None:
    orchestrator.start(stage_timeout_s=LIMIT_S, total_timeout_s=LIMIT_S)


def request(request_id: str = "a") -> StageRequest:
    return StageRequest(request_id, prompt="hello", sampling_params=None)


async def read(orchestrator: Orchestrator, request_id: str = "a") -> list[str]:
    return [message.output async for message in orchestrator.run(request(request_id))]


def reading(orchestrator: Orchestrator, request_id: str = "a") -> "asyncio.Task[list[str]]":
    return asyncio.create_task(read(orchestrator, request_id))


async def ended(task: "asyncio.Task[list[str]]") -> list[str]:
    return await asyncio.wait_for(task, LIMIT_S)


@pytest.fixture
def stage() -> FakeStage:
    return FakeStage()


@pytest.fixture
def orchestrator(stage: FakeStage) -> Iterator[Orchestrator]:
    made = make(stage)
    start(made)
    yield made
    made.shutdown(1.0)


async def test_a_request_runs_to_its_end(orchestrator: Orchestrator, stage: FakeStage) -> None:
    task = reading(orchestrator)
    await stage.wait_accepted()
    assert orchestrator.num_requests == 1
    stage.say("a", "one")
    stage.say("a", "two", finished=True)
    assert await ended(task) == ["one", "two"]
    assert orchestrator.num_requests == 0
    assert stage.aborted == []


async def test_two_requests_interleave(orchestrator: Orchestrator, stage: FakeStage) -> None:
    first, second = reading(orchestrator, "a"), reading(orchestrator, "b")
    await stage.wait_accepted(2)
    for request_id, text, finished in (("a", "a1", False), ("b", "b1", False), ("b", "b2", True), ("a", "a2", True)):
        stage.say(request_id, text, finished=finished)
    assert await ended(first) == ["a1", "a2"]
    assert await ended(second) == ["b1", "b2"]


async def test_messages_of_requests_that_have_ended_are_dropped(orchestrator: Orchestrator, stage: FakeStage) -> None:
    task = reading(orchestrator)
    await stage.wait_accepted()
    stage.say("gone", "late", finished=True)
    stage.say("a", "mine", finished=True)
    assert await ended(task) == ["mine"]


async def test_closing_early_aborts_in_the_stage_once(orchestrator: Orchestrator, stage: FakeStage) -> None:
    messages = orchestrator.run(request())
    first = asyncio.ensure_future(anext(messages))
    await stage.wait_accepted()
    stage.say("a", "one")
    stage.say("a", "two")
    assert (await asyncio.wait_for(first, LIMIT_S)).output == "one"
    await messages.aclose()
    assert stage.aborted == ["a"]
    assert orchestrator.num_requests == 0


async def test_cancelling_the_reader_aborts_in_the_stage_once(orchestrator: Orchestrator, stage: FakeStage) -> None:
    task = reading(orchestrator)
    await stage.wait_accepted()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await ended(task)
    assert stage.aborted == ["a"]
    assert orchestrator.num_requests == 0


async def test_abort_delivers_the_final_message(orchestrator: Orchestrator, stage: FakeStage) -> None:
    task = reading(orchestrator)
    await stage.wait_accepted()
    stage.say("a", "one")
    assert await orchestrator.abort("a") is True
    assert await ended(task) == ["one", "partial"]
    assert stage.aborted == ["a"]


async def test_abort_of_an_unknown_id_does_nothing(orchestrator: Orchestrator, stage: FakeStage) -> None:
    assert await orchestrator.abort("nobody") is False
    assert stage.aborted == []


async def test_abort_all_counts_what_it_stopped(orchestrator: Orchestrator, stage: FakeStage) -> None:
    tasks = [reading(orchestrator, name) for name in ("a", "b")]
    await stage.wait_accepted(2)
    assert await orchestrator.abort_all() == 2
    assert [await ended(task) for task in tasks] == [["partial"], ["partial"]]
    assert await orchestrator.abort_all() == 0


# Errors.


async def test_an_error_of_one_request_reaches_only_that_one(orchestrator: Orchestrator, stage: FakeStage) -> None:
    bad, good = reading(orchestrator, "bad"), reading(orchestrator, "good")
    await stage.wait_accepted(2)
    stage.fail("bad", RequestError("prompt too long"))
    stage.say("good", "fine", finished=True)
    with pytest.raises(RequestError, match="prompt too long"):
        await ended(bad)
    assert await ended(good) == ["fine"]
    assert orchestrator.fatal_error is None
    assert stage.aborted == []


@pytest.mark.parametrize(("cause", "expected"), [(OSError("bus error"), OSError), (None, StageError)])
async def test_a_dying_stage_fails_every_request_and_refuses_new_ones(
    orchestrator: Orchestrator, stage: FakeStage, cause: Exception | None, expected: type[Exception]
) -> None:
    tasks = [reading(orchestrator, name) for name in ("a", "b")]
    await stage.wait_accepted(2)
    stage.die(cause)
    for task in tasks:
        with pytest.raises(expected):
            await ended(task)
    assert isinstance(orchestrator.fatal_error, expected)
    with pytest.raises(EngineError, match="cannot take requests"):
        await read(orchestrator, "c")
    with pytest.raises(StageError):
        await orchestrator.check_health()
    assert orchestrator.num_requests == 0


async def test_a_refused_submit_leaves_nothing_behind(orchestrator: Orchestrator, stage: FakeStage) -> None:
    stage.submit_error = ValueError("no such option")
    with pytest.raises(ValueError, match="no such option"):
        await read(orchestrator)
    assert orchestrator.num_requests == 0
    assert await orchestrator.wait_idle(0.0)


async def test_an_id_in_flight_is_refused_and_its_owner_unharmed(orchestrator: Orchestrator, stage: FakeStage) -> None:
    task = reading(orchestrator)
    await stage.wait_accepted()
    with pytest.raises(RequestError, match="'a' is in flight"):
        await read(orchestrator)
    stage.say("a", "done", finished=True)
    assert await ended(task) == ["done"]


async def test_an_id_is_free_again_when_its_request_has_ended(orchestrator: Orchestrator, stage: FakeStage) -> None:
    for text in ("first", "second"):
        task = reading(orchestrator)
        await stage.wait_accepted()
        stage.say("a", text, finished=True)
        assert await ended(task) == [text]


async def test_requests_over_the_bound_are_refused_with_advice(stage: FakeStage) -> None:
    orchestrator = make(stage, max_requests=1)
    start(orchestrator)
    task = reading(orchestrator)
    await stage.wait_accepted()
    with pytest.raises(CapacityError, match="at most 1 are accepted") as caught:
        await read(orchestrator, "b")
    assert caught.value.retry_after_s == 3
    stage.say("a", "done", finished=True)
    await ended(task)
    orchestrator.check_capacity()
    orchestrator.shutdown(1.0)


async def test_sequences_of_one_request_count_one_by_one(stage: FakeStage) -> None:
    orchestrator = make(stage, max_requests=3)
    start(orchestrator)

    async def read_two() -> list[str]:
        two = StageRequest("two", prompt="hello", sampling_params=None, num_sequences=2)
        return [message.output async for message in orchestrator.run(two)]

    task = asyncio.create_task(read_two())
    await stage.wait_accepted()
    assert orchestrator.num_requests == 2
    orchestrator.check_capacity(1)
    with pytest.raises(CapacityError):
        orchestrator.check_capacity(2)
    stage.say("two", "done", finished=True)
    assert await ended(task) == ["done"]
    orchestrator.shutdown(1.0)


async def test_what_never_fits_is_the_request_s_fault(orchestrator: Orchestrator) -> None:
    with pytest.raises(RequestError, match=r"5 sequences are asked for at once .* at most 4 are accepted"):
        orchestrator.check_capacity(5)


async def test_health_is_the_worst_of_the_stages() -> None:
    stages = FakeStage(0), FakeStage(1)
    orchestrator = make(*stages)
    start(orchestrator)
    await orchestrator.check_health()
    stages[1].health_error = StageError("its thread is gone", 1)
    with pytest.raises(StageError, match="its thread is gone"):
        await orchestrator.check_health()


# Waiting and shutdown.


async def test_wait_idle_is_true_before_the_first_request(orchestrator: Orchestrator) -> None:
    assert await orchestrator.wait_idle(0.0)


async def test_wait_idle_ends_with_the_last_request(orchestrator: Orchestrator, stage: FakeStage) -> None:
    task = reading(orchestrator)
    await stage.wait_accepted()
    assert not await orchestrator.wait_idle(0.01)
    waiting = asyncio.create_task(orchestrator.wait_idle(LIMIT_S))
    stage.say("a", "done", finished=True)
    assert await waiting
    assert await ended(task) == ["done"]


async def test_wait_idle_is_true_when_every_request_was_refused(stage: FakeStage) -> None:
    orchestrator = make(stage, max_requests=0)
    start(orchestrator)
    with pytest.raises(RequestError):
        await read(orchestrator)
    assert await orchestrator.wait_idle(0.01)
    orchestrator.shutdown(1.0)


async def test_shutdown_ends_requests_with_an_error_and_is_idempotent(
    orchestrator: Orchestrator, stage: FakeStage
) -> None:
    task = reading(orchestrator)
    await stage.wait_accepted()
    orchestrator.shutdown(1.5)
    orchestrator.shutdown(2.5)
    with pytest.raises(EngineError, match="shut down"):
        await ended(task)
    assert stage.timeouts_s == [1.5]
    with pytest.raises(EngineError, match="shut down"):
        await read(orchestrator, "b")
    with pytest.raises(StageError, match="shut down"):
        await orchestrator.check_health()


async def test_shutdown_works_from_another_thread(orchestrator: Orchestrator, stage: FakeStage) -> None:
    task = reading(orchestrator)
    await stage.wait_accepted()
    await asyncio.wait_for(asyncio.to_thread(orchestrator.shutdown, 1.0), LIMIT_S)
    with pytest.raises(EngineError, match="shut down"):
        await ended(task)
    assert stage.timeouts_s == [1.0]


def test_shutdown_after_the_loop_has_closed() -> None:
    stage = FakeStage()
    orchestrator = make(stage)
    start(orchestrator)

    async def serve_one() -> list[str]:
        task = reading(orchestrator)
        await stage.wait_accepted()
        stage.say("a", "done", finished=True)
        return await ended(task)

    assert asyncio.run(serve_one()) == ["done"]
    orchestrator.shutdown(1.0)
    assert stage.timeouts_s == [1.0]


async def test_a_second_event_loop_is_refused(orchestrator: Orchestrator, stage: FakeStage) -> None:
    task = reading(orchestrator)
    await stage.wait_accepted()
    with pytest.raises(EngineError, match="another event loop"):
        await asyncio.to_thread(lambda: asyncio.run(read(orchestrator, "b")))
    stage.say("a", "done", finished=True)
    assert await ended(task) == ["done"]


# Start.


def test_stages_start_in_order_and_end_in_reverse() -> None:
    stages = FakeStage(0), FakeStage(1)
    events: list[str] = []
    for stage in stages:
        stage.events = events
    orchestrator = make(*stages)
    start(orchestrator)
    orchestrator.shutdown(1.0)
    assert events == ["start 0", "start 1", "shutdown 1", "shutdown 0"]


@pytest.mark.parametrize("error", [EngineError("no memory"), TimeoutError("the stage's own"), KeyboardInterrupt()])
def test_a_stage_that_cannot_start_shuts_all_stages_down(error: BaseException) -> None:
    stages = FakeStage(0), FakeStage(1), FakeStage(2)
    stages[1].start_error = error
    orchestrator = make(*stages)
    with pytest.raises(type(error)) as caught:
        start(orchestrator)
    assert caught.value is error
    assert [len(stage.timeouts_s) for stage in stages] == [1, 1, 1]
    assert stages[2].events == ["shutdown 2"]
    assert orchestrator.fatal_error is not None


@pytest.mark.parametrize(
    ("stage_timeout_s", "total_timeout_s", "setting"),
    [(0.02, LIMIT_S, "stage_init_timeout"), (LIMIT_S, 0.02, "init_timeout")],
)
def test_a_slow_start_names_the_limit_that_was_hit(
    stage: FakeStage, stage_timeout_s: float, total_timeout_s: float, setting: str
) -> None:
    stage.gate.clear()
    with pytest.raises(EngineError) as caught:
        make(stage).start(stage_timeout_s=stage_timeout_s, total_timeout_s=total_timeout_s)
    text = str(caught.value)
    assert f"stage 0 was not ready in time ({setting})" in text
    assert f"orchestrator.{setting} (--{setting.replace('_', '-')})" in text
    assert len(stage.timeouts_s) == 1


def test_the_total_limit_holds_over_all_stages() -> None:
    stages = FakeStage(0), FakeStage(1)
    stages[1].gate.clear()
    with pytest.raises(EngineError, match=r"stage 1 was not ready in time \(init_timeout\)"):
        make(*stages).start(stage_timeout_s=LIMIT_S, total_timeout_s=0.05)
