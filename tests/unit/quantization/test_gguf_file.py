import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader

from vllm_omni.errors import WeightError
from vllm_omni.quantization.gguf_file import open_gguf

KINDS = ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q8_0"]


def preamble(num_tensors: int, num_pairs: int, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_pairs)


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def refused(tmp_path: Path, content: bytes) -> str:
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(WeightError) as caught:
        open_gguf(path)
    assert str(path) in str(caught.value)
    return str(caught.value)


def test_agrees_with_the_gguf_package(sample: Any) -> None:
    sample.types = dict(zip(sample.tensors, KINDS, strict=False))
    sample.metadata["general.alignment"] = 64
    path = sample.write()
    ours, theirs = open_gguf(path), GGUFReader(path)
    fields = {key: field.contents() for key, field in theirs.fields.items() if not key.startswith("GGUF.")}
    floats = {key: value for key, value in fields.items() if isinstance(value, float)}
    assert {key: ours.metadata[key] for key in floats} == pytest.approx(floats, rel=1e-6)
    assert {**ours.metadata, **floats} == fields
    for tensor in theirs.tensors:
        mine = ours.tensors[tensor.name]
        assert (mine.type_name, mine.begin, mine.num_bytes) == (
            tensor.tensor_type.name,
            tensor.data_offset,
            tensor.n_bytes,
        )
        assert mine.shape == tuple(tensor.shape.tolist()[::-1])
    assert len(ours.tensors) == len(theirs.tensors)


def test_floats_keep_their_short_decimal(sample: Any) -> None:
    assert open_gguf(sample.write()).metadata["llama.attention.layer_norm_rms_epsilon"] == 1e-5


def test_an_unaccepted_type_names_tensor_type_and_what_is_accepted(sample: Any) -> None:
    content = sample.write().read_bytes()
    q5 = GGMLQuantizationType.Q5_K.value
    name = text("token_embd.weight")
    begin = content.index(name) + len(name) + 4 + 16
    sample.path.write_bytes(content[:begin] + struct.pack("<I", q5) + content[begin + 4 :])
    with pytest.raises(
        WeightError, match=r"token_embd\.weight has type Q5_K, accepted: F32, F16, BF16, Q4_0, Q4_1, Q8_0"
    ):
        open_gguf(sample.path)


def test_an_unknown_type_number_is_named(tmp_path: Path) -> None:
    info = text("a") + struct.pack("<IQIQ", 1, 32, 999, 0)
    assert "tensor a has type number 999, accepted: F32" in refused(tmp_path, preamble(1, 0) + info)


def test_a_truncated_tensor_names_both_sizes(sample: Any) -> None:
    path = sample.write()
    last = max(open_gguf(path).tensors.values(), key=lambda tensor: tensor.begin)
    size = last.begin + last.num_bytes - 1
    os.truncate(path, size)
    message = f"truncated: tensor {last.name} ends at byte {size + 1}, the file has {size}"
    with pytest.raises(WeightError, match=message):
        open_gguf(path)


@pytest.mark.parametrize("cut", [4, 6, 20, 30, 200, 3000])
def test_a_truncated_header_is_named(sample: Any, cut: int) -> None:
    path = sample.write()
    os.truncate(path, cut)
    with pytest.raises(WeightError, match=f"truncated: its header reaches byte .*, the file has {cut}"):
        open_gguf(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not a GGUF file: it has 0 bytes"),
        (b"PK\x03\x04 and more", r"not a GGUF file: it begins with b'PK\\x03\\x04'"),
        (preamble(0, 0, version=1), "GGUF version 1, accepted: 2 and 3"),
        (preamble(0, 0, version=3 << 24), "a big-endian file"),
        (preamble(0, 1) + text("k") + struct.pack("<II", 77, 0), "'k' has value type 77"),
        (preamble(0, 1) + text("k") + struct.pack("<IIQ", 9, 9, 1), "'k' has value type 9"),
        (preamble(0, 1) + text("k") + struct.pack("<IIQ", 9, 4, 1 << 60), "truncated"),
        (preamble(0, 1) + text("k") + struct.pack("<IIQ", 9, 8, 1 << 60), "truncated"),
        (preamble(1 << 60, 0), "truncated"),
        (preamble(0, 2) + 2 * (text("k") + struct.pack("<IB", 0, 1)), "'k' occurs twice"),
        (preamble(0, 1) + struct.pack("<Q", 2) + b"\xff\xfe", "the text at byte 24 is not UTF-8"),
        (preamble(1, 0) + text("a") + struct.pack("<I", 9), "tensor a has 9 dimensions"),
        (preamble(1, 0) + text("a") + struct.pack("<IQIQ", 1, 33, 8, 0), r"shape \[33\].*a multiple of 32"),
        (preamble(1, 0) + text("a") + struct.pack("<IQIQ", 1, 0, 0, 0), r"shape \[0\]"),
        (preamble(1, 0) + text("a") + struct.pack("<IQQIQ", 2, 1 << 62, 1 << 62, 0, 0), "truncated: tensor a"),
        (preamble(2, 0) + 2 * (text("a") + struct.pack("<IQIQ", 1, 1, 0, 0)) + bytes(64), "tensor a occurs twice"),
        (preamble(0, 1) + text("general.alignment") + struct.pack("<II", 4, 0), "general.alignment is 0"),
    ],
)
def test_a_damaged_header_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(WeightError, match=message):
        open_gguf(path)


def test_tensor_bytes_are_mapped_read_only(sample: Any) -> None:
    data = open_gguf(sample.write()).data
    assert isinstance(data, np.memmap)
    assert not data.flags.writeable
