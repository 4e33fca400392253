"""What every arm of `bench_decode` is timed on: the tests of `llama-bench`, by its names."""

import argparse
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.edge_harness.measurement import Workload

PROMPT_LENGTHS = (128, 512)
NEW_TOKENS = 64
# Prompt, new tokens and room.
MAX_TOKENS = 1024
DECODE_NAME = f"tg{NEW_TOKENS}_tok_s"


def prefill_name(num_tokens: int) -> str:
    """Metric of a prompt of `num_tokens`."""
    return f"pp{num_tokens}_tok_s"


def medians(samples: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """The median of each metric."""
    return {name: statistics.median(values) for name, values in samples.items()}


def child_parser(module: str) -> argparse.ArgumentParser:
    """The command line that the arms of this package share."""
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description="One arm of bench_decode, in a process.")
    parser.add_argument("--model", type=Path, required=True, help="artifact directory")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--trials", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--vocab-size", type=int, required=True)
    return parser


def child_words(model: Path, threads: int, work: Workload) -> list[str]:
    """The words for `child_parser`."""
    flags = {"--model": model, "--threads": threads, "--trials": work.trials, "--seed": work.seed}
    flags["--vocab-size"] = work.vocab_size
    return [str(word) for pair in flags.items() for word in pair]


def child_workload(args: argparse.Namespace) -> Workload:
    """What `child_words` was given."""
    return Workload(args.seed, args.trials, 1, args.vocab_size)
