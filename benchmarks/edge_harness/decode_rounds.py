"""Runs the arms of `bench_decode` in turn, round after round, each in its own process, and keeps what they gave."""

import json
import shlex
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.edge_harness.comparison import say
from benchmarks.edge_harness.decode_arms import DecodeArm
from benchmarks.edge_harness.decode_report import summarize_decode
from benchmarks.edge_harness.measurement import Measurement, Workload
from benchmarks.edge_harness.memory_bandwidth import streaming_ceiling

CEILING = "streaming_gb_s"
SHARE = "streaming_share_percent"


class DecodeRounds:
    """One run and what it gave so far.

    Args:
        arms: In the order in which they take turns.
        work: What each does in a round; the seed moves on by one every round.
        threads: Threads of every arm, and of the measurement of the streaming ceiling.
        facts: Provenance and settings, written beside the results; checks may be added before `run`.
        scratch: Directory for the arms' output.
        out: File for raw results, rewritten after every measurement; None keeps them in memory only.
    """

    def __init__(
        self,
        arms: Sequence[DecodeArm],
        work: Workload,
        threads: int,
        facts: dict[str, Any],
        scratch: Path,
        out: Path | None,
    ):
        self.arms = arms
        self.work = work
        self.threads = threads
        self.facts = facts
        self.scratch = scratch
        self.out = out
        self.ceilings: dict[str, list[float]] = {arm.name: [] for arm in arms}
        self.measurements: dict[str, list[Measurement]] = {arm.name: [] for arm in arms}

    def run(self, num_rounds: int) -> None:
        """Runs every round: each arm, and the streaming ceiling just before, since a shared memory changes its speed.

        Raises:
            OmniError: An arm failed; `out` holds what was measured before.
        """
        for number in range(1, num_rounds + 1):
            for arm in self.arms:
                self._measure(arm, number)
                self.save(is_complete=False)
        self.save(is_complete=True)

    def rounds(self) -> dict[str, list[dict[str, float]]]:
        """Arm to the values of its rounds, with the share of the ceiling that was measured just before."""
        return {name: self._shares(name) for name in self.measurements}

    def commands(self) -> list[str]:
        """What is run in a round, to be typed again."""
        return [shlex.join(command) for arm in self.arms for command in arm.commands(self.work)]

    def save(self, *, is_complete: bool) -> None:
        """Writes `out`."""
        if self.out is None:
            return
        raw = {name: [asdict(found) for found in measured] for name, measured in self.measurements.items()}
        results: Mapping[str, Any] = {
            **self.facts,
            "is_complete": is_complete,
            CEILING: self.ceilings,
            "summary": summarize_decode(self.rounds()),
            "rounds": raw,
        }
        self.out.write_text(json.dumps(results, indent=1) + "\n")

    def _measure(self, arm: DecodeArm, number: int) -> None:
        work = Workload(self.work.seed + number, self.work.trials, 1, self.work.vocab_size)
        directory = self.scratch / f"round-{number}"
        directory.mkdir(exist_ok=True)
        ceiling = statistics.median(streaming_ceiling(self.threads))
        say(f"round {number}: {ceiling:.1f} GB/s streaming, then {arm.name}")
        self.measurements[arm.name].append(arm.measure(work, directory))
        self.ceilings[arm.name].append(ceiling)

    def _shares(self, name: str) -> list[dict[str, float]]:
        return [
            found.values | {CEILING: ceiling, SHARE: 100 * found.values["decode_gb_s"] / ceiling}
            for found, ceiling in zip(self.measurements[name], self.ceilings[name], strict=True)
        ]
