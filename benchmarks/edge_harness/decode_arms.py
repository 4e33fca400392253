"""The arms of `bench_decode`: each is a program run to its end, that gives the same metrics."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from benchmarks.edge_harness import engine_arm, llama_bench, native_arm
from benchmarks.edge_harness.child_events import parse_events
from benchmarks.edge_harness.decode_work import DECODE_NAME, child_words, medians
from benchmarks.edge_harness.measurement import MIB, Measurement, Workload
from benchmarks.edge_harness.watched_process import WatchedRun, run_watched
from vllm_omni.errors import EngineError

TIMEOUT_S = 1800.0
GIGA = 1e9


class DecodeArm(Protocol):
    """Something that decodes the same model."""

    @property
    def name(self) -> str: ...

    def commands(self, work: Workload) -> list[list[str]]:
        """What is run, in order."""
        ...

    def measure(self, work: Workload, directory: Path) -> Measurement:
        """Runs it once; output goes to `directory`."""
        ...


@dataclass(frozen=True)
class OmniArm:
    """This package, by one of the modules that run it in a process of their own.

    Attributes:
        name: Of the arm: `native` or `engine`.
        module: What to run.
        model: Artifact.
        threads: Threads that compute.
        weight_bytes: Bytes of weights that a decoded token reads.
    """

    name: str
    module: str
    model: Path
    threads: int
    weight_bytes: int

    def commands(self, work: Workload) -> list[list[str]]:
        return [[sys.executable, "-m", self.module, *child_words(self.model, self.threads, work)]]

    def measure(self, work: Workload, directory: Path) -> Measurement:
        run = run_watched(self.commands(work)[0], directory / f"{self.name}.log", TIMEOUT_S)
        events = parse_events(run.stdout.splitlines())
        ready, result = events["ready"], events["result"]
        found = _measurement(run, result["samples"], self.weight_bytes)
        found.values["ready_s"] = (ready["monotonic_ns"] - run.started_ns) / 1e9
        found.values["rss_anon_ready_mib"] = ready["rss_anon_bytes"] / MIB
        found.notes["path"] = ready["path"]
        return found


@dataclass(frozen=True)
class LlamaArm:
    """`llama-bench` on one file.

    Attributes:
        name: Of the arm: `llama Q4_0` and so on.
        program: `llama-bench`.
        gguf: The model.
        threads: Threads that compute.
    """

    name: str
    program: Path
    gguf: Path
    threads: int

    def commands(self, work: Workload) -> list[list[str]]:
        return [
            llama_bench.load_command(self.program, self.gguf, self.threads),
            llama_bench.timing_command(self.program, self.gguf, self.threads, work.trials),
        ]

    def measure(self, work: Workload, directory: Path) -> Measurement:
        label = self.name.replace(" ", "-")
        load, timing = (
            run_watched(command, directory / f"{label}-{number}.log", TIMEOUT_S)
            for number, command in enumerate(self.commands(work))
        )
        report = llama_bench.parse_report(timing.stdout)
        found = _measurement(timing, report.samples, report.weight_bytes)
        found.values["ready_s"] = load.elapsed_s - llama_bench.parse_report(load.stdout).seconds
        found.notes["path"] = report.build
        return found


def omni_arms(model: Path, threads: int, weight_bytes: int, names: Sequence[str]) -> list[DecodeArm]:
    """The arms of this package among `names`."""
    modules = {"native": native_arm.MODULE, "engine": engine_arm.MODULE}
    return [OmniArm(name, modules[name], model, threads, weight_bytes) for name in names if name in modules]


def greedy_tokens(model: Path, threads: int, count: int, directory: Path, *, torch_path: bool) -> list[int]:
    """Greedy token ids of the engine, on the native core or without it."""
    words = child_words(model, threads, Workload(0, 1, 1, 1))
    command = [sys.executable, "-m", engine_arm.MODULE, *words, "--greedy", str(count)]
    command += ["--torch-path"] if torch_path else []
    run = run_watched(command, directory / f"greedy-{'torch' if torch_path else 'native'}.log", TIMEOUT_S)
    events = parse_events(run.stdout.splitlines())
    path = events["ready"]["path"]["forward_path"]
    if path != ("torch" if torch_path else "native"):
        raise EngineError(f"the engine ran on {path}; its output in {directory} says why, and nothing can be compared")
    return list(events["result"]["token_ids"])


def _measurement(run: WatchedRun, samples: Mapping[str, list[float]], weight_bytes: int) -> Measurement:
    notes: dict[str, Any] = {"weight_bytes_per_token": weight_bytes, "elapsed_s": run.elapsed_s}
    found = Measurement(values=medians(samples), samples=dict(samples), notes=notes)
    found.values["peak_rss_anon_mib"] = run.peak_rss_anon_bytes / MIB
    found.values["decode_gb_s"] = found.values[DECODE_NAME] * weight_bytes / GIGA
    return found
