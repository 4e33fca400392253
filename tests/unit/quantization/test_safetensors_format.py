import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from vllm_omni.errors import WeightError
from vllm_omni.quantization.safetensors_format import MAX_HEADER_BYTES, TensorEntry, read_shard, write_shard

WriteRaw = Callable[[Any, int], Path]


def entry(begin: int, end: int, shape: list[int], dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_reads_what_the_safetensors_library_writes(tmp_path: Path) -> None:
    arrays: dict[str, np.ndarray] = {
        "a": np.ones((2, 3), np.float32),
        "b": np.zeros((), np.int64),
        "c": np.zeros((0, 4), np.float16),
    }
    save_file(arrays, tmp_path / "x.safetensors")
    shard = read_shard(tmp_path / "x.safetensors")
    assert shard.tensors == {
        "a": TensorEntry("F32", (2, 3)),
        "b": TensorEntry("I64", ()),
        "c": TensorEntry("F16", (0, 4)),
    }
    assert shard.file_bytes == (tmp_path / "x.safetensors").stat().st_size


def test_the_safetensors_library_reads_what_is_written(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    a, b = np.arange(6, dtype=np.float32).reshape(2, 3), np.arange(5, dtype=np.float16)
    data = a.tobytes() + b.tobytes()
    entries = [("a", TensorEntry("F32", (2, 3))), ("b", TensorEntry("F16", (5,)))]
    written = write_shard(path, entries, [data[:7], data[7:]])
    loaded = load_file(path)
    np.testing.assert_array_equal(loaded["a"], a)
    np.testing.assert_array_equal(loaded["b"], b)
    assert written.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert written.bytes == path.stat().st_size
    assert (written.bytes - len(data)) % 64 == 0


def test_writer_refuses_pieces_that_do_not_fill_the_header(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="wrote"):
        write_shard(tmp_path / "x", [("a", TensorEntry("F32", (2,)))], [bytes(7)])


def test_sub_byte_types_are_sized_in_bits(raw_safetensors: WriteRaw) -> None:
    shard = read_shard(raw_safetensors({"a": entry(0, 8, [2, 8], "F4")}, 8))
    assert shard.tensors["a"].num_bytes == 8


@pytest.mark.parametrize(
    ("header", "num_data_bytes", "message"),
    [
        ({"a": entry(0, 8, [2])}, 7, "truncated: it has .* bytes, its header needs"),
        ({"a": entry(0, 8, [2])}, 9, "too long: it has .* bytes, its header accounts for"),
        ({"a": entry(0, 8, [3])}, 8, r"tensor a is F32 \[3\], 12 bytes, but spans 8"),
        (
            {"a": entry(0, 8, [2]), "b": entry(4, 12, [2])},
            12,
            "tensor b begins at data byte 4, expected 8: it overlaps",
        ),
        ({"a": entry(0, 8, [2]), "b": entry(12, 20, [2])}, 20, "tensor b begins at data byte 12.*leaves a gap"),
        ({"a": entry(4, 12, [2])}, 12, "leaves a gap"),
        ({"a": entry(0, 8, [2], "F31")}, 8, "dtype 'F31', accepted: F64"),
        ({"a": entry(0, 8, [-2])}, 8, r"shape \[-2\]"),
        ({"a": entry(0, 8, [2.0])}, 8, r"shape \[2\.0\]"),  # type: ignore[list-item]
        ({"a": 5}, 8, "tensor a has dtype None"),
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [8]}}, 8, "data_offsets"),
        ("[1]", 0, "not a JSON object"),
        ("{nonsense", 0, "header is not valid"),
        ('{"a": {}, "a": {}}', 0, "'a' occurs twice"),
    ],
)
def test_a_bad_header_is_refused(raw_safetensors: WriteRaw, header: Any, num_data_bytes: int, message: str) -> None:
    path = raw_safetensors(header, num_data_bytes)
    with pytest.raises(WeightError, match=message) as caught:
        read_shard(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "it has 0 bytes"),
        (b"\x01\x00\x00", "it has 3 bytes"),
        ((100).to_bytes(8, "little") + b"{}", "truncated: the header alone ends at byte 108, the file has 10"),
        ((MAX_HEADER_BYTES + 1).to_bytes(8, "little"), "header length is 100000001, accepted: up to 100000000"),
        ((2).to_bytes(8, "little") + b"\xff\xfe", "header is not valid"),
    ],
)
def test_a_bad_prefix_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(WeightError, match=message):
        read_shard(path)
