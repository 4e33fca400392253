"""The arms of `bench_decode`: each is a program run to its end, that gives the same metrics."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from benchmarks.edge_harness import engine_arm, llama_bench, native_arm
from benchmarks.edge_harness.child_events import parse_events
from benchmarks.edge_harness.decode_work import add_weight_rate, child_words, medians
from benchmarks.edge_harness.measurement import MIB, Measurement, Workload
from benchmarks.edge_harness.score_check import Scores, format_ids
from benchmarks.edge_harness.watched_process import WatchedRun, run_watched
from vllm_omni.errors import EngineError
from vllm_omni.native.spec import KV_KINDS

TIMEOUT_S = 3600.0
# Names of arms with an int8 cache end with it.
INT8_SUFFIX = "-int8"


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
        kv_kind: Of its cache.
    """

    name: str
    module: str
    model: Path
    threads: int
    weight_bytes: int
    kv_kind: str = KV_KINDS[0]

    def commands(self, work: Workload) -> list[list[str]]:
        kv = ["--kv", self.kv_kind] if self.kv_kind != KV_KINDS[0] else []
        return [[sys.executable, "-m", self.module, *child_words(self.model, self.threads, work), *kv]]

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
            *llama_bench.timing_commands(self.program, self.gguf, self.threads, work),
        ]

    def measure(self, work: Workload, directory: Path) -> Measurement:
        label = self.name.replace(" ", "-")
        runs = [
            run_watched(command, directory / f"{label}-{number}.log", TIMEOUT_S)
            for number, command in enumerate(self.commands(work))
        ]
        load, *reports = (llama_bench.parse_report(run.stdout) for run in runs)
        samples = {name: values for report in reports for name, values in report.samples.items()}
        found = _measurement(runs[-1], samples, reports[0].weight_bytes)
        found.values["ready_s"] = runs[0].elapsed_s - load.seconds
        found.notes["path"] = reports[0].build
        return found


def omni_arms(model: Path, threads: int, weight_bytes: int, names: Sequence[str]) -> list[DecodeArm]:
    """The arms of this package among `names`."""
    modules = {"native": native_arm.MODULE, "engine": engine_arm.MODULE}
    arms: list[DecodeArm] = []
    for name in names:
        module = modules[name.removesuffix(INT8_SUFFIX)]
        arms.append(OmniArm(name, module, model, threads, weight_bytes, kv_kind_of(name)))
    return arms


def kv_kind_of(name: str) -> str:
    """The kind of cache of the arm of that name."""
    return "int8" if name.endswith(INT8_SUFFIX) else KV_KINDS[0]


def native_scores(model: Path, threads: int, directory: Path) -> Scores:
    """Log-probabilities by the engine on the native core, of a text in one step and of tokens it adds one by one.

    Raises:
        EngineError: The engine failed, or ran without the native core.
    """
    return _scores("native", ["--score"], model, threads, directory)


def torch_scores(model: Path, threads: int, directory: Path, token_ids: Sequence[int]) -> Scores:
    """Log-probabilities of tokens by the engine without the native core.

    Raises:
        EngineError: The engine failed, or ran on the native core.
    """
    return _scores("torch", ["--torch-path", "--score-ids", format_ids(token_ids)], model, threads, directory)


def _scores(path: str, flags: Sequence[str], model: Path, threads: int, directory: Path) -> Scores:
    words = child_words(model, threads, Workload(0, 1, 1, 1))
    run = run_watched([sys.executable, "-m", engine_arm.MODULE, *words, *flags], directory / f"{path}.log", TIMEOUT_S)
    events = parse_events(run.stdout.splitlines())
    ran = events["ready"]["path"]["forward_path"]
    if ran != path:
        raise EngineError(f"the engine ran on {ran}; its output in {directory} says why, and nothing can be compared")
    return Scores(tuple(events["result"]["token_ids"]), tuple(events["result"]["logprobs"]))


def _measurement(run: WatchedRun, samples: Mapping[str, list[float]], weight_bytes: int) -> Measurement:
    notes: dict[str, Any] = {"weight_bytes_per_token": weight_bytes, "elapsed_s": run.elapsed_s}
    found = Measurement(values=medians(samples), samples=dict(samples), notes=notes)
    found.values["peak_rss_anon_mib"] = run.peak_rss_anon_bytes / MIB
    add_weight_rate(found, weight_bytes)
    return found
