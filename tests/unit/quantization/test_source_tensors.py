import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vllm_omni.errors import WeightError
from vllm_omni.quantization.conversion_record import hash_file
from vllm_omni.quantization.safetensors_format import TensorEntry, write_shard
from vllm_omni.quantization.source_tensors import HfSource, decode_floats, encode_floats


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_floats_survive_their_bytes(dtype: str) -> None:
    values = np.array([0.0, -0.0, 1.0, -1.5, 2.0**-14, 240.0], np.float32)
    raw = np.frombuffer(encode_floats(values, dtype), np.uint8)
    np.testing.assert_array_equal(decode_floats(raw, dtype), values)


def test_rows_come_from_the_right_shard(checkpoint: Any) -> None:
    directory = checkpoint.write_sharded()
    for path in directory.glob("*.safetensors"):
        content = bytearray(path.read_bytes())
        size = int.from_bytes(content[:8], "little")
        floats = np.arange((len(content) - 8 - size) // 4, dtype=np.float32)
        path.write_bytes(content[: 8 + size] + floats.tobytes())
    source = HfSource(directory)
    # In its shard: embedding [5, 4], input norm, q [4, 4]...
    np.testing.assert_array_equal(source.rows("model.embed_tokens.weight", 1, 3), [[4, 5, 6, 7], [8, 9, 10, 11]])
    assert source.rows("model.norm.weight", 1, 3).shape == (2,)
    assert source.plain("model.norm.weight") == source.rows("model.norm.weight", 0, 4).tobytes()
    assert sorted(source.hashes()) == ["config.json", *sorted(path.name for path in directory.glob("*.safetensors"))]


def test_hashes_are_of_the_files_that_were_opened(checkpoint: Any) -> None:
    """Another file under the name is not where the tensors come from."""
    directory = checkpoint.write()
    (path,) = directory.glob("*.safetensors")
    source, before = HfSource(directory), hash_file(path)
    other = path.with_name("other")
    other.write_bytes(bytes(path.stat().st_size))
    other.replace(path)
    assert source.hashes()[path.name] == before != hash_file(path)


def test_side_files_are_copied(checkpoint: Any, tmp_path: Path) -> None:
    directory = checkpoint.write()
    copied = ["tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja", "vocab.json"]
    for name in [*copied, "README.md", "training_args.bin"]:
        (directory / name).write_text(name)
    (tmp_path / "out").mkdir()
    HfSource(directory).write_side_files(tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(copied)


def test_a_quantized_checkpoint_is_refused(checkpoint: Any) -> None:
    checkpoint.config["quantization_config"] = {"quant_method": "awq"}
    with pytest.raises(WeightError, match=r"quantized already.*'awq'"):
        HfSource(checkpoint.write())


def test_other_types_are_refused(checkpoint: Any) -> None:
    directory = checkpoint.write()
    shapes = {name: tuple(shape) for name, shape in checkpoint.shapes.items()}
    entries = [(name, TensorEntry("F8_E4M3", shape)) for name, shape in shapes.items()]
    write_shard(directory / "model.safetensors", entries, [bytes(sum(entry.num_bytes for _, entry in entries))])
    with pytest.raises(WeightError, match="has type F8_E4M3, accepted: BF16, F16, F32"):
        HfSource(directory)


def test_a_missing_tokenizer_is_named(checkpoint: Any) -> None:
    source = HfSource(checkpoint.write())
    assert json.loads((source.path / "config.json").read_text()) == source.config
    with pytest.raises(WeightError, match=r"no tokenizer\.json.*--calibration none"):
        source.tokenizer()
