"""A server without requests sleeps: what its threads do is read from `/proc` over some seconds."""

import os
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.server import POLL_S, RunningServer

pytestmark = pytest.mark.engine

INTERVAL_S = 8.0
DATE_TIMEOUT_S = 10.0
# In processor time, and in waits that ended: what other processes do does not count. Measured: 0.1% and 1.6.
MAX_CPU_RATIO = 0.01
MAX_WAKEUPS_PER_S = 6.0


@dataclass(frozen=True)
class Activity:
    """What the threads of a process did.

    Attributes:
        cpu_s: Processor time, in user and kernel mode.
        num_wakeups: How often one of them had waited and went on.
    """

    cpu_s: float
    num_wakeups: int


def read_activity(pid: int) -> Activity:
    """What the threads that live have done since they began."""
    process = Path(f"/proc/{pid}")
    # The second field, a name in brackets, may contain anything; the 14th and 15th are the times.
    fields = (process / "stat").read_text().rpartition(")")[2].split()
    num_ticks = int(fields[11]) + int(fields[12])
    num_wakeups = 0
    for status in process.glob("task/*/status"):
        (line,) = (line for line in status.read_text().splitlines() if line.startswith("voluntary_ctxt_switches"))
        num_wakeups += int(line.split()[1])
    return Activity(num_ticks / os.sysconf("SC_CLK_TCK"), num_wakeups)


@pytest.fixture(scope="module")
def idle(server: RunningServer) -> Activity:
    """What the server does between two moments after it has answered a request."""
    assert server.chat().status == 200
    server.wait_idle()
    before = read_activity(server.process.pid)
    time.sleep(INTERVAL_S)
    after = read_activity(server.process.pid)
    return Activity(after.cpu_s - before.cpu_s, after.num_wakeups - before.num_wakeups)


def test_an_idle_server_uses_no_processor(idle: Activity) -> None:
    assert idle.cpu_s / INTERVAL_S < MAX_CPU_RATIO


def test_the_threads_of_an_idle_server_sleep(idle: Activity) -> None:
    assert idle.num_wakeups / INTERVAL_S < MAX_WAKEUPS_PER_S


def test_no_thread_is_gloos(server: RunningServer) -> None:
    names = [path.read_text().strip() for path in Path(f"/proc/{server.process.pid}/task").glob("*/comm")]
    assert names
    assert not [name for name in names if "gloo" in name]


def test_the_date_header_stays_current(server: RunningServer) -> None:
    """The server wakes for it."""
    deadline = time.monotonic() + DATE_TIMEOUT_S
    first = server.get("/health").headers["date"]
    while server.get("/health").headers["date"] == first:
        assert time.monotonic() < deadline
        time.sleep(POLL_S)
