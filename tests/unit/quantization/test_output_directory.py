import errno
import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_omni.errors import ConfigError
from vllm_omni.quantization import output_directory
from vllm_omni.quantization.output_directory import (
    SMALL_FILES_BYTES,
    finish_directory,
    resumable_directory,
    staged_directory,
)


def fill(out: Path, overwrite: bool = False, text: str = "new") -> None:
    with staged_directory(out, overwrite, weight_bytes=0) as directory:
        (directory / "conversion.json").write_text(text)


def test_the_directory_appears_with_its_parents(tmp_path: Path) -> None:
    out = tmp_path / "a" / "b"
    fill(out)
    assert (out / "conversion.json").read_text() == "new"
    assert sorted(path.name for path in out.parent.iterdir()) == ["b"]


def test_a_failure_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), staged_directory(tmp_path / "out", False, 0) as directory:
        (directory / "x").write_text("x")
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def test_an_existing_directory_is_refused(tmp_path: Path) -> None:
    fill(tmp_path / "out", text="old")
    with pytest.raises(ConfigError, match="exists; pass another directory, or --overwrite"):
        fill(tmp_path / "out")
    assert (tmp_path / "out" / "conversion.json").read_text() == "old"


def test_overwriting_replaces_a_conversion(tmp_path: Path) -> None:
    fill(tmp_path / "out", text="old")
    (tmp_path / "out" / "stale").write_text("stale")
    fill(tmp_path / "out", overwrite=True)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["conversion.json"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_failed_overwrite_keeps_the_old_directory(tmp_path: Path) -> None:
    fill(tmp_path / "out", text="old")
    with pytest.raises(RuntimeError), staged_directory(tmp_path / "out", True, 0):
        raise RuntimeError
    assert (tmp_path / "out" / "conversion.json").read_text() == "old"


def test_overwriting_spares_everything_else(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").write_text("x")
    with pytest.raises(ConfigError, match=r"it has no conversion\.json"):
        fill(tmp_path / "out", overwrite=True)
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="not a directory written by a conversion"):
        fill(tmp_path / "file", overwrite=True)
    assert (tmp_path / "out" / "precious").exists()


def test_a_left_over_partial_directory_is_named(tmp_path: Path) -> None:
    (tmp_path / "out.partial").mkdir()
    with pytest.raises(ConfigError, match=r"out\.partial exists: another conversion"):
        fill(tmp_path / "out")
    assert (tmp_path / "out.partial").is_dir()


def test_too_little_space_is_refused_before_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_directory.shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(ConfigError, match=f"has 1000 bytes free, the conversion needs {5000 + SMALL_FILES_BYTES}"):
        staged_directory(tmp_path / "out", False, 5000).__enter__()
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_while_writing_is_explained(tmp_path: Path) -> None:
    with (
        pytest.raises(ConfigError, match=r"cannot write there: .*No space left on device"),
        staged_directory(tmp_path / "out", False, 0),
    ):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert list(tmp_path.iterdir()) == []


def test_a_parent_that_is_a_file_is_explained(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="cannot write there"):
        fill(tmp_path / "file" / "sub" / "out")


def test_an_unwritable_parent_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, "mkdir", lambda self, *args, **kwargs: None if kwargs else refuse(self))
    with pytest.raises(ConfigError, match=r"cannot write there: .*Permission denied"):
        fill(tmp_path / "out")


def resume(out: Path, text: str = "new", overwrite: bool = False) -> None:
    with resumable_directory(out, overwrite, 0, "journal") as directory:
        (directory / "journal").touch()
        (directory / "conversion.json").write_text(text)


def assert_whole(out: Path, text: str) -> None:
    """The directory is complete, without its journal, and nothing was left beside it."""
    assert {path.name: path.read_text() for path in out.iterdir()} == {"conversion.json": text}
    assert [path.name for path in out.parent.iterdir()] == [out.name]


def stop(out: Path) -> None:
    with pytest.raises(KeyboardInterrupt), resumable_directory(out, False, 0, "journal") as directory:
        (directory / "journal").write_text("half")
        raise KeyboardInterrupt


