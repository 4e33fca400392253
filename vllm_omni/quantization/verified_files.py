"""Verification of a converted directory against its record, remembered between starts.

Sizes are compared every time. A file is hashed unless a marker says that the same file (size, modification time in
nanoseconds, inode) had the expected hash before. The marker is a convenience: losing it costs one more hashing.
"""

import functools
import hashlib
import json
import logging
import os
from pathlib import Path
from typing import Any

from vllm_omni import envs
from vllm_omni.errors import WeightError
from vllm_omni.quantization.conversion_record import RECORD_NAME, ConversionRecord, hash_file

logger = logging.getLogger(__name__)

Marker = dict[str, list[Any]]


def verify_files(directory: Path, record: ConversionRecord) -> None:
    """Checks every file that the record lists.

    Args:
        directory: The converted directory.
        record: Its record.

    Raises:
        WeightError: A file is missing, or its size or content differs from the record.
    """
    for name, entry in record.files.items():
        _check_size(directory, name, entry.bytes)
    marker_path = _marker_path(directory)
    known = _read_marker(marker_path)
    seen: Marker = {}
    for name, entry in record.files.items():
        # Taken before hashing: a file that changes meanwhile does not match its marker next time.
        identity = _identity(directory / name, entry.sha256)
        if known.get(name) != identity:
            _check_hash(directory, name, entry.sha256)
        seen[name] = identity
    if seen != known:
        _write_marker(marker_path, seen)


def _check_size(directory: Path, name: str, expected_bytes: int) -> None:
    path = directory / name
    if not path.is_file():
        raise _differs(directory, f"{name} is missing, but listed")
    actual_bytes = path.stat().st_size
    if actual_bytes != expected_bytes:
        raise _differs(directory, f"{name} has {actual_bytes} bytes, recorded {expected_bytes}")


def _check_hash(directory: Path, name: str, expected: str) -> None:
    actual = hash_file(directory / name).sha256
    if actual != expected:
        raise _differs(directory, f"{name} has sha256 {actual}, recorded {expected}")


def _identity(path: Path, sha256: str) -> list[Any]:
    stat = path.stat()
    return [stat.st_size, stat.st_mtime_ns, stat.st_ino, sha256]


def _marker_path(directory: Path) -> Path:
    key = hashlib.sha256(os.fsencode(directory.resolve())).hexdigest()
    return Path(envs.VLLM_OMNI_CACHE_DIR) / "verified" / f"{key}.json"


def _read_marker(path: Path) -> Marker:
    try:
        document = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        logger.warning("event=verified_marker_unreadable path=%s error=%r action=hash_again", path, str(error))
        return {}
    return document if isinstance(document, dict) else {}


def _write_marker(path: Path, marker: Marker) -> None:
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(marker), encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        _warn_unwritable(str(path.parent), str(error))


@functools.cache
def _warn_unwritable(directory: str, reason: str) -> None:
    """Says once per directory and reason that the next start hashes again."""
    logger.warning("event=verified_cache_unwritable directory=%s error=%r action=hash_every_start", directory, reason)


def _differs(directory: Path, reason: str) -> WeightError:
    return WeightError(
        f"{directory}: {reason} in {RECORD_NAME}; the conversion was damaged or changed after it was written. "
        f"Convert the source again (or delete {RECORD_NAME} if the change is intended)"
    )
