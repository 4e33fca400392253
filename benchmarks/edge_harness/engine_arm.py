"""`AsyncOmni` in one process, timed at what a caller receives. Run by `bench_decode` in a process of its own.

pp<n> is a prompt of n tokens over the time from the call to the first token; tg<n> is n tokens after the first one, of
a prompt of one token, over the time they took.
"""

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.edge_harness.child_events import emit
from benchmarks.edge_harness.decode_work import (
    DECODE_NAME,
    MAX_TOKENS,
    NEW_TOKENS,
    PROMPT_LENGTHS,
    child_parser,
    child_workload,
    prefill_name,
)
from benchmarks.edge_harness.measurement import Workload
from benchmarks.edge_harness.streaming_client import TokenStream
from vllm_omni.errors import EngineError

if TYPE_CHECKING:
    from vllm_omni.entrypoints.async_omni import AsyncOmni

MODULE = "benchmarks.edge_harness.engine_arm"
GREEDY_PROMPT = "The capital of France is"


async def stream(omni: "AsyncOmni", prompt: Any, num_tokens: int) -> tuple[TokenStream, list[int]]:
    """Arrivals and ids of exactly `num_tokens` greedy tokens.

    Raises:
        EngineError: The engine gave another number of tokens.
    """
    from vllm_omni.engine.compat import RequestOutputKind, SamplingParams

    params = SamplingParams(
        temperature=0.0, max_tokens=num_tokens, ignore_eos=True, output_kind=RequestOutputKind.DELTA
    )
    arrivals: list[tuple[int, int]] = []
    ids: list[int] = []
    sent_ns = time.monotonic_ns()
    async for output in omni.generate(prompt, params):
        ids += output.outputs[0].token_ids
        arrivals.append((time.monotonic_ns(), len(ids)))
    if len(ids) != num_tokens:
        raise EngineError(f"{len(ids)} tokens came, asked for were {num_tokens}; such a time compares nothing")
    return TokenStream(sent_ns, tuple(arrivals), 0), ids


async def time_engine(omni: "AsyncOmni", work: Workload) -> dict[str, list[float]]:
    """Tokens a second of each trial; one trial of each kind before is not timed."""
    samples: dict[str, list[float]] = {}
    for length in PROMPT_LENGTHS:
        rates = []
        for trial in range(work.trials + 1):
            prompt = {"prompt_token_ids": work.prompt(0, f"prefill/{length}/{trial}", length)}
            rates.append(length / (await stream(omni, prompt, 1))[0].ttft_s)
        samples[prefill_name(length)] = rates[1:]
    rates = []
    for trial in range(work.trials + 1):
        prompt = {"prompt_token_ids": work.prompt(0, f"decode/{trial}", 1)}
        rates.append((await stream(omni, prompt, NEW_TOKENS + 1))[0].decode_tokens_per_s)
    samples[DECODE_NAME] = rates[1:]
    return samples


def start(args: argparse.Namespace) -> "AsyncOmni":
    """The engine, ready."""
    if args.torch_path:
        _hide_native_core()
    from vllm_omni.entrypoints.async_omni import AsyncOmni

    return AsyncOmni(str(args.model), deploy_profile="edge", num_threads=args.threads, max_model_len=MAX_TOKENS)


def _hide_native_core() -> None:
    """Has this process find no native core, as after an install without a compiler."""
    from vllm_omni.native import library

    library.DEFAULT_PATH = Path(library.DEFAULT_PATH).with_name("hidden_by_benchmark.so")


async def _measure(omni: "AsyncOmni", args: argparse.Namespace) -> None:
    if args.greedy:
        _, ids = await stream(omni, {"prompt": GREEDY_PROMPT}, args.greedy)
        emit("result", token_ids=ids)
    else:
        emit("result", samples=await time_engine(omni, child_workload(args)))


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = child_parser(MODULE)
    parser.add_argument("--torch-path", action="store_true", help="leave the native core out")
    parser.add_argument("--greedy", type=int, default=0, metavar="N", help="time nothing: report N greedy token ids")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Starts the engine, says so, measures, and reports."""
    args = build_parser().parse_args(argv)
    omni = start(args)
    emit("ready", path=omni.describe())
    try:
        asyncio.run(_measure(omni, args))
    finally:
        omni.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
