"""What every arm of `bench_decode` is timed on: the tests of `llama-bench`, by its names."""

import argparse
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks.edge_harness.measurement import Measurement, Workload
from vllm_omni.native.spec import KV_KINDS

PROMPT_LENGTHS = (128, 512)
NEW_TOKENS = 64
# Prompt, new tokens and room, where no depths are asked for.
MAX_TOKENS = 1024
DECODE_NAME = f"tg{NEW_TOKENS}_tok_s"
# Before depths are timed, one prompt of so many tokens is not.
WARM_UP_TOKENS = 128
GIGA = 1e9


def prefill_name(num_tokens: int) -> str:
    """Metric of a prompt of `num_tokens`."""
    return f"pp{num_tokens}_tok_s"


def decode_name(depth: int) -> str:
    """Metric of `NEW_TOKENS` tokens that follow a context of `depth` tokens."""
    return f"tg{NEW_TOKENS}_d{depth}_tok_s" if depth else DECODE_NAME


def prompt_lengths(work: Workload) -> tuple[int, ...]:
    """Lengths of the prompts that are timed."""
    return work.depths or PROMPT_LENGTHS


def decode_depths(work: Workload) -> tuple[int, ...]:
    """Lengths of context that decode is timed at."""
    return work.depths or (0,)


def warm_up_prompt(work: Workload) -> list[int]:
    """What is sent before depths are timed."""
    return work.prompt(0, "depth/warm-up", WARM_UP_TOKENS)


def depth_prompts(work: Workload) -> Iterator[tuple[int, list[int]]]:
    """Each depth with a prompt of so many tokens for each trial, the same for every arm."""
    for depth in work.depths:
        for trial in range(work.trials):
            yield depth, work.prompt(0, f"depth/{depth}/{trial}", depth)


def add_depth(samples: dict[str, list[float]], depth: int, prefill: float, decode: float) -> None:
    """Adds the tokens a second of one trial at a depth."""
    samples.setdefault(prefill_name(depth), []).append(prefill)
    samples.setdefault(decode_name(depth), []).append(decode)


def max_tokens(work: Workload) -> int:
    """Longest sequence: prompt, new tokens and room."""
    return max(work.depths) + MAX_TOKENS // 4 if work.depths else MAX_TOKENS


def medians(samples: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """The median of each metric."""
    return {name: statistics.median(values) for name, values in samples.items()}


def add_weight_rate(found: Measurement, weight_bytes: int) -> None:
    """Adds what decode from an empty context reads of the weights, in GB/s, where it was timed."""
    if DECODE_NAME in found.values:
        found.values["decode_gb_s"] = found.values[DECODE_NAME] * weight_bytes / GIGA


def child_parser(module: str) -> argparse.ArgumentParser:
    """The command line that the arms of this package share."""
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description="One arm of bench_decode, in a process.")
    parser.add_argument("--model", type=Path, required=True, help="artifact directory")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--trials", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--vocab-size", type=int, required=True)
    parser.add_argument("--depths", type=parse_depths, default=())
    parser.add_argument("--kv", choices=KV_KINDS, default=KV_KINDS[0])
    return parser


def child_words(model: Path, threads: int, work: Workload) -> list[str]:
    """The words for `child_parser`."""
    flags = {"--model": model, "--threads": threads, "--trials": work.trials, "--seed": work.seed}
    flags["--vocab-size"] = work.vocab_size
    if work.depths:
        flags["--depths"] = ",".join(map(str, work.depths))
    return [str(word) for pair in flags.items() for word in pair]


def child_workload(args: argparse.Namespace) -> Workload:
    """What `child_words` was given."""
    return Workload(args.seed, args.trials, 1, args.vocab_size, args.depths)


def parse_depths(text: str) -> tuple[int, ...]:
    """Lengths of context, separated by commas, each once and rising.

    Raises:
        argparse.ArgumentTypeError: They are not.
    """
    try:
        depths = tuple(int(word) for word in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: whole numbers separated by commas, such as 512,4096") from error
    if depths[0] < 1 or list(depths) != sorted(set(depths)):
        raise argparse.ArgumentTypeError(f"{text!r}: lengths of 1 or more, each once, in rising order")
    return depths
