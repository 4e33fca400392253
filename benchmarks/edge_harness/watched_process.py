"""Runs one program to its end and watches the memory that it allocates. Its output goes to files."""

import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.edge_harness.process_tree import PROC, parse_rss_anon
from benchmarks.edge_harness.provenance import REPOSITORY
from vllm_omni import envs
from vllm_omni.errors import EngineError

# A look costs about 50 us, so that watching takes a thousandth of one core.
SAMPLE_S = 0.05
TAIL_LINES = 20


@dataclass(frozen=True)
class WatchedRun:
    """A program that has ended well.

    Attributes:
        started_ns: Monotonic clock before it was started.
        elapsed_s: From then to its end.
        peak_rss_anon_bytes: The most `RssAnon` that was seen, looked at every `SAMPLE_S`; children are not counted.
        stdout: What it wrote there.
    """

    started_ns: int
    elapsed_s: float
    peak_rss_anon_bytes: int
    stdout: str


def run_watched(
    command: Sequence[str], log: Path, timeout_s: float, environment: Mapping[str, str] | None = None
) -> WatchedRun:
    """Runs `command` in the root of the repository.

    Args:
        command: Program and arguments.
        log: Takes its stderr; its stdout goes beside, with the suffix `.out`.
        timeout_s: It is killed after that.
        environment: Variables set in addition to the inherited ones.

    Raises:
        EngineError: It ended with another code than 0, was killed by a signal, or took too long.
    """
    out = log.with_suffix(".out")
    extra = environment or {}
    started_ns = time.monotonic_ns()
    with log.open("wb") as stderr, out.open("wb") as stdout, envs.kept(extra):
        envs.export(extra)
        process = subprocess.Popen(command, stdout=stdout, stderr=stderr, cwd=REPOSITORY)
    peak_bytes = _watch(process, started_ns, timeout_s)
    elapsed_s = (time.monotonic_ns() - started_ns) / 1e9
    if process.returncode != 0:
        reason = f"ended with code {process.returncode}"
        if elapsed_s > timeout_s:
            reason = f"was killed after {timeout_s:.0f} s"
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-TAIL_LINES:])
        raise EngineError(f"{command[0]} {reason}; all of its output is in {log.parent}; the end of it:\n{tail}")
    return WatchedRun(started_ns, elapsed_s, peak_bytes, out.read_text(errors="replace"))


def _watch(process: subprocess.Popen[bytes], started_ns: int, timeout_s: float) -> int:
    """Waits for the end, kills it when it is late or this program is interrupted; the most `RssAnon` seen."""
    peak_bytes = 0
    try:
        while process.poll() is None:
            peak_bytes = max(peak_bytes, _rss_anon_bytes(process.pid))
            if (time.monotonic_ns() - started_ns) / 1e9 > timeout_s:
                process.kill()
            time.sleep(SAMPLE_S)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
    return peak_bytes


def _rss_anon_bytes(pid: int) -> int:
    """`RssAnon` of a child that was not waited for yet; 0 when it is about to end and has given its memory back."""
    return parse_rss_anon((PROC / str(pid) / "status").read_text()) or 0
