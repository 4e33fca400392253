import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks.edge_harness import decode_rounds
from benchmarks.edge_harness.decode_rounds import SHARE, DecodeRounds
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
        return Measurement(values={"tg64_tok_s": 10.0, "decode_gb_s": 5.0})


def make(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails_in: int = 0
) -> tuple[DecodeRounds, list[tuple[str, int]]]:
    ceilings = iter([[9.0, 30.0, 10.0], [20.0], [20.0], [50.0]])
    monkeypatch.setattr(decode_rounds, "streaming_ceiling", lambda threads: next(ceilings))
    calls: list[tuple[str, int]] = []
    arms = [FakeArm("native", calls), FakeArm("llama Q4_0", calls, fails_in)]
    return DecodeRounds(arms, Workload(7, 3, 1, 100), 2, {"settings": {}}, tmp_path, tmp_path / "out.json"), calls


def test_arms_take_turns_on_the_same_prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rounds, calls = make(tmp_path, monkeypatch)
    rounds.run(2)
    assert calls == [("native", 8), ("llama Q4_0", 8), ("native", 9), ("llama Q4_0", 9)]
    assert rounds.commands() == ["native 3", "'llama Q4_0' 3"]


def test_the_share_is_of_the_median_ceiling_just_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rounds, _ = make(tmp_path, monkeypatch)
    rounds.run(2)
    assert rounds.ceilings == {"native": [10.0, 20.0], "llama Q4_0": [20.0, 50.0]}
    assert [values[SHARE] for values in rounds.rounds()["native"]] == [50.0, 25.0]


def test_what_was_measured_before_a_failure_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rounds, _ = make(tmp_path, monkeypatch, fails_in=4)
    with pytest.raises(EngineError, match="broken"):
        rounds.run(2)
    saved = json.loads((tmp_path / "out.json").read_text())
    assert saved["is_complete"] is False
    assert [len(saved["rounds"][name]) for name in ("native", "llama Q4_0")] == [2, 1]
