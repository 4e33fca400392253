"""llama.cpp's programs that quantize a file and judge it against a base: their commands and what they print."""

import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from benchmarks.edge_harness.kl_statistics import Fidelity
from benchmarks.edge_harness.watched_process import run_watched
from vllm_omni.errors import ConfigError, EngineError

TIMEOUT_S = 7200.0
NUMBER = r"\s*(-?[\d.]+|nan|inf)"
WITH_ERROR = NUMBER + r"\s*±" + NUMBER
# What is read from `llama-perplexity --kl-divergence`: fields of `Fidelity` in the order of a line's numbers.
LINES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        r"Mean PPL\(Q\)\s*:" + WITH_ERROR: ("perplexity", "perplexity_error"),
        r"Mean PPL\(base\)\s*:" + NUMBER: ("base_perplexity",),
        r"Mean\s+KLD:" + WITH_ERROR: ("mean_kl", "mean_kl_error"),
        r"99\.0%\s+KLD:" + NUMBER: ("p99_kl",),
        r"Same top p:" + WITH_ERROR: ("same_top_percent", "same_top_error"),
    }
)


def tool(directory: Path, name: str) -> Path:
    """A program of a llama.cpp build.

    Raises:
        ConfigError: It is not there.
    """
    path = directory / name
    if not path.is_file():
        raise ConfigError(f"{path} does not exist; build it with benchmarks/edge_harness/build_llama_cpp.sh")
    return path


def quantize_command(program: Path, source: Path, out: Path, mix: str, threads: int) -> list[str]:
    """Makes `out` of a float file in one of llama.cpp's types, without an importance matrix."""
    return [str(program), str(source), str(out), mix, str(threads)]


def fidelity_command(program: Path, gguf: Path, base: Path, chunk_tokens: int, threads: int) -> list[str]:
    """Judges a file; tokens come from the base file, a chunk is one batch."""
    words = {"-m": gguf, "--kl-divergence-base": base, "-c": chunk_tokens, "-b": chunk_tokens, "-t": threads}
    return [str(program), "--kl-divergence", *(str(word) for pair in words.items() for word in pair)]


def quantize_gguf(command: list[str], log: Path) -> None:
    """Runs `quantize_command`; the file appears under its name when it is complete."""
    out = Path(command[2])
    partial = out.with_name(out.name + ".partial")
    run_watched([*command[:2], str(partial), *command[3:]], log, TIMEOUT_S)
    partial.rename(out)


def judge_gguf(command: list[str], log: Path, num_tokens: int) -> Fidelity:
    """Runs `fidelity_command` on a base of `num_tokens` scored tokens and reads its numbers."""
    run = run_watched(command, log, TIMEOUT_S)
    return parse_fidelity(run.stdout + log.read_text(errors="replace"), num_tokens)


def parse_fidelity(text: str, num_tokens: int) -> Fidelity:
    """The numbers in what `llama-perplexity --kl-divergence` prints.

    Raises:
        EngineError: One is missing.
    """
    values: dict[str, float] = {}
    for pattern, names in LINES.items():
        match = re.search(pattern, text)
        if match is None:
            raise EngineError(f"llama-perplexity printed no line like {pattern!r}; the end of it: {text[-1000:]}")
        values |= {name: float(number) for name, number in zip(names, match.groups(), strict=True)}
    return Fidelity(num_tokens=num_tokens, **values)
