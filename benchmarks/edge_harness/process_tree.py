"""A process and its descendants, read from `/proc`: how many, how much memory they allocated, how much they computed.

Memory is `RssAnon`: what a process allocated itself. Pages of mapped files (weights, libraries) and shared memory are
not in it. A process that ends between two reads is left out; a zombie is never counted.
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from vllm_omni.errors import HardwareError

PROC = Path("/proc")
# Positions in /proc/<pid>/stat after the name, which is in parentheses and may hold anything.
STATE, PARENT_PID, USER_TICKS, SYSTEM_TICKS, START_TICKS = 0, 1, 11, 12, 19


@dataclass(frozen=True)
class Process:
    """One process at the time of reading.

    Attributes:
        start_ticks: Clock ticks from boot to its start; with `pid` its identity, since numbers are used again.
        cpu_ticks: User and system time so far, in clock ticks.
    """

    pid: int
    parent_pid: int
    name: str
    start_ticks: int
    cpu_ticks: int

    @property
    def identity(self) -> tuple[int, int]:
        return self.pid, self.start_ticks


def parse_stat(text: str) -> Process | None:
    """A process from its `stat` line; None for a zombie, which has ended."""
    head, _, tail = text.rpartition(")")
    number, _, name = head.partition(" (")
    fields = tail.split()
    if fields[STATE] in "ZX":
        return None
    return Process(
        pid=int(number),
        parent_pid=int(fields[PARENT_PID]),
        name=name,
        start_ticks=int(fields[START_TICKS]),
        cpu_ticks=int(fields[USER_TICKS]) + int(fields[SYSTEM_TICKS]),
    )


def read_process(pid: int, root: Path = PROC) -> Process | None:
    """The process `pid`, None when it has ended."""
    try:
        text = (root / str(pid) / "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return parse_stat(text)


def process_tree(pid: int, root: Path = PROC) -> list[Process]:
    """The process `pid` and all its descendants, parents before children; empty when it has ended."""
    children: dict[int, list[Process]] = {}
    for entry in root.iterdir():
        process = read_process(int(entry.name), root) if entry.name.isdigit() else None
        if process is not None:
            children.setdefault(process.parent_pid, []).append(process)
    top = read_process(pid, root)
    found = [] if top is None else [top]
    for process in found:
        found.extend(children.get(process.pid, []))
    return found


def parse_rss_anon(status: str) -> int | None:
    """`RssAnon` of a `status` file in bytes, None when the file has no such line."""
    for line in status.splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return None


def rss_anon_bytes(processes: Iterable[Process], root: Path = PROC) -> int:
    """Sum of `RssAnon` over `processes`; those that have ended or are about to have none.

    Raises:
        HardwareError: The kernel does not report `RssAnon`.
    """
    return sum(_rss_anon_of(process.pid, root) for process in processes)


def _rss_anon_of(pid: int, root: Path) -> int:
    try:
        status = (root / str(pid) / "status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    size = parse_rss_anon(status)
    if size is not None:
        return size
    # A process that ends gives its memory back before it becomes a zombie; all lines on memory are gone then.
    if "\nVmRSS:" in status:
        raise HardwareError(
            f"{root}/{pid}/status has no RssAnon line; memory is compared by it, so use Linux 4.5 or later"
        )
    return 0


def busy_percent(before: Iterable[Process], after: Iterable[Process], elapsed_s: float, ticks_per_s: int) -> float:
    """Processor time between two readings in percent of one core; counts processes that are in both."""
    start = {process.identity: process.cpu_ticks for process in before}
    ticks = sum(process.cpu_ticks - start[process.identity] for process in after if process.identity in start)
    return 100.0 * ticks / ticks_per_s / elapsed_s


def clock_ticks_per_s() -> int:
    """Clock ticks a second of this kernel."""
    return os.sysconf("SC_CLK_TCK")
