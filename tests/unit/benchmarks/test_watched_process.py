import sys
import time
from pathlib import Path

import pytest

from benchmarks.edge_harness.watched_process import run_watched
from vllm_omni.errors import EngineError


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_output_time_and_memory_are_reported(tmp_path: Path) -> None:
    code = "import time; data = bytearray(b'x' * (64 << 20)); time.sleep(0.4); print(len(data) >> 20)"
    before = time.monotonic_ns()
    run = run_watched(python(code), tmp_path / "log", 60)
    assert run.stdout == "64\n"
    assert before <= run.started_ns
    assert run.elapsed_s > 0.4
    assert run.peak_rss_anon_bytes > 64 << 20


def test_variables_are_set_for_the_child_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BENCH_PROBE", raising=False)
    code = "import os; print(os.environ['BENCH_PROBE'])"
    assert run_watched(python(code), tmp_path / "log", 60, {"BENCH_PROBE": "7"}).stdout == "7\n"
    with pytest.raises(EngineError, match="KeyError"):
        run_watched(python(code), tmp_path / "log", 60)


def test_a_failure_tells_its_code_and_its_last_words(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"code 3(.|\n)*broken"):
        run_watched(python("import sys; print('broken', file=sys.stderr); sys.exit(3)"), tmp_path / "log", 60)


def test_what_takes_too_long_is_killed(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="killed after 0 s"):
        run_watched(python("import time; time.sleep(60)"), tmp_path / "log", 0.2)
