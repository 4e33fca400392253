import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from benchmarks.edge_harness.process_tree import (
    Process,
    busy_percent,
    parse_rss_anon,
    parse_stat,
    process_tree,
    read_process,
    rss_anon_bytes,
)
from vllm_omni.errors import HardwareError


def process(pid: int, cpu_ticks: int, start_ticks: int = 7) -> Process:
    return Process(pid, 1, "python", start_ticks, cpu_ticks)


def test_stat_gives_parent_start_and_both_kinds_of_time(proc: Any) -> None:
    proc.add(12, 5, ticks=(30, 4), start=88)
    assert read_process(12, proc.path) == Process(12, 5, "python", 88, 34)


def test_a_name_with_spaces_and_parentheses_does_not_shift_the_fields(proc: Any) -> None:
    proc.add(12, 5, name="VLLM::Engine (a) b", ticks=(1, 2))
    found = read_process(12, proc.path)
    assert found is not None
    assert (found.name, found.parent_pid, found.cpu_ticks) == ("VLLM::Engine (a) b", 5, 3)


def test_a_zombie_is_no_process(proc: Any) -> None:
    proc.add(12, 5, state="Z")
    assert parse_stat((proc.path / "12/stat").read_text()) is None


def test_a_missing_process_is_none(proc: Any) -> None:
    assert read_process(12, proc.path) is None


def test_the_tree_holds_grandchildren_and_no_strangers(proc: Any) -> None:
    proc.add(10, 1).add(11, 10).add(12, 11).add(13, 10).add(20, 1).add(21, 20)
    assert process_tree(10, proc.path)[0].pid == 10
    assert {found.pid for found in process_tree(10, proc.path)} == {10, 11, 12, 13}


def test_the_tree_leaves_zombies_out(proc: Any) -> None:
    proc.add(10, 1).add(11, 10, state="Z").add(12, 10)
    assert {found.pid for found in process_tree(10, proc.path)} == {10, 12}


def test_the_tree_of_an_ended_process_is_empty(proc: Any) -> None:
    assert process_tree(10, proc.add(20, 1).path) == []


def test_this_process_is_found_in_the_real_proc() -> None:
    assert process_tree(os.getpid())[0].pid == os.getpid()


def test_rss_anon_is_read_in_bytes() -> None:
    assert parse_rss_anon("VmRSS:\t 9 kB\nRssAnon:\t    2048 kB\nRssFile:\t 7 kB\n") == 2048 * 1024


def test_rss_anon_without_its_line_is_unknown() -> None:
    assert parse_rss_anon("VmRSS:\t 9 kB\n") is None


def test_rss_anon_is_summed_over_the_tree_alone(proc: Any) -> None:
    proc.add(10, 1, rss_anon_kib=100).add(11, 10, rss_anon_kib=20).add(20, 1, rss_anon_kib=5000)
    assert rss_anon_bytes(process_tree(10, proc.path), proc.path) == 120 * 1024


def test_a_process_that_ended_since_the_tree_was_read_counts_nothing(proc: Any) -> None:
    proc.add(10, 1, rss_anon_kib=100).add(11, 10, rss_anon_kib=20)
    tree = process_tree(10, proc.path)
    shutil.rmtree(proc.path / "11")
    assert rss_anon_bytes(tree, proc.path) == 100 * 1024


@pytest.mark.parametrize("state", ["Z", "R"])
def test_a_process_that_has_given_its_memory_back_counts_nothing(proc: Any, state: str) -> None:
    """It is a zombie, or about to become one: the kernel frees the memory first, and changes the state later."""
    proc.add(10, 1, rss_anon_kib=100).add(11, 10, rss_anon_kib=20)
    tree = process_tree(10, proc.path)
    proc.add(11, 10, state=state, has_memory=False)
    assert rss_anon_bytes(tree, proc.path) == 100 * 1024


def test_a_process_that_ends_while_it_is_read_counts_nothing(proc: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = process_tree(10, proc.add(10, 1, rss_anon_kib=100).path)
    monkeypatch.setattr(Path, "read_text", ended)
    assert rss_anon_bytes(tree, proc.path) == 0


def ended(path: Path) -> str:
    raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH), str(path))


def test_other_errors_are_not_taken_for_an_end(proc: Any) -> None:
    tree = process_tree(10, proc.add(10, 1, rss_anon_kib=100).path)
    (proc.path / "10/status").unlink()
    (proc.path / "10/status").mkdir()
    with pytest.raises(IsADirectoryError):
        rss_anon_bytes(tree, proc.path)


def test_a_live_process_without_rss_anon_is_an_error(proc: Any) -> None:
    proc.add(10, 1, rss_anon_kib=None)
    with pytest.raises(HardwareError, match="10/status has no RssAnon"):
        rss_anon_bytes(process_tree(10, proc.path), proc.path)


def test_busy_time_is_in_percent_of_one_core() -> None:
    before, after = [process(1, 100), process(2, 50)], [process(1, 150), process(2, 75)]
    assert busy_percent(before, after, elapsed_s=5.0, ticks_per_s=100) == pytest.approx(15.0)


def test_busy_time_counts_no_process_that_was_not_there_before() -> None:
    before, after = [process(1, 100)], [process(1, 110), process(2, 900), process(1, 700, start_ticks=9)]
    assert busy_percent(before, after, elapsed_s=1.0, ticks_per_s=100) == pytest.approx(10.0)
