from pathlib import Path

import pytest


class FakeProc:
    """A `/proc` with the files of some processes."""

    def __init__(self, path: Path):
        self.path = path

    def add(
        self,
        pid: int,
        parent: int,
        *,
        rss_anon_kib: int | None = 0,
        ticks: tuple[int, int] = (0, 0),
        name: str = "python",
        start: int = 7,
        state: str = "S",
        has_memory: bool = True,
    ) -> "FakeProc":
        """`rss_anon_kib` None: a kernel that does not report it; `has_memory` False: a process that is ending."""
        directory = self.path / str(pid)
        directory.mkdir(exist_ok=True)
        middle = f"{pid} {pid} 0 -1 4194560 1 2 3 4 {ticks[0]} {ticks[1]} 900 901 20 0 5 0"
        (directory / "stat").write_text(f"{pid} ({name}) {state} {parent} {middle} {start} 1000 200\n")
        anonymous = "" if rss_anon_kib is None else f"RssAnon:\t{rss_anon_kib:8d} kB\n"
        memory = f"VmRSS:\t  999999 kB\n{anonymous}RssFile:\t   123456 kB\n" if has_memory else ""
        (directory / "status").write_text(f"Name:\t{name}\n{memory}Threads:\t1\n")
        return self


@pytest.fixture
def proc(tmp_path: Path) -> FakeProc:
    (tmp_path / "meminfo").write_text("MemTotal: 1 kB\n")
    (tmp_path / "self").mkdir()
    return FakeProc(tmp_path)
