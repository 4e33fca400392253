"""Runs the arms of `bench_decode` in turn, round after round, each in its own process, and keeps what they gave."""

import json
import os
import shlex
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks.edge_harness.comparison import say
from benchmarks.edge_harness.decode_arms import DecodeArm
from benchmarks.edge_harness.decode_report import floor_name, metrics_of, over_floor_name, summarize_decode
from benchmarks.edge_harness.decode_work import NEW_TOKENS, decode_name
from benchmarks.edge_harness.measurement import Measurement, Workload
from benchmarks.edge_harness.memory_bandwidth import streaming_ceiling

CEILING = "streaming_gb_s"
SHARE = "streaming_share_percent"
UNSTEADY = "unsteady"
# Memory whose speed changed by more than this share during a turn gives no floor to compare with.
MAX_DRIFT = 0.15


class DecodeRounds:
    """One run and what it gave so far.

    Args:
        arms: In the order in which they take turns.
        work: What each does in a round; the seed moves on by one every round.
        threads: Threads of every arm, and of the measurement of the streaming ceiling.
        facts: Provenance and settings, written beside the results; checks may be added before `run`.
        scratch: Directory for the arms' output.
        out: File for raw results, rewritten after every measurement; None keeps them in memory only.
        kv_bytes: Arm to the bytes of keys and values that a token adds; for the floors at depths.
    """

    def __init__(
        self,
        arms: Sequence[DecodeArm],
        work: Workload,
        threads: int,
        facts: dict[str, Any],
        scratch: Path,
        out: Path | None,
        kv_bytes: Mapping[str, int] | None = None,
    ):
        self.kv_bytes = dict(kv_bytes or {})
        self.arms = arms
        self.work = work
        self.threads = threads
        self.facts = facts
        self.scratch = scratch
        self.out = out
        # Just before and just after each turn.
        self.ceilings: dict[str, list[tuple[float, float]]] = {arm.name: [] for arm in arms}
        self.measurements: dict[str, list[Measurement]] = {arm.name: [] for arm in arms}

    def run(self, num_rounds: int) -> None:
        """Runs every round: each arm between two measurements of the streaming ceiling, since a shared memory drifts.

        Raises:
            OmniError: An arm failed; `out` holds what was measured before.
        """
        for number in range(1, num_rounds + 1):
            for arm in self.arms:
                self._measure(arm, number)
                self.save(is_complete=False)
        self.save(is_complete=True)

    def rounds(self) -> dict[str, list[dict[str, float]]]:
        """Arm to the values of its rounds, with shares and floors where the ceiling stayed the same during the turn."""
        return {name: self._with_floors(name) for name in self.measurements}

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
            "summary": summarize_decode(self.rounds(), metrics_of(self.work)),
            "rounds": raw,
        }
        self.out.write_text(json.dumps(results, indent=1) + "\n")

    def _measure(self, arm: DecodeArm, number: int) -> None:
        work = replace(self.work, seed=self.work.seed + number)
        directory = self.scratch / f"round-{number}"
        directory.mkdir(exist_ok=True)
        before = statistics.median(streaming_ceiling(self.threads))
        say(f"round {number}: {before:.1f} GB/s streaming, then {arm.name}; load average {os.getloadavg()[0]:.2f}")
        found = arm.measure(work, directory)
        found.notes["load_average"] = os.getloadavg()
        self.measurements[arm.name].append(found)
        self.ceilings[arm.name].append((before, statistics.median(streaming_ceiling(self.threads))))

    def _with_floors(self, name: str) -> list[dict[str, float]]:
        kv_bytes = self.kv_bytes.get(name, 0)
        return [
            found.values | floors(found, ceilings, self.work, kv_bytes)
            for found, ceilings in zip(self.measurements[name], self.ceilings[name], strict=True)
        ]


def floors(
    found: Measurement, ceilings: tuple[float, float], work: Workload, kv_bytes_per_token: int
) -> dict[str, float]:
    """What a turn's decode took over what memory allows, by depth; only a mark where memory changed its speed.

    The floor of a step is the time that weights, keys and values take at the mean of the two ceilings.

    Args:
        found: Of the turn; its note `weight_bytes_per_token` tells the weights.
        ceilings: GB/s just before and just after.
        work: What was timed.
        kv_bytes_per_token: Keys and values of all layers; 0: not known, and counted as none.
    """
    ceiling = statistics.mean(ceilings)
    values = {CEILING: ceiling, UNSTEADY: float(abs(ceilings[0] - ceilings[1]) > MAX_DRIFT * max(ceilings))}
    if values[UNSTEADY]:
        return values
    if "decode_gb_s" in found.values:
        values[SHARE] = 100 * found.values["decode_gb_s"] / ceiling
    for depth in work.depths:
        num_bytes = found.notes["weight_bytes_per_token"] + kv_bytes_per_token * (depth + NEW_TOKENS / 2)
        floor_ms = num_bytes / ceiling / 1e6
        values[floor_name(depth)] = floor_ms
        if decode_name(depth) in found.values:
            values[over_floor_name(depth)] = 1000 / found.values[decode_name(depth)] / floor_ms
    return values
