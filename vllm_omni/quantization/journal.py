"""The journal of an interrupted conversion: what it was doing, and which tensors are complete on disk.

    first line    JSON object, the key: settings and hashes of the source
    other lines   name of one complete tensor each

A line is written after the tensor's bytes have reached the disk. A last line without its newline is not counted.
The journal is removed when the conversion has its final name (`output_directory.py`).
"""

import json
import logging
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

JOURNAL_NAME = "journal.jsonl"


class Journal:
    """The journal in one directory, which nothing else writes meanwhile.

    Attributes:
        done: Names of complete tensors.
    """

    def __init__(self, directory: Path, key: Mapping[str, Any]):
        """Continues what is there under the same key; else empties the directory and begins anew.

        Args:
            directory: Where the conversion writes.
            key: JSON values; all that the bytes written depend on.
        """
        self._path = directory / JOURNAL_NAME
        found = _read(self._path)
        text = _key_line(key)
        if found and found[0] == text:
            self.done = set(found[1:])
            logger.info("event=conversion_resumed directory=%s tensors_done=%d", directory, len(self.done))
            # Cuts off a line that was being written when the earlier run ended.
            os.truncate(self._path, len("".join(f"{line}\n" for line in found).encode()))
            return
        if any(directory.iterdir()):
            reason = _difference(found[0], key) if found else "journal_unreadable"
            logger.warning("event=conversion_restarted directory=%s reason=%s", directory, reason)
            _empty(directory)
        self.done = set()
        self._append(text)

    def add(self, name: str) -> None:
        """Notes a tensor whose bytes are on disk."""
        self._append(name)
        self.done.add(name)

    def _append(self, line: str) -> None:
        with self._path.open("a", encoding="utf-8") as stream:
            stream.write(line + "\n")
            stream.flush()
            os.fsync(stream.fileno())


def has_journal(directory: Path, key: Mapping[str, Any]) -> bool:
    """Whether the journal of a conversion under this key is there."""
    return _read(directory / JOURNAL_NAME)[:1] == [_key_line(key)]


def _key_line(key: Mapping[str, Any]) -> str:
    return json.dumps(key, sort_keys=True)


def _read(path: Path) -> list[str]:
    """Complete lines; empty without a file or a complete first line."""
    if not path.is_file():
        return []
    return path.read_text(encoding="utf-8", errors="replace").split("\n")[:-1]


def _difference(text: str, key: Mapping[str, Any]) -> str:
    """Which parts of the key are other ones, for the log."""
    try:
        before = json.loads(text)
    except ValueError:
        return "journal_unreadable"
    if not isinstance(before, dict):
        return "journal_unreadable"
    return "changed:" + ",".join(
        name for name in sorted(before.keys() | key.keys()) if before.get(name) != key.get(name)
    )


def _empty(directory: Path) -> None:
    """Removes what is there, the journal last: without it a directory is not ours to empty."""
    for path in sorted(directory.iterdir(), key=lambda path: path.name == JOURNAL_NAME):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
