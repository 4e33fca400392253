"""The safetensors container: header checks without loading a tensor, and a writer that streams.

    | 8 bytes: N, little-endian | N bytes: JSON header, space-padded | tensor bytes, contiguous, in header order |

The header maps each tensor name to `dtype`, `shape` and `data_offsets` (begin and end, relative to byte 8 + N).
Reading imports nothing heavy; values of tensors are never looked at.
"""

import hashlib
import json
import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeGuard

from vllm_omni.errors import WeightError
from vllm_omni.quantization.conversion_record import FileEntry

# The reference implementation refuses longer headers, so a longer one is damage.
MAX_HEADER_BYTES = 100_000_000
# Padding the header keeps the first tensor aligned for a memory map.
HEADER_ALIGNMENT_BYTES = 64
DTYPE_BITS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("BOOL", "I8", "U8", "F8_E5M2", "F8_E4M3", "F8_E8M0"), 8),
    **dict.fromkeys(("F8_E5M2FNUZ", "F8_E4M3FNUZ"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a header.

    Attributes:
        dtype: A key of `DTYPE_BITS`.
        shape: Dimensions, slowest first; empty for a scalar.
    """

    dtype: str
    shape: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.num_elements * DTYPE_BITS[self.dtype] // 8


@dataclass(frozen=True)
class Shard:
    """One file.

    Attributes:
        file_bytes: Size on disk.
        tensors: By name.
        begins: Name to first byte in the file.
        metadata: The header's `__metadata__`, texts to texts; empty without it.
    """

    file_bytes: int
    tensors: dict[str, TensorEntry]
    begins: dict[str, int]
    metadata: dict[str, str]


def read_shard(path: Path) -> Shard:
    """Reads and checks one file's header against itself and the file's size.

    Raises:
        WeightError: The file is too short or too long for its header, the header is not valid, a tensor's byte
            range is not dtype times shape, or ranges overlap or leave a gap.
    """
    file_bytes = path.stat().st_size
    with path.open("rb") as stream:
        header_bytes, document = _read_header(path, stream, file_bytes)
    metadata = _parse_metadata(path, document.pop("__metadata__", None))
    tensors: dict[str, TensorEntry] = {}
    ranges: list[tuple[int, int, str]] = []
    for name, value in document.items():
        entry, begin, end = _parse_entry(path, name, value)
        tensors[name] = entry
        ranges.append((begin, end, name))
    _check_ranges(path, ranges)
    _check_size(path, file_bytes, 8 + header_bytes + max((end for _, end, _ in ranges), default=0))
    begins = {name: 8 + header_bytes + begin for begin, _, name in ranges}
    return Shard(file_bytes, tensors, begins, metadata)


def write_shard(path: Path, entries: Sequence[tuple[str, TensorEntry]], pieces: Iterable[bytes]) -> FileEntry:
    """Writes a file from pieces as they come, hashing on the way; nothing is held back in memory.

    Args:
        path: File to make.
        entries: Names and types, in file order.
        pieces: The tensors' bytes, concatenated in that order, little-endian and row-major, cut anywhere.
    """
    header = encode_header(entries)
    digest = hashlib.sha256(header)
    num_bytes = len(header)
    with path.open("wb") as stream:
        stream.write(header)
        for piece in pieces:
            stream.write(piece)
            digest.update(piece)
            num_bytes += len(piece)
    expected_bytes = len(header) + sum(entry.num_bytes for _, entry in entries)
    assert num_bytes == expected_bytes, f"{path}: wrote {num_bytes} bytes of {expected_bytes}"
    return FileEntry(digest.hexdigest(), num_bytes)


def encode_header(entries: Sequence[tuple[str, TensorEntry]], metadata: Mapping[str, str] | None = None) -> bytes:
    """The first bytes of a file, up to the first tensor; their number is a multiple of 64.

    Args:
        entries: Names and types, in file order.
        metadata: Further keys of `__metadata__`.
    """
    document: dict[str, Any] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    offset = 0
    for name, entry in entries:
        end = offset + entry.num_bytes
        document[name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(document, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % HEADER_ALIGNMENT_BYTES)
    return struct.pack("<Q", len(text)) + text


def _read_header(path: Path, stream: BinaryIO, file_bytes: int) -> tuple[int, dict[str, Any]]:
    if file_bytes < 8:
        raise _damaged(path, f"it has {file_bytes} bytes, fewer than the 8 of the header length")
    (header_bytes,) = struct.unpack("<Q", stream.read(8))
    if header_bytes > MAX_HEADER_BYTES:
        raise _damaged(path, f"its header length is {header_bytes}, accepted: up to {MAX_HEADER_BYTES}")
    if 8 + header_bytes > file_bytes:
        raise _damaged(path, f"truncated: the header alone ends at byte {8 + header_bytes}, the file has {file_bytes}")
    try:
        document = json.loads(stream.read(header_bytes), object_pairs_hook=_unique_keys)
    except ValueError as error:
        raise _damaged(path, f"its header is not valid: {error}") from error
    if not isinstance(document, dict):
        raise _damaged(path, "its header is not a JSON object")
    return header_bytes, document


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document = dict(pairs)
    if len(document) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} occurs twice")
    return document


def _parse_entry(path: Path, name: str, value: Any) -> tuple[TensorEntry, int, int]:
    fields = value if isinstance(value, dict) else {}
    dtype, shape, offsets = fields.get("dtype"), fields.get("shape"), fields.get("data_offsets")
    if dtype not in DTYPE_BITS:
        raise _damaged(path, f"tensor {name} has dtype {dtype!r}, accepted: {', '.join(DTYPE_BITS)}")
    if not _is_naturals(shape) or not _is_naturals(offsets) or len(offsets) != 2:
        raise _damaged(path, f"tensor {name} has shape {shape!r} and data_offsets {offsets!r}")
    begin, end = offsets
    bits = math.prod(shape) * DTYPE_BITS[dtype]
    if bits != 8 * (end - begin):
        raise _damaged(path, f"tensor {name} is {dtype} {shape}, {bits / 8:g} bytes, but spans {end - begin}")
    return TensorEntry(dtype, tuple(shape)), begin, end


def _parse_metadata(path: Path, value: Any) -> dict[str, str]:
    value = {} if value is None else value
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        raise _damaged(path, "its __metadata__ is not an object of texts")
    return value


def _is_naturals(values: Any) -> TypeGuard[list[int]]:
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)


def _check_ranges(path: Path, ranges: list[tuple[int, int, str]]) -> None:
    position = 0
    for begin, end, name in sorted(ranges):
        if begin != position:
            kind = "overlaps the tensor before it" if begin < position else "leaves a gap before it"
            raise _damaged(path, f"tensor {name} begins at data byte {begin}, expected {position}: it {kind}")
        position = end


def _check_size(path: Path, file_bytes: int, expected_bytes: int) -> None:
    if file_bytes < expected_bytes:
        raise _damaged(path, f"truncated: it has {file_bytes} bytes, its header needs {expected_bytes}")
    if file_bytes > expected_bytes:
        raise _damaged(path, f"too long: it has {file_bytes} bytes, its header accounts for {expected_bytes}")


def _damaged(path: Path, reason: str) -> WeightError:
    return WeightError(f"{path}: not an intact safetensors file: {reason}; fetch or convert the checkpoint again")
