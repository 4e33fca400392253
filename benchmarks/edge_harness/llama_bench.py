"""llama.cpp's own benchmark as an arm: its command, and what its JSON says."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.edge_harness.decode_work import NEW_TOKENS, decode_name, prefill_name, prompt_lengths
from benchmarks.edge_harness.measurement import Workload
from vllm_omni.errors import EngineError


@dataclass(frozen=True)
class LlamaBenchReport:
    """What one run of `llama-bench` reported.

    Attributes:
        samples: Metric to tokens a second of each repetition.
        seconds: Time of all timed repetitions together.
        weight_bytes: Bytes of all tensors of the model.
        build: Version of llama.cpp, and the types of weights and cache that it ran with.
    """

    samples: dict[str, list[float]]
    seconds: float
    weight_bytes: int
    build: dict[str, object]


def timing_commands(program: Path, gguf: Path, threads: int, work: Workload) -> list[list[str]]:
    """Time prompts and decoding; the program warms up before each test by itself."""
    lengths = ",".join(str(length) for length in prompt_lengths(work))
    new, trials = ["-n", str(NEW_TOKENS)], ["-r", str(work.trials)]
    if not work.depths:
        return [_command(program, gguf, threads, ["-p", lengths, *new, *trials])]
    tests = (["-p", lengths, "-n", "0", *trials], ["-p", "0", *new, "-d", lengths, *trials])
    return [_command(program, gguf, threads, test) for test in tests]


def load_command(program: Path, gguf: Path, threads: int) -> list[str]:
    """Loads the model, decodes one token and ends: its time without that token is the load's."""
    return _command(program, gguf, threads, ["-p", "0", "-n", "1", "-r", "1", "--no-warmup"])


def _command(program: Path, gguf: Path, threads: int, tests: Sequence[str]) -> list[str]:
    return [str(program), "-m", str(gguf), "-t", str(threads), *tests, "-o", "json"]


def parse_report(text: str) -> LlamaBenchReport:
    """The report of `-o json`.

    Raises:
        EngineError: It is not such a report.
    """
    try:
        entries = json.loads(text)
        samples = {_metric(entry): list(entry["samples_ts"]) for entry in entries}
        first = entries[0]
        return LlamaBenchReport(
            samples=samples,
            seconds=sum(sum(entry["samples_ns"]) for entry in entries) / 1e9,
            weight_bytes=int(first["model_size"]),
            build={key: first.get(key) for key in ("build_number", "build_commit", "backends", "type_k", "type_v")},
        )
    except (ValueError, LookupError, TypeError) as error:
        raise EngineError(f"llama-bench reported {text[:500]!r}, expected a list of tests as JSON") from error


def _metric(entry: Mapping[str, Any]) -> str:
    if entry["n_prompt"]:
        return prefill_name(entry["n_prompt"])
    depth = entry.get("n_depth", 0)
    return decode_name(depth) if entry["n_gen"] == NEW_TOKENS else f"tg{entry['n_gen']}_tok_s"
