import logging
import os
from pathlib import Path

import pytest

from vllm_omni.quantization.journal import JOURNAL_NAME, Journal, has_journal

KEY = {"method": "rtn", "source": {"a": "1"}}


def test_a_journal_is_continued(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = Journal(tmp_path, KEY)
    first.add("x")
    first.add("y")
    (tmp_path / "weights").write_text("data")
    with caplog.at_level(logging.INFO):
        assert Journal(tmp_path, KEY).done == {"x", "y"}
    assert "event=conversion_resumed" in caplog.text
    assert "tensors_done=2" in caplog.text
    assert (tmp_path / "weights").exists()


def test_a_journal_is_known_by_its_key(tmp_path: Path) -> None:
    assert not has_journal(tmp_path, KEY)
    Journal(tmp_path, KEY).add("x")
    assert has_journal(tmp_path, KEY)
    assert not has_journal(tmp_path, KEY | {"method": "gptq"})


def test_a_torn_line_is_not_counted(tmp_path: Path) -> None:
    Journal(tmp_path, KEY).add("x")
    with (tmp_path / JOURNAL_NAME).open("a") as stream:
        stream.write("y")
    again = Journal(tmp_path, KEY)
    assert again.done == {"x"}
    again.add("z")
    assert Journal(tmp_path, KEY).done == {"x", "z"}


def test_another_key_starts_over_and_says_why(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    Journal(tmp_path, KEY).add("x")
    (tmp_path / "weights").write_text("data")
    (tmp_path / "folder").mkdir()
    assert Journal(tmp_path, KEY | {"method": "gptq", "more": 1}).done == set()
    assert "event=conversion_restarted" in caplog.text
    assert "reason=changed:method,more" in caplog.text
    assert [path.name for path in tmp_path.iterdir()] == [JOURNAL_NAME]


@pytest.mark.parametrize("content", [b"", b"\xff\xff\n", b"nonsense\nx\n", b"[1]\nx\n"])
def test_an_unreadable_journal_starts_over(tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / JOURNAL_NAME).write_bytes(content)
    assert Journal(tmp_path, KEY).done == set()
    assert "reason=journal_unreadable" in caplog.text
    assert Journal(tmp_path, KEY).done == set()


def test_an_empty_directory_says_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    Journal(tmp_path, KEY)
    assert caplog.records == []


def test_starting_over_removes_the_journal_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory that holds files and no journal is taken for somebody else's, also after a kill at that moment."""
    Journal(tmp_path, KEY).add("x")
    for name in ("a", "z"):
        (tmp_path / name).write_text("data")
    monkeypatch.setattr(Path, "iterdir", lambda path: (path / name for name in sorted(os.listdir(path))))
    removed: list[str] = []
    unlink = Path.unlink
    monkeypatch.setattr(Path, "unlink", lambda path, **_: (removed.append(path.name), unlink(path))[1])
    Journal(tmp_path, KEY | {"method": "gptq"})
    assert removed == ["a", "z", JOURNAL_NAME]
