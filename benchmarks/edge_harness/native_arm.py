"""The native core alone, timed as `llama-bench` times llama.cpp. Run by `bench_decode` in a process of its own.

pp<n> is one step of n rows and the logits of the last; tg<n> is n steps of one row from an empty cache, each with its
logits, of which the largest is the next token. tg<n>_d<m> are the steps that follow a prompt of m tokens.
"""

import sys
import time
from collections.abc import Sequence

import numpy as np

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
from benchmarks.edge_harness.native_model import NativeModel

MODULE = "benchmarks.edge_harness.native_arm"


def time_native(model: NativeModel, work: Workload) -> dict[str, list[float]]:
    """Tokens a second of each trial; one trial of each kind before is not timed, of depths one short prompt."""
    if work.depths:
        return _time_depths(model, work)
    samples: dict[str, list[float]] = {}
    for length in PROMPT_LENGTHS:
        prompts = [work.prompt(0, f"prefill/{length}/{trial}", length) for trial in range(work.trials + 1)]
        samples[prefill_name(length)] = [_prefill_rate(model, prompt) for prompt in prompts][1:]
    firsts = [work.prompt(0, f"decode/{trial}", 1)[0] for trial in range(work.trials + 1)]
    samples[DECODE_NAME] = [_decode_rate(model, first) for first in firsts][1:]
    return samples


def _time_depths(model: NativeModel, work: Workload) -> dict[str, list[float]]:
    samples: dict[str, list[float]] = {}
    _prefill_rate(model, warm_up_prompt(work))
    for depth, prompt in depth_prompts(work):
        prefill = _prefill_rate(model, prompt)
        add_depth(samples, depth, prefill, _decode_rate(model, prompt[-1], depth))
    return samples


def _prefill_rate(model: NativeModel, prompt: Sequence[int]) -> float:
    ids = np.array(prompt, np.int32)
    begin_ns = time.perf_counter_ns()
    model.logits(model.prefill(ids)[-1:])
    return len(prompt) * 1e9 / (time.perf_counter_ns() - begin_ns)


def _decode_rate(model: NativeModel, token_id: int, begin: int = 0) -> float:
    begin_ns = time.perf_counter_ns()
    for position in range(begin, begin + NEW_TOKENS):
        token_id = int(model.logits(model.decode(token_id, position)).argmax())
    return NEW_TOKENS * 1e9 / (time.perf_counter_ns() - begin_ns)


def main(argv: Sequence[str] | None = None) -> int:
    """Loads, says so, measures, and reports."""
    args = child_parser(MODULE).parse_args(argv)
    work = child_workload(args)
    with NativeModel(args.model, args.threads, max_tokens(work), kv_kind=args.kv) as model:
        model.logits(model.decode(0, 0))
        emit("ready", path=f"native {model.team.isa}, {model.team.num_threads} threads")
        emit("result", samples=time_native(model, work))
    return 0


if __name__ == "__main__":
    sys.exit(main())
