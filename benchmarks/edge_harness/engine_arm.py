"""`AsyncOmni` in one process, timed at what a caller receives. Run by `bench_decode` in a process of its own.

pp<n> is a prompt of n tokens over the time from the call to the first token; tg<n> is n tokens after the first one, of
a prompt of one token, over the time they took. tg<n>_d<m> are the tokens that follow a prompt of m tokens.
"""

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.edge_harness.child_events import emit
from benchmarks.edge_harness.decode_work import (
    DECODE_NAME,
    NEW_TOKENS,
    PROMPT_LENGTHS,
    add_depth,
    child_parser,
    child_workload,
    depth_prompts,
    max_tokens,
    prefill_name,
    warm_up_prompt,
)
from benchmarks.edge_harness.measurement import Workload
from benchmarks.edge_harness.native_model import cache_bytes
from benchmarks.edge_harness.score_check import Scores, parse_ids
from benchmarks.edge_harness.streaming_client import TokenStream
from vllm_omni.errors import EngineError

if TYPE_CHECKING:
    from vllm_omni.entrypoints.async_omni import AsyncOmni

MODULE = "benchmarks.edge_harness.engine_arm"
SCORED_TEXT = (
    "A mill stood by the river below the village, and its wheel turned from early spring until the frost. Farmers "
    "brought their grain in carts, waited in the shade of the chestnut trees, and talked about the price of flour, the "
    "weather of the past week, and the new bridge that the council had promised them for as long as they knew."
)
SCORED_NEW_TOKENS = 32


async def stream(omni: "AsyncOmni", prompt: Any, num_tokens: int) -> TokenStream:
    """Arrivals of exactly `num_tokens` greedy tokens.

    Raises:
        EngineError: The engine gave another number of tokens.
    """
    from vllm_omni.engine.compat import RequestOutputKind, SamplingParams

    params = SamplingParams(
        temperature=0.0, max_tokens=num_tokens, ignore_eos=True, output_kind=RequestOutputKind.DELTA
    )
    arrivals: list[tuple[int, int]] = []
    count = 0
    sent_ns = time.monotonic_ns()
    async for output in omni.generate(prompt, params):
        count += len(output.outputs[0].token_ids)
        arrivals.append((time.monotonic_ns(), count))
    if count != num_tokens:
        raise EngineError(f"{count} tokens came, asked for were {num_tokens}; such a time compares nothing")
    return TokenStream(sent_ns, tuple(arrivals), 0)


async def score(omni: "AsyncOmni", prompt: Any, num_new_tokens: int) -> Scores:
    """Log-probabilities of a prompt, and of greedy tokens that the engine adds to it one by one."""
    from vllm_omni.engine.compat import RequestOutputKind, SamplingParams

    params = SamplingParams(
        temperature=0.0, max_tokens=max(num_new_tokens, 1), ignore_eos=True, logprobs=0, prompt_logprobs=0,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )  # fmt: skip
    (output,) = [output async for output in omni.generate(prompt, params)]
    added = list(output.outputs[0].token_ids)[:num_new_tokens]
    entries = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs[:num_new_tokens]]
    ids = [*output.prompt_token_ids, *added]
    logprobs = [entry[token_id].logprob for entry, token_id in zip(entries, ids[1:], strict=True)]
    return Scores(tuple(ids), tuple(logprobs))


async def time_engine(omni: "AsyncOmni", work: Workload) -> dict[str, list[float]]:
    """Tokens a second of each trial; one trial of each kind before is not timed."""
    if work.depths:
        return await _time_depths(omni, work)
    samples: dict[str, list[float]] = {}
    for length in PROMPT_LENGTHS:
        rates = []
        for trial in range(work.trials + 1):
            prompt = {"prompt_token_ids": work.prompt(0, f"prefill/{length}/{trial}", length)}
            rates.append(length / (await stream(omni, prompt, 1)).ttft_s)
        samples[prefill_name(length)] = rates[1:]
    rates = []
    for trial in range(work.trials + 1):
        prompt = {"prompt_token_ids": work.prompt(0, f"decode/{trial}", 1)}
        rates.append((await stream(omni, prompt, NEW_TOKENS + 1)).decode_tokens_per_s)
    samples[DECODE_NAME] = rates[1:]
    return samples


async def _time_depths(omni: "AsyncOmni", work: Workload) -> dict[str, list[float]]:
    """One request of each trial gives both figures of a depth; one short prompt before is not timed."""
    samples: dict[str, list[float]] = {}
    await stream(omni, {"prompt_token_ids": warm_up_prompt(work)}, 1)
    for depth, prompt in depth_prompts(work):
        arrivals = await stream(omni, {"prompt_token_ids": prompt}, NEW_TOKENS + 1)
        add_depth(samples, depth, depth / arrivals.ttft_s, arrivals.decode_tokens_per_s)
    return samples


def start(args: argparse.Namespace) -> "AsyncOmni":
    """The engine, ready."""
    if args.torch_path:
        _hide_native_core()
    from vllm_omni.entrypoints.async_omni import AsyncOmni

    length = max_tokens(child_workload(args))
    options: dict[str, Any] = {"kv_cache_dtype": "int8"} if args.kv == "int8" else {}
    if args.depths:
        options["kv_cache_memory_bytes"] = cache_bytes(args.model, length, args.kv)
    return AsyncOmni(str(args.model), deploy_profile="edge", num_threads=args.threads, max_model_len=length, **options)


def _hide_native_core() -> None:
    """Has this process find no native core, as after an install without a compiler."""
    from vllm_omni.native import library

    # An arm that is forced by name must exist.
    os.environ.pop("VLLM_OMNI_NATIVE_ISA", None)
    library.DEFAULT_PATH = Path(library.DEFAULT_PATH).with_name("hidden_by_benchmark.so")


async def _measure(omni: "AsyncOmni", args: argparse.Namespace) -> None:
    if args.score:
        found = await score(omni, {"prompt": SCORED_TEXT}, SCORED_NEW_TOKENS)
        emit("result", token_ids=found.token_ids, logprobs=found.logprobs)
    elif args.score_ids:
        found = await score(omni, {"prompt_token_ids": args.score_ids}, 0)
        emit("result", token_ids=found.token_ids, logprobs=found.logprobs)
    else:
        emit("result", samples=await time_engine(omni, child_workload(args)))


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = child_parser(MODULE)
    parser.add_argument("--torch-path", action="store_true", help="leave the native core out")
    scored = parser.add_mutually_exclusive_group()
    scored.add_argument(
        "--score", action="store_true", help="time nothing: log-probabilities of a text and of greedy tokens after it"
    )
    scored.add_argument("--score-ids", type=parse_ids, metavar="IDS", help="the same of these tokens, separated by ','")
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
