import time

import pytest

from benchmarks.edge_harness.child_events import emit, parse_events


def test_an_event_is_found_among_other_output(capsys: pytest.CaptureFixture[str]) -> None:
    print("loading")
    before = time.monotonic_ns()
    emit("ready", path="native")
    emit("result", samples={"a": [1.0]})
    events = parse_events(capsys.readouterr().out.splitlines())
    assert events["ready"]["path"] == "native"
    assert before <= events["ready"]["monotonic_ns"] <= time.monotonic_ns()
    assert events["ready"]["rss_anon_bytes"] > 1 << 20
    assert events["result"]["samples"] == {"a": [1.0]}
