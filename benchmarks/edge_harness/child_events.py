"""What a measured child process tells the benchmark: lines of JSON among its other output, with time and memory."""

import json
import os
import time
from collections.abc import Iterable
from typing import Any

from benchmarks.edge_harness.process_tree import read_process, rss_anon_bytes

MARK = "@bench "


def emit(event: str, **values: Any) -> None:
    """Writes one event to stdout, with the monotonic clock, which all processes share, and this process's `RssAnon`."""
    process = read_process(os.getpid())
    assert process is not None
    facts = {"event": event, "monotonic_ns": time.monotonic_ns(), "rss_anon_bytes": rss_anon_bytes([process])}
    print(MARK + json.dumps(facts | values), flush=True)


def parse_events(lines: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Event name to what was said, the last time that it was; other lines are skipped."""
    found = [json.loads(line.removeprefix(MARK)) for line in lines if line.startswith(MARK)]
    return {event["event"]: event for event in found}
