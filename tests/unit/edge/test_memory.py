import ctypes
import gc
import logging
import subprocess
import sys
import weakref
from typing import Any

import pytest

from vllm_omni.edge.memory import anonymous_bytes, paused_collection, release_freed_memory


class Node:
    """Can point at itself."""

    other: "Node | None" = None


def test_anonymous_bytes_of_a_recorded_process(root: Any) -> None:
    root.write("17/status", "Name:\tserver\nVmRSS:\t  900 kB\nRssAnon:\t  512 kB\nRssFile:\t  388 kB")
    assert anonymous_bytes("17", root.path) == 512 * 1024


def test_anonymous_bytes_are_none_where_they_are_not_reported(root: Any) -> None:
    root.write("17/status", "Name:\tkernel-thread")
    assert anonymous_bytes("17", root.path) is None
    assert anonymous_bytes("18", root.path) is None


def test_this_process_has_anonymous_bytes() -> None:
    found = anonymous_bytes()
    assert found is not None
    assert found > 1 << 20


def test_releasing_collects_garbage_and_reports_bytes() -> None:
    node = Node()
    node.other = node
    alive = weakref.ref(node)
    with paused_collection():
        del node
        assert alive() is not None
        assert isinstance(release_freed_memory(), int)
    assert alive() is None


def test_another_c_library_is_said_at_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda _name: object())
    with caplog.at_level(logging.INFO, "vllm_omni"):
        assert release_freed_memory() is None
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "event=memory_not_released" in caplog.text


def test_pausing_the_collector_nests_and_ends_with_the_block() -> None:
    assert gc.isenabled()
    with pytest.raises(KeyError), paused_collection():
        with paused_collection():
            assert not gc.isenabled()
        assert not gc.isenabled()
        raise KeyError
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off() -> None:
    gc.disable()
    try:
        with paused_collection():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_one_heap_arena_is_accepted_by_the_c_library() -> None:
    script = "from vllm_omni.edge.memory import use_one_heap_arena; print(use_one_heap_arena())"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert run.stdout.strip() == "True"
