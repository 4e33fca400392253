"""`Omni`: the engine for synchronous code. One event loop in a thread of its own runs an `AsyncOmni`."""

import asyncio
import queue
import threading
import uuid
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from vllm_omni.entrypoints.async_omni import AsyncOmni, checked_params
from vllm_omni.errors import RequestError, StageError
from vllm_omni.outputs import OmniRequestOutput

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams

Prompt = str | Mapping[str, Any]
THREAD_END_TIMEOUT_S = 5.0


class Omni:
    """Loads a model and generates from lists of prompts. Takes the arguments of `AsyncOmni`.

    Usable as a context manager; `close` frees the engine.

    Raises:
        ConfigError: Configuration is wrong; raised before anything heavy is imported.
        WeightError: The checkpoint is damaged.
        EngineError: The engine could not start.
    """

    def __init__(self, model: str, **arguments: Any):
        self._omni = AsyncOmni(model, **arguments)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="omni-loop", daemon=True)
        self._close_lock = threading.Lock()
        self._thread.start()

    def __enter__(self) -> "Omni":
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: "SamplingParams | None" = None,
        *,
        sampling_params_list: "Sequence[SamplingParams] | None" = None,
        py_generator: bool = False,
        use_tqdm: bool | Callable[..., Any] = True,
    ) -> list[OmniRequestOutput] | Iterator[OmniRequestOutput]:
        """Generates from each prompt.

        Args:
            prompts: One prompt or a sequence: text, `{"prompt": ...}` or `{"prompt_token_ids": ...}`.
            sampling_params: For all prompts; None: the model's defaults. Outputs come once per prompt unless its
                `output_kind` is `DELTA`.
            sampling_params_list: One entry per stage; wins over `sampling_params`.
            py_generator: Return an iterator in order of completion. Closing it aborts what is left.
            use_tqdm: Show a progress bar, or a callable that makes one, in list mode.

        Returns:
            The outputs in the order of the prompts; `request_id` begins with the prompt's index. Or the iterator.

        Raises:
            RequestError: A prompt or its parameters are at fault. Requests that are still running are aborted; the
                engine lives on.
        """
        batch = _as_batch(prompts)
        params = self._resolve_params(sampling_params, sampling_params_list)
        outputs = self._stream(batch, params)
        if py_generator:
            return outputs
        return sorted(_with_progress(outputs, len(batch), use_tqdm), key=lambda output: _index(output.request_id))

    def abort(self, request_id: str | Iterable[str]) -> None:
        """Stops requests; their outputs end with finish reason `abort`. Unknown ids are ignored."""
        self._run(self._omni.abort(request_id))

    def check_health(self) -> None:
        """Returns when the engine can serve; raises StageError otherwise."""
        self._run(self._omni.check_health())

    @property
    def default_sampling_params_list(self) -> "list[SamplingParams]":
        """What each stage samples with when nothing else is given."""
        return self._omni.default_sampling_params_list

    def get_tokenizer(self) -> Any:
        """The tokenizer of the stage that owns one."""
        return self._omni.get_tokenizer()

    def shutdown(self, timeout: float | None = None) -> None:
        """Frees the engine and ends the thread; whoever waits for an output receives an error. Idempotent."""
        with self._close_lock:
            if self._loop.is_closed():
                return
            self._omni.shutdown(timeout)
            asyncio.run_coroutine_threadsafe(_end_tasks(), self._loop).result(THREAD_END_TIMEOUT_S)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(THREAD_END_TIMEOUT_S)
            self._loop.close()

    close = shutdown

    def _run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return self._schedule(coroutine).result()

    def _schedule(self, coroutine: Coroutine[Any, Any, Any]) -> "Future[Any]":
        """Starts a coroutine on the loop's thread; raises StageError when it has ended."""
        try:
            return asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        except RuntimeError as error:
            coroutine.close()
            raise StageError("the engine has been shut down") from error

    def _resolve_params(
        self, single: "SamplingParams | None", per_stage: "Sequence[SamplingParams] | None"
    ) -> "list[SamplingParams]":
        from vllm_omni.engine.compat import RequestOutputKind

        given = list(per_stage) if per_stage is not None else [single or self.default_sampling_params_list[0]]
        params = [checked_params(entry).clone() for entry in given]
        for entry in params:
            if entry.output_kind is not RequestOutputKind.DELTA:
                entry.output_kind = RequestOutputKind.FINAL_ONLY
        return params

    def _stream(self, batch: Sequence[Prompt], params: "list[SamplingParams]") -> Iterator[OmniRequestOutput]:
        """Outputs in order of completion, handed over from the loop's thread."""
        results: queue.SimpleQueue[OmniRequestOutput | BaseException | None] = queue.SimpleQueue()
        task = self._schedule(self._run_batch(batch, params, results))
        try:
            while (result := results.get()) is not None:
                if isinstance(result, BaseException):
                    raise result
                yield result
        finally:
            task.cancel()

    async def _run_batch(self, batch: Sequence[Prompt], params: "list[SamplingParams]", results: Any) -> None:
        """Runs all prompts, at most as many at a time as the engine admits."""
        slots = asyncio.Semaphore(max(1, self._omni.max_requests // params[0].n))

        async def run_one(index: int, prompt: Prompt) -> None:
            async with (
                slots,
                aclosing(
                    self._omni.generate(prompt, None, f"{index}_{uuid.uuid4()}", sampling_params_list=params)
                ) as outputs,
            ):
                async for output in outputs:
                    results.put(output)

        try:
            async with asyncio.TaskGroup() as group:
                for index, prompt in enumerate(batch):
                    group.create_task(run_one(index, prompt))
        except BaseExceptionGroup as error:
            results.put(error.exceptions[0])
        except asyncio.CancelledError:
            # By the reader, who is gone, or by `shutdown`, whom a reader waits for.
            results.put(StageError("the engine has been shut down"))
            raise
        finally:
            results.put(None)


async def _end_tasks() -> None:
    """Cancels every other task of this loop and waits for them."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _as_batch(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    batch = [prompts] if isinstance(prompts, (str, Mapping)) else list(prompts)
    for index, prompt in enumerate(batch):
        if not isinstance(prompt, (str, Mapping)):
            raise RequestError(
                f"prompts[{index}] is {type(prompt).__name__}; accepted: text, {{'prompt': ...}} or "
                "{'prompt_token_ids': [...]} (a list is a batch of prompts, not a list of token ids)"
            )
    return batch


def _with_progress(
    outputs: Iterator[OmniRequestOutput], total: int, use_tqdm: bool | Callable[..., Any]
) -> Iterator[OmniRequestOutput]:
    if not use_tqdm:
        yield from outputs
        return
    from tqdm import tqdm

    make_bar = use_tqdm if callable(use_tqdm) else tqdm
    with make_bar(total=total, desc="Processed prompts") as bar:
        for output in outputs:
            yield output
            if output.finished:
                bar.update(1)


def _index(request_id: str) -> int:
    return int(request_id.partition("_")[0])
