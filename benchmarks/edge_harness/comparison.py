"""Runs the rounds of a comparison: start a server, measure it, stop it, then the next one. Never two at once."""

import contextlib
import json
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.edge_harness.arms import Arm, Settings, cache_environment, free_port, server_command
from benchmarks.edge_harness.measurement import Measurement, Workload, measure
from benchmarks.edge_harness.report import summarize
from benchmarks.edge_harness.server_process import ServerProcess
from benchmarks.edge_harness.streaming_client import fetch_text

# Lines of a server's output that tell which path ran; they are kept in the raw results.
LOG_MARKS = ("event=", "Initializing a V1 LLM engine", "backend", "Torch threads", "THREADS_BIND", "KV cache size")


@dataclass(frozen=True)
class Plan:
    """What a run does.

    Attributes:
        arms: Servers, in the order in which they take turns.
        rounds: Turns of each.
        is_cold: Also time a start with empty caches before each measured start.
        ready_timeout_s: Bound on one start.
        python: Interpreter of the installation that runs both servers.
    """

    arms: Sequence[Arm]
    settings: Settings
    workload: Workload
    rounds: int
    is_cold: bool
    ready_timeout_s: float
    python: Path


class Comparison:
    """One run and what it gave so far.

    Args:
        plan: What to do.
        facts: Provenance and settings, written beside the results.
        scratch: Empty directory for logs and caches.
        out: File for raw results, rewritten after every measurement; None keeps them in memory only.
    """

    def __init__(self, plan: Plan, facts: Mapping[str, Any], scratch: Path, out: Path | None):
        self.plan = plan
        self.facts = facts
        self.scratch = scratch
        self.out = out
        self.measurements: dict[str, list[Measurement]] = {arm.name: [] for arm in plan.arms}

    def run(self) -> None:
        """Runs every round.

        Raises:
            EngineError: A server did not start, answered wrongly or failed; `out` holds what was measured before.
        """
        self._save(is_complete=False)
        for number in range(1, self.plan.rounds + 1):
            for arm in self.plan.arms:
                self.measurements[arm.name].append(self._measure(arm, number))
                self._save(is_complete=False)
        self._save(is_complete=True)

    def rounds(self) -> dict[str, list[dict[str, float]]]:
        """Arm to the values of its rounds."""
        return {name: [found.values for found in measured] for name, measured in self.measurements.items()}

    def _measure(self, arm: Arm, number: int) -> Measurement:
        name = f"{arm.name}-{number}"
        if not self.plan.is_cold:
            return self._measure_warm(arm, arm.environment, name, number)
        with tempfile.TemporaryDirectory(prefix="caches-", dir=self.scratch) as caches:
            environment = {**arm.environment, **cache_environment(Path(caches))}
            with self._server(arm, environment, f"{name}-cold") as (_, cold_ready_s):
                pass
            result = self._measure_warm(arm, environment, name, number)
        result.values["cold_ready_s"] = cold_ready_s
        return result

    def _measure_warm(self, arm: Arm, environment: Mapping[str, str], name: str, number: int) -> Measurement:
        load_average = os.getloadavg()[0]
        with self._server(arm, environment, name) as (server, ready_s):
            say(f"{name}: measuring")
            result = measure(server, self.plan.workload, number)
            result.notes["load_average_1_min_before"] = load_average
            result.notes["health"] = fetch_text(server.port, arm.ready_path)
            result.notes["log"] = path_lines(server.log_text())
        result.values["ready_s"] = ready_s
        return result

    @contextlib.contextmanager
    def _server(self, arm: Arm, environment: Mapping[str, str], name: str) -> Iterator[tuple[ServerProcess, float]]:
        """A ready server and the seconds that took; it is stopped in the end."""
        port = free_port()
        command = server_command(arm, self.plan.settings, port, self.plan.python)
        directory = self.scratch / name
        directory.mkdir()
        say(f"{name}: starting; stock vLLM may take minutes: {shlex.join(command)}")
        with ServerProcess(command, environment, port, directory / "log.txt") as server:
            ready_s = server.wait_ready(arm.ready_path, self.plan.ready_timeout_s)
            say(f"{name}: ready after {ready_s:.1f} s")
            yield server, ready_s
            say(f"{name}: stopping")
        if server.killed:
            say(f"{name}: did not stop by itself; killed: {', '.join(server.killed)}")

    def _save(self, *, is_complete: bool) -> None:
        if self.out is None:
            return
        raw = {name: [asdict(found) for found in measured] for name, measured in self.measurements.items()}
        results = {**self.facts, "is_complete": is_complete, "summary": summarize(self.rounds()), "rounds": raw}
        self.out.write_text(json.dumps(results, indent=1) + "\n")


def path_lines(log: str) -> list[str]:
    """The lines of a server's output that tell which path ran."""
    return [line for line in log.splitlines() if any(mark in line for mark in LOG_MARKS)]


def say(text: str) -> None:
    """One line of progress on stderr."""
    print(time.strftime("%H:%M:%S"), text, file=sys.stderr, flush=True)
