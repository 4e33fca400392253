import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks.edge_harness import decode_rounds
from benchmarks.edge_harness.decode_rounds import SHARE, UNSTEADY, DecodeRounds, floors
from benchmarks.edge_harness.measurement import Measurement, Workload
from vllm_omni.errors import EngineError


@dataclass
class FakeArm:
    name: str
    calls: list[tuple[str, int]]
    fails_in: int = 0

    def commands(self, work: Workload) -> list[list[str]]:
        return [[self.name, str(work.trials)]]

    def measure(self, work: Workload, directory: Path) -> Measurement:
        self.calls.append((self.name, work.seed))
        if self.fails_in and len(self.calls) >= self.fails_in:
            raise EngineError("broken")
        notes = {"weight_bytes_per_token": 10_000_000}
        return Measurement(values={"tg64_tok_s": 10.0, "decode_gb_s": 5.0, "tg64_d100_tok_s": 200.0}, notes=notes)


def make(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails_in: int = 0
) -> tuple[DecodeRounds, list[tuple[str, int]]]:
    # Before and after each turn.
    ceilings = iter([[9.0, 30.0, 10.0], [10.0], [20.0], [20.0], [20.0], [20.0], [50.0], [40.0]])
    monkeypatch.setattr(decode_rounds, "streaming_ceiling", lambda threads: next(ceilings))
    calls: list[tuple[str, int]] = []
    arms = [FakeArm("native", calls), FakeArm("llama Q4_0", calls, fails_in)]
    return DecodeRounds(arms, Workload(7, 3, 1, 100), 2, {"settings": {}}, tmp_path, tmp_path / "out.json"), calls


def test_arms_take_turns_on_the_same_prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rounds, calls = make(tmp_path, monkeypatch)
    rounds.run(2)
    assert calls == [("native", 8), ("llama Q4_0", 8), ("native", 9), ("llama Q4_0", 9)]
    assert rounds.commands() == ["native 3", "'llama Q4_0' 3"]


def test_the_share_is_of_the_median_ceilings_of_the_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rounds, _ = make(tmp_path, monkeypatch)
    rounds.run(2)
    assert rounds.ceilings == {"native": [(10.0, 10.0), (20.0, 20.0)], "llama Q4_0": [(20.0, 20.0), (50.0, 40.0)]}
    assert [values[SHARE] for values in rounds.rounds()["native"]] == [50.0, 25.0]


def test_a_turn_in_which_memory_changed_its_speed_is_marked_and_has_no_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds, _ = make(tmp_path, monkeypatch)
    rounds.run(2)
    steady, unsteady = rounds.rounds()["llama Q4_0"]
    assert (steady[UNSTEADY], unsteady[UNSTEADY]) == (0.0, 1.0)
    assert SHARE in steady and SHARE not in unsteady


def test_the_floor_at_a_depth_is_weights_keys_and_values_over_the_ceiling() -> None:
    found = Measurement(values={"tg64_d100_tok_s": 200.0}, notes={"weight_bytes_per_token": 10_000_000})
    values = floors(found, (20.0, 20.0), Workload(7, 3, 1, 100, (100,)), 10_000)
    # 10 MB of weights, 10 kB for each of 100 tokens and half of 64 more, at 20 GB/s; a step takes 5 ms.
    assert values["floor_d100_ms"] == pytest.approx((10_000_000 + 132 * 10_000) / 20e6)
    assert values["over_floor_d100"] == pytest.approx(5 / values["floor_d100_ms"])


def test_what_was_measured_before_a_failure_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rounds, _ = make(tmp_path, monkeypatch, fails_in=4)
    with pytest.raises(EngineError, match="broken"):
        rounds.run(2)
    saved = json.loads((tmp_path / "out.json").read_text())
    assert saved["is_complete"] is False
    assert [len(saved["rounds"][name]) for name in ("native", "llama Q4_0")] == [2, 1]