def test_a_resumable_directory_appears_whole(tmp_path: Path) -> None:
    resume(tmp_path / "a" / "out")
    assert_whole(tmp_path / "a" / "out", "new")
    resume(tmp_path / "a" / "out", "newer", overwrite=True)
    assert_whole(tmp_path / "a" / "out", "newer")


def test_what_a_stopped_run_left_is_given_again(tmp_path: Path) -> None:
    stop(tmp_path / "out")
    with resumable_directory(tmp_path / "out", False, 0, "journal") as directory:
        assert (directory / "journal").read_text() == "half"
    assert (tmp_path / "out").is_dir()


class Killed(BaseException):
    """Stands for a signal that ends the process: nothing that changes a file runs after it."""


class Killer:
    """Counts what `output_directory` does to the file system, and ends the run before one of these steps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.steps_left: int | None = None
        for owner, name in ((Path, "rename"), (Path, "unlink"), (os, "fsync"), (shutil, "rmtree")):
            monkeypatch.setattr(owner, name, self._counted(getattr(owner, name)))

    def _counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def step(*args: Any, **kwargs: Any) -> Any:
            if self.steps_left is not None:
                if not self.steps_left:
                    raise Killed
                self.steps_left -= 1
            return function(*args, **kwargs)

        return step


def kill_after(out: Path, num_steps: int, killer: Killer, overwrite: bool) -> bool:
    """Runs until the kill; False where the run ended by itself."""
    killer.steps_left = num_steps
    try:
        resume(out, overwrite=overwrite)
    except Killed:
        return True
    finally:
        killer.steps_left = None
    return False


def run_again(out: Path, overwrite: bool) -> None:
    """The same command, as `quantize` does it: a directory with its journal needs nothing but to be finished."""
    if (out / "journal").exists():
        finish_directory(out, "journal")
    else:
        resume(out, overwrite=overwrite)


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_run_that_was_killed_at_any_instant_of_the_end_is_completed_by_the_same_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overwrite: bool
) -> None:
    killer = Killer(monkeypatch)
    for num_steps in range(100):
        out = tmp_path / str(num_steps) / "out"
        if overwrite:
            resume(out, "old")
        was_killed = kill_after(out, num_steps, killer, overwrite)
        if was_killed:
            run_again(out, overwrite)
        assert_whole(out, "new")
        if not was_killed:
            break
    assert 4 < num_steps < 99


def test_the_new_name_is_on_disk_before_the_journal_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    def note(owner: Any, name: str, path_of: Callable[..., str]) -> None:
        function = getattr(owner, name)

        def noted(first: Any, *args: Any, **kwargs: Any) -> Any:
            done.append(f"{name} {path_of(first)}")
            return function(first, *args, **kwargs)

        monkeypatch.setattr(owner, name, noted)

    note(os, "fsync", lambda descriptor: os.readlink(f"/proc/self/fd/{descriptor}"))
    note(Path, "rename", str)
    note(Path, "unlink", str)
    resume(tmp_path / "out")
    # The order in which a power cut could find the disk.
    assert done[-3:] == [f"rename {tmp_path}/out.partial", f"fsync {tmp_path}", f"unlink {tmp_path}/out/journal"]


def test_an_empty_left_over_is_taken(tmp_path: Path) -> None:
    (tmp_path / "out.partial").mkdir()
    resume(tmp_path / "out")
    assert (tmp_path / "out").is_dir()


def test_a_left_over_without_journal_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "precious").write_text("x")
    with pytest.raises(ConfigError, match=r"out\.partial exists and has no journal.*remove it if none runs"):
        resume(tmp_path / "out")
    assert (tmp_path / "out.partial" / "precious").exists()


def test_two_runs_do_not_write_one_directory(tmp_path: Path) -> None:
    with resumable_directory(tmp_path / "out", False, 0, "journal") as directory:
        (directory / "journal").touch()
        with pytest.raises(ConfigError, match=r"out\.partial is being written by another run"):
            resume(tmp_path / "out")


def test_a_resumable_directory_needs_space_and_rights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path / "out")
    with pytest.raises(ConfigError, match="or --overwrite"):
        resume(tmp_path / "out")
    (tmp_path / "more.partial").write_text("a file")
    with pytest.raises(ConfigError, match="cannot write there"):
        resume(tmp_path / "more")
    monkeypatch.setattr(output_directory.shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(ConfigError, match="has 1000 bytes free"):
        resume(tmp_path / "third")


def refuse_renaming(monkeypatch: pytest.MonkeyPatch, *suffixes: str) -> None:
    """Makes renaming fail for paths that end so."""
    rename = Path.rename

    def refusing(path: Path, target: Path) -> Path:
        if path.name.endswith(suffixes):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refusing)


def test_what_was_moved_aside_comes_back_when_it_cannot_be_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resume(tmp_path / "out", "old")
    with monkeypatch.context() as patch, pytest.raises(ConfigError, match=r"cannot write there: .*Permission denied"):
        refuse_renaming(patch, ".partial")
        resume(tmp_path / "out", overwrite=True)
    assert (tmp_path / "out" / "conversion.json").read_text() == "old"
    resume(tmp_path / "out", overwrite=True)
    assert_whole(tmp_path / "out", "new")


def test_what_cannot_be_moved_back_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    resume(tmp_path / "out", "old")
    refuse_renaming(monkeypatch, ".partial", "-replaced")
    with pytest.raises(
        ConfigError, match=r"what was there is in .*/\.out\.vllm-omni-replaced and cannot be moved back"
    ):
        resume(tmp_path / "out", overwrite=True)
    assert (tmp_path / ".out.vllm-omni-replaced" / "conversion.json").read_text() == "old"


def test_a_directory_that_another_run_made_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    with (
        pytest.raises(ConfigError, match="exists; pass another directory, or --overwrite"),
        resumable_directory(tmp_path / "out", False, 0, "journal") as directory,
    ):
        (directory / "journal").touch()
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "conversion.json").write_text("of another run")
    assert (tmp_path / "out" / "conversion.json").read_text() == "of another run"
    assert directory.is_dir()


@pytest.mark.parametrize("is_begun_again", [False, True])
def test_a_directory_that_is_published_while_it_is_locked_belongs_to_the_other_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_begun_again: bool
) -> None:
    partial = tmp_path / "out.partial"
    partial.mkdir()
    flock = fcntl.flock

    def published_before(descriptor: int, operation: int) -> None:
        partial.rename(tmp_path / "out")
        if is_begun_again:
            partial.mkdir()
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", published_before)
    num_open = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ConfigError, match=r"out\.partial is being written by another run"):
        resume(tmp_path / "out")
    assert len(os.listdir("/proc/self/fd")) == num_open
    assert list((tmp_path / "out").iterdir()) == []


def test_a_directory_that_is_published_before_it_is_opened_belongs_to_the_other_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lexists = os.path.lexists
    monkeypatch.setattr(os.path, "lexists", lambda path: str(path).endswith(".partial") or lexists(path))
    with pytest.raises(ConfigError, match=r"out\.partial is being written by another run"):
        resume(tmp_path / "out")


def test_a_lock_that_the_file_system_lacks_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    num_open = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ConfigError, match=r"cannot write there: .*No locks available"):
        resume(tmp_path / "out")
    assert len(os.listdir("/proc/self/fd")) == num_open


def test_a_directory_is_not_finished_while_its_run_is_at_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    unlink = Path.unlink

    def finished_twice(path: Path, missing_ok: bool = False) -> None:
        with pytest.raises(ConfigError, match="out is being written by another run"):
            finish_directory(out, "journal")
        unlink(path, missing_ok=missing_ok)

    monkeypatch.setattr(Path, "unlink", finished_twice)
    resume(out)
    assert_whole(out, "new")


def test_a_refused_directory_keeps_its_journal(tmp_path: Path) -> None:
    fill(tmp_path / "out")
    (tmp_path / "out" / "journal").write_text("precious")
    (tmp_path / "link").symlink_to(tmp_path / "out")
    for name, overwrite in (("out", False), ("link", False), ("link", True)):
        with pytest.raises(ConfigError, match="exists"):
            resume(tmp_path / name, overwrite=overwrite)
    assert (tmp_path / "out" / "journal").read_text() == "precious"
