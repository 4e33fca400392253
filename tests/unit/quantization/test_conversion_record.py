import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from vllm_omni.errors import WeightError
from vllm_omni.quantization.conversion_record import (
    HASH_CHUNK_BYTES,
    ConversionRecord,
    FileEntry,
    hash_directory,
    hash_file,
    read_record,
    write_record,
)

ENTRY = FileEntry("a" * 64, 3)
RECORD = ConversionRecord(
    "gguf-import", "bfloat16", {"m.gguf": ENTRY}, {"config.json": ENTRY}, {"architecture": "llama"}
)


def test_round_trip(tmp_path: Path) -> None:
    write_record(tmp_path, RECORD)
    assert read_record(tmp_path) == RECORD


def test_no_record(tmp_path: Path) -> None:
    assert read_record(tmp_path) is None


def test_hash_file_spans_chunks(tmp_path: Path) -> None:
    content = bytes(range(251)) * (HASH_CHUNK_BYTES // 200)
    (tmp_path / "x").write_bytes(content)
    assert hash_file(tmp_path / "x") == FileEntry(hashlib.sha256(content).hexdigest(), len(content))


def test_hash_directory_takes_known_entries_and_skips_the_record(tmp_path: Path) -> None:
    write_record(tmp_path, RECORD)
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "b.txt").write_text("b")
    (tmp_path / "a.txt").write_text("a")
    assert hash_directory(tmp_path, {"a.txt": ENTRY}) == {
        "a.txt": ENTRY,
        "sub/b.txt": FileEntry(hashlib.sha256(b"b").hexdigest(), 1),
    }


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format_version": 2}, "format_version is 2, accepted: 1"),
        ({"dtype": 5}, "dtype is 5, accepted: a string"),
        ({"files": []}, r"files is \[\], accepted: an object"),
        ({"files": {"../x": {"sha256": "a" * 64, "bytes": 1}}}, "'../x' leaves the directory"),
        ({"files": {"/x": {"sha256": "a" * 64, "bytes": 1}}}, "'/x' leaves the directory"),
        ({"files": {"x": {"sha256": "abc", "bytes": 1}}}, "the entry of 'x'"),
        ({"source": {"x": 7}}, "the entry of 'x' is 7"),
        ({"settings": [1]}, r"settings is \[1\], accepted: an object"),
    ],
)
def test_an_unusable_field_is_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    write_record(tmp_path, RECORD)
    path = tmp_path / "conversion.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(WeightError, match=message):
        read_record(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]"])
def test_an_unreadable_record(tmp_path: Path, text: str) -> None:
    (tmp_path / "conversion.json").write_text(text)
    with pytest.raises(WeightError, match="not a usable conversion record"):
        read_record(tmp_path)
