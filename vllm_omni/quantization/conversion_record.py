"""The record `conversion.json` that a conversion leaves in its output directory.

It says where the directory came from and what every file in it must hash to. Reading and writing the record is all
that happens here; `checkpoint.py` compares it with the files.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from vllm_omni.errors import WeightError
from vllm_omni.version import __version__

RECORD_NAME = "conversion.json"
FORMAT_VERSION = 1
HASH_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class FileEntry:
    """Content of one file: hexadecimal SHA-256 and size."""

    sha256: str
    bytes: int


@dataclass(frozen=True)
class ConversionRecord:
    """What was converted, how, and into which files.

    Attributes:
        method: How the files were made, such as `gguf-import`.
        dtype: Type of the unquantized tensors, such as `bfloat16`.
        source: Source file name to its content.
        files: Path relative to the directory, with `/`, to its content; every file but the record itself.
        settings: Further facts of the method; nothing in a directory is checked against them.
        tool_version: Version of this package that wrote the directory.
    """

    method: str
    dtype: str
    source: Mapping[str, FileEntry]
    files: Mapping[str, FileEntry]
    settings: Mapping[str, Any] = field(default_factory=dict)
    tool_version: str = __version__


def hash_file(path: Path) -> FileEntry:
    """Size and SHA-256 of a file, read once in pieces of 1 MiB."""
    digest = hashlib.sha256()
    num_bytes = 0
    with path.open("rb") as stream:
        while piece := stream.read(HASH_CHUNK_BYTES):
            digest.update(piece)
            num_bytes += len(piece)
    return FileEntry(digest.hexdigest(), num_bytes)


def hash_bytes(content: memoryview) -> FileEntry:
    """The same of a mapped file: what it had then, though another may have taken its name."""
    digest = hashlib.sha256()
    for begin in range(0, len(content), HASH_CHUNK_BYTES):
        digest.update(content[begin : begin + HASH_CHUNK_BYTES])
    return FileEntry(digest.hexdigest(), len(content))


def hash_directory(directory: Path, known: Mapping[str, FileEntry] | None = None) -> dict[str, FileEntry]:
    """Entries of all files below `directory` but the record; those in `known` are not read again."""
    entries = dict(known or {})
    for path in _files_below(directory):
        name = path.relative_to(directory).as_posix()
        if name not in entries:
            entries[name] = hash_file(path)
    return dict(sorted(entries.items()))


def write_record(directory: Path, record: ConversionRecord) -> None:
    """Writes `conversion.json` into `directory`, replacing one that is there."""
    document = {"format_version": FORMAT_VERSION, "tool": "vllm-omni", **asdict(record)}
    (directory / RECORD_NAME).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def read_record(directory: Path) -> ConversionRecord | None:
    """The directory's record, or None if it has none.

    Raises:
        WeightError: The record is not JSON, has another format version, or lacks or mistypes a field.
    """
    path = directory / RECORD_NAME
    if not path.is_file():
        return None
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise _damaged(path, f"it is not JSON ({error})") from error
    version = document.get("format_version") if isinstance(document, dict) else None
    if version != FORMAT_VERSION:
        raise _damaged(path, f"format_version is {version!r}, accepted: {FORMAT_VERSION}")
    return ConversionRecord(
        method=_text(path, document, "method"),
        dtype=_text(path, document, "dtype"),
        source=_entries(path, document, "source"),
        files=_entries(path, document, "files"),
        settings=_object(path, {"settings": {}} | document, "settings"),
        tool_version=_text(path, document, "tool_version"),
    )


def _files_below(directory: Path) -> Iterator[Path]:
    return (path for path in sorted(directory.rglob("*")) if path.is_file() and path != directory / RECORD_NAME)


def _text(path: Path, document: dict[str, Any], key: str) -> str:
    value = document.get(key)
    if not isinstance(value, str):
        raise _damaged(path, f"{key} is {value!r}, accepted: a string")
    return value


def _object(path: Path, document: dict[str, Any], key: str) -> dict[str, Any]:
    value = document.get(key)
    if not isinstance(value, dict):
        raise _damaged(path, f"{key} is {value!r}, accepted: an object")
    return value


def _entries(path: Path, document: dict[str, Any], key: str) -> dict[str, FileEntry]:
    return {name: _entry(path, name, value) for name, value in _object(path, document, key).items()}


def _entry(path: Path, name: str, value: Any) -> FileEntry:
    relative = PurePosixPath(name)
    if relative.is_absolute() or ".." in relative.parts:
        raise _damaged(path, f"file name {name!r} leaves the directory")
    sha256 = value.get("sha256") if isinstance(value, dict) else None
    num_bytes = value.get("bytes") if isinstance(value, dict) else None
    if not isinstance(sha256, str) or len(sha256) != 64 or not isinstance(num_bytes, int):
        raise _damaged(path, f"the entry of {name!r} is {value!r}, accepted: sha256 (64 hex digits) and bytes")
    return FileEntry(sha256, num_bytes)


def _damaged(path: Path, reason: str) -> WeightError:
    return WeightError(f"{path}: not a usable conversion record: {reason}; convert the source again")
