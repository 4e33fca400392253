"""llama.cpp's own benchmark as an arm: its command, and what its JSON says."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.edge_harness.decode_work import NEW_TOKENS, PROMPT_LENGTHS, prefill_name
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


def timing_command(program: Path, gguf: Path, threads: int, trials: int) -> list[str]:
    """Times prompts and decoding; the program warms up before each test by itself."""
    lengths = ",".join(str(length) for length in PROMPT_LENGTHS)
    return _command(program, gguf, threads, ["-p", lengths, "-n", str(NEW_TOKENS), "-r", str(trials)])


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
        samples = {_metric(entry["n_prompt"], entry["n_gen"]): list(entry["samples_ts"]) for entry in entries}
        first = entries[0]
        return LlamaBenchReport(
            samples=samples,
            seconds=sum(sum(entry["samples_ns"]) for entry in entries) / 1e9,
            weight_bytes=int(first["model_size"]),
            build={key: first.get(key) for key in ("build_number", "build_commit", "backends", "type_k", "type_v")},
        )
    except (ValueError, LookupError, TypeError) as error:
        raise EngineError(f"llama-bench reported {text[:500]!r}, expected a list of tests as JSON") from error


def _metric(num_prompt: int, num_new: int) -> str:
    return prefill_name(num_prompt) if num_prompt else f"tg{num_new}_tok_s"
