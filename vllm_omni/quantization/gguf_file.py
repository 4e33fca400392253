"""The header of a GGUF file: metadata and where each tensor lies, over a memory map.

    | magic "GGUF" | version u32 | tensors u64 | pairs u64 | key-value pairs | tensor infos | padding | tensor data |

Parsed here because the `gguf` package's reader builds array views per string (6 s for a vocabulary of 49 thousand on
a 2-core server) and does not notice a file that ends early. Block formats are the package's business: its tables give
the sizes and `gguf_tensors.py` calls its dequantizers.
"""

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from vllm_omni.errors import WeightError

MAGIC = b"GGUF"
ACCEPTED_VERSIONS = (2, 3)
ACCEPTED_TYPES = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q8_0")
DEFAULT_ALIGNMENT_BYTES = 32
MAX_DIMENSIONS = 4
# Value type number to struct code; 8 is a string and 9 an array.
SCALAR_CODES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
FLOAT32_TYPE, STRING_TYPE, ARRAY_TYPE = 6, 8, 9


@dataclass(frozen=True)
class GgufTensor:
    """One tensor of the file.

    Attributes:
        type_name: One of `ACCEPTED_TYPES`.
        shape: Dimensions, slowest first (the file lists them fastest first).
        begin: First byte in the file.
        num_bytes: Encoded size.
    """

    name: str
    type_name: str
    shape: tuple[int, ...]
    begin: int
    num_bytes: int


@dataclass(frozen=True)
class GgufFile:
    """A parsed file; tensor bytes stay in the memory map until they are sliced.

    Attributes:
        metadata: Key to number, truth value, text or list. 32-bit floats are given as the shortest decimal that
            names the same float, so 1e-5 stays 1e-5.
        data: [file bytes] uint8, read-only memory map.
    """

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]
    data: np.ndarray


def open_gguf(path: Path) -> GgufFile:
    """Maps a file and parses its header.

    Raises:
        WeightError: The file is not a little-endian GGUF of an accepted version, ends before what its header
            announces, or has a tensor of a type that is not accepted.
    """
    if path.stat().st_size < len(MAGIC):
        raise WeightError(f"{path}: not a GGUF file: it has {path.stat().st_size} bytes")
    data = np.memmap(path, mode="r", dtype=np.uint8)
    reader = _HeaderReader(path, data.data)
    num_tensors, num_pairs = reader.read_preamble()
    metadata = reader.read_metadata(num_pairs)
    infos = [reader.read_tensor_info() for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT_BYTES)
    if type(alignment) is not int or alignment < 1:
        raise reader.damaged(f"general.alignment is {alignment!r}, accepted: a whole number, 1 or more")
    data_begin = -(-reader.position // alignment) * alignment
    tensors = _place_tensors(reader, infos, data_begin)
    return GgufFile(path, metadata, tensors, data)


@dataclass(frozen=True)
class _TensorInfo:
    name: str
    shape: tuple[int, ...]
    type_number: int
    offset: int


class _HeaderReader:
    """Reads forward through the header and refuses to pass the end of the file."""

    def __init__(self, path: Path, data: memoryview):
        self.path = path
        self.data = data
        self.position = 0

    def damaged(self, reason: str) -> WeightError:
        return WeightError(f"{self.path}: not an intact GGUF file: {reason}; fetch the file again")

    def read_preamble(self) -> tuple[int, int]:
        """Checks magic and version; the numbers of tensors and of metadata pairs."""
        magic = bytes(self._take(len(MAGIC)))
        if magic != MAGIC:
            raise WeightError(f"{self.path}: not a GGUF file: it begins with {magic!r}, accepted: {MAGIC!r}")
        version = self._scalar("I")
        if version not in ACCEPTED_VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in ACCEPTED_VERSIONS
            order = " (a big-endian file)" if swapped else ""
            accepted = " and ".join(map(str, ACCEPTED_VERSIONS))
            raise WeightError(f"{self.path}: GGUF version {version}{order}, accepted: {accepted}, little-endian")
        return self._scalar("Q"), self._scalar("Q")

    def read_metadata(self, num_pairs: int) -> dict[str, Any]:
        metadata: dict[str, Any] = {}
        for _ in range(num_pairs):
            key = self._string()
            if key in metadata:
                raise self.damaged(f"metadata key {key!r} occurs twice")
            metadata[key] = self._value(key, self._scalar("I"))
        return metadata

    def read_tensor_info(self) -> _TensorInfo:
        name = self._string()
        num_dimensions = self._scalar("I")
        if not 1 <= num_dimensions <= MAX_DIMENSIONS:
            raise self.damaged(f"tensor {name} has {num_dimensions} dimensions, accepted: 1 to {MAX_DIMENSIONS}")
        shape = tuple(self._scalar("Q") for _ in range(num_dimensions))[::-1]
        return _TensorInfo(name, shape, self._scalar("I"), self._scalar("Q"))

    def _take(self, num_bytes: int) -> memoryview:
        end = self.position + num_bytes
        if end > len(self.data):
            raise self.damaged(f"truncated: its header reaches byte {end}, the file has {len(self.data)}")
        piece = self.data[self.position : end]
        self.position = end
        return piece

    def _scalar(self, code: str) -> Any:
        return struct.unpack("<" + code, self._take(struct.calcsize("<" + code)))[0]

    def _string(self) -> str:
        begin = self.position
        try:
            return str(self._take(self._scalar("Q")), "utf-8")
        except UnicodeDecodeError as error:
            raise self.damaged(f"the text at byte {begin} is not UTF-8 ({error.reason})") from error

    def _value(self, key: str, type_number: int) -> Any:
        if type_number == STRING_TYPE:
            return self._string()
        if type_number == ARRAY_TYPE:
            return self._array(key, self._scalar("I"), self._scalar("Q"))
        return self._numbers(key, type_number, 1)[0]

    def _array(self, key: str, item_type: int, count: int) -> list[Any]:
        if item_type == STRING_TYPE:
            return [self._string() for _ in range(count)]
        return self._numbers(key, item_type, count)

    def _numbers(self, key: str, type_number: int, count: int) -> list[Any]:
        if type_number not in SCALAR_CODES:
            raise self.damaged(f"metadata key {key!r} has value type {type_number}")
        code = SCALAR_CODES[type_number]
        piece = self._take(count * struct.calcsize("<" + code))
        values = list(struct.unpack(f"<{count}{code}", piece))
        if type_number == FLOAT32_TYPE:
            return [float(str(np.float32(value))) for value in values]
        return values


def _place_tensors(reader: _HeaderReader, infos: list[_TensorInfo], data_begin: int) -> dict[str, GgufTensor]:
    _require_accepted_types(reader.path, infos)
    tensors: dict[str, GgufTensor] = {}
    for info in infos:
        if info.name in tensors:
            raise reader.damaged(f"tensor {info.name} occurs twice")
        tensors[info.name] = _place_tensor(reader, info, data_begin)
    return tensors


def _place_tensor(reader: _HeaderReader, info: _TensorInfo, data_begin: int) -> GgufTensor:
    kind = GGMLQuantizationType(info.type_number)
    block_size, block_bytes = GGML_QUANT_SIZES[kind]
    if 0 in info.shape or info.shape[-1] % block_size:
        raise reader.damaged(
            f"tensor {info.name} of type {kind.name} has shape {list(info.shape)}, accepted: positive dimensions, "
            f"the last one a multiple of {block_size}"
        )
    num_elements = 1
    for dimension in info.shape:
        num_elements *= dimension
    begin, num_bytes = data_begin + info.offset, num_elements // block_size * block_bytes
    if begin + num_bytes > len(reader.data):
        raise reader.damaged(
            f"truncated: tensor {info.name} ends at byte {begin + num_bytes}, the file has {len(reader.data)}"
        )
    return GgufTensor(info.name, kind.name, info.shape, begin, num_bytes)


def _require_accepted_types(path: Path, infos: list[_TensorInfo]) -> None:
    refused = [(info.name, _type_name(info.type_number)) for info in infos]
    refused = [(name, kind) for name, kind in refused if kind not in ACCEPTED_TYPES]
    if refused:
        name, kind = refused[0]
        others = f" (and {len(refused) - 1} more tensors of such types)" if len(refused) > 1 else ""
        raise WeightError(
            f"{path}: tensor {name} has type {kind}{others}, accepted: {', '.join(ACCEPTED_TYPES)}; "
            "take a file quantized to one of these, such as Q8_0"
        )


def _type_name(number: int) -> str:
    names = {kind.value: kind.name for kind in GGMLQuantizationType}
    return names.get(number, f"number {number}")
