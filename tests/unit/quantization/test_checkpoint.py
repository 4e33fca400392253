import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from vllm_omni.errors import WeightError
from vllm_omni.quantization import verified_files
from vllm_omni.quantization.checkpoint import CheckpointReport, check_checkpoint
from vllm_omni.quantization.conversion_record import ConversionRecord, hash_directory, write_record

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def add_record(directory: Path) -> Path:
    record = ConversionRecord("test", "float32", source={}, files=hash_directory(directory))
    write_record(directory, record)
    return directory


def flip_last_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def test_a_sound_single_file(checkpoint: Any) -> None:
    directory = checkpoint.write()
    assert check_checkpoint(directory) == CheckpointReport(
        total_bytes=(directory / "model.safetensors").stat().st_size,
        num_tensors=11,
        num_parameters=20 + 3 * 4 + 16 + 8 + 8 + 16 + 3 * 24,
        files=("model.safetensors",),
        verified_hash=False,
    )


@pytest.mark.parametrize("with_index", [True, False])
def test_sound_shards(checkpoint: Any, with_index: bool) -> None:
    report = check_checkpoint(checkpoint.write_sharded(with_index))
    assert report.files == SHARDS
    assert report.num_tensors == 11


def test_consolidated_copies_are_skipped(checkpoint: Any) -> None:
    directory = checkpoint.write()
    checkpoint.write_shard("consolidated.safetensors", {"other.name": [1]})
    assert check_checkpoint(directory).files == ("model.safetensors",)


@pytest.mark.parametrize("with_index", [True, False])
def test_a_missing_shard_is_named(checkpoint: Any, with_index: bool) -> None:
    directory = checkpoint.write_sharded(with_index)
    (directory / SHARDS[1]).unlink()
    with pytest.raises(WeightError, match=f"1 of 2 weight files are missing: {SHARDS[1]}"):
        check_checkpoint(directory)


def test_a_truncated_file_names_both_sizes(checkpoint: Any) -> None:
    path = checkpoint.write() / "model.safetensors"
    size = path.stat().st_size
    os.truncate(path, size - 5)
    with pytest.raises(WeightError, match=f"truncated: it has {size - 5} bytes, its header needs {size}"):
        check_checkpoint(path.parent)


def test_a_duplicate_tensor_names_both_files(checkpoint: Any) -> None:
    directory = checkpoint.write()
    checkpoint.write_shard("more.safetensors", {"model.norm.weight": [4]})
    with pytest.raises(WeightError, match=r"model\.norm\.weight is in both model\.safetensors and more\.safetensors"):
        check_checkpoint(directory)


def test_missing_unexpected_and_mismatched_come_together(checkpoint: Any) -> None:
    del checkpoint.shapes["model.norm.weight"]
    checkpoint.shapes |= {"model.extra": [1], "model.embed_tokens.weight": [5, 3]}
    with pytest.raises(WeightError, match=r"1 missing: model\.norm\.weight; 1 unexpected: model\.extra; 1 of another"):
        check_checkpoint(checkpoint.write())


@pytest.mark.parametrize("changes", [{"quantization_config": {"quant_method": "gptq"}}, {"model_type": "something"}])
def test_other_kinds_are_checked_for_structure_only(checkpoint: Any, changes: dict[str, Any]) -> None:
    checkpoint.config |= changes
    checkpoint.shapes = {"anything": [3]}
    directory = checkpoint.write()
    assert check_checkpoint(directory).num_parameters == 3
    os.truncate(directory / "model.safetensors", 20)
    with pytest.raises(WeightError, match="truncated"):
        check_checkpoint(directory)


def test_an_index_that_names_another_shard_is_refused(checkpoint: Any) -> None:
    directory = checkpoint.write_sharded()
    index = json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"]
    checkpoint.write_index(index | {"model.embed_tokens.weight": SHARDS[1]})
    with pytest.raises(WeightError, match=rf"embed_tokens\.weight is listed in {SHARDS[1]} and found in {SHARDS[0]}"):
        check_checkpoint(directory)


def test_an_index_that_omits_a_tensor_is_refused(checkpoint: Any) -> None:
    directory = checkpoint.write_sharded()
    index = json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"]
    del index["model.norm.weight"]
    checkpoint.write_index(index)
    with pytest.raises(WeightError, match=r"model.norm.weight is listed in no shard"):
        check_checkpoint(directory)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("{}", "weight_map is None"),
        ("nonsense", "not JSON"),
        ('{"weight_map": {"a": "../x.safetensors"}}', "a lies in '../x.safetensors'"),
        ('{"weight_map": {"a": 3}}', "a lies in 3"),
    ],
)
def test_an_unusable_index_is_refused(checkpoint: Any, index: str, message: str) -> None:
    directory = checkpoint.write()
    (directory / "model.safetensors.index.json").write_text(index)
    with pytest.raises(WeightError, match=message):
        check_checkpoint(directory)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (["config.json", "pytorch_model.bin"], r"it has only pytorch_model\.bin; accepted: .*safetensors"),
        (["config.json"], "it has no weight file; accepted: .*safetensors"),
        (["model.safetensors"], r"it has no config\.json; accepted: .*safetensors"),
    ],
)
def test_other_formats_are_refused(tmp_path: Path, files: list[str], message: str) -> None:
    for name in files:
        (tmp_path / name).write_text("{}")
    with pytest.raises(WeightError, match=message):
        check_checkpoint(tmp_path)


def test_no_directory(tmp_path: Path) -> None:
    with pytest.raises(WeightError, match="no such directory"):
        check_checkpoint(tmp_path / "absent")


@pytest.mark.parametrize(("text", "message"), [("{", "not JSON"), ("[]", "holds a list")])
def test_an_unusable_config_is_refused(checkpoint: Any, text: str, message: str) -> None:
    directory = checkpoint.write()
    (directory / "config.json").write_text(text)
    with pytest.raises(WeightError, match=message):
        check_checkpoint(directory)


def test_a_recorded_directory_is_verified(checkpoint: Any) -> None:
    assert check_checkpoint(add_record(checkpoint.write())).verified_hash


@pytest.mark.parametrize("with_marker", [True, False])
def test_a_tampered_byte_is_found(checkpoint: Any, with_marker: bool) -> None:
    directory = add_record(checkpoint.write())
    if with_marker:
        check_checkpoint(directory)
    flip_last_byte(directory / "model.safetensors")
    with pytest.raises(WeightError, match=r"model\.safetensors has sha256 [0-9a-f]{64}, recorded [0-9a-f]{64}"):
        check_checkpoint(directory)


def test_a_changed_size_is_found_before_hashing(checkpoint: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = add_record(checkpoint.write())
    (directory / "config.json").write_text(json.dumps(checkpoint.config) + "  ")
    monkeypatch.setattr(verified_files, "hash_file", None)
    with pytest.raises(WeightError, match=r"config\.json has \d+ bytes, recorded \d+"):
        check_checkpoint(directory)


def test_a_listed_file_that_is_missing_is_found(checkpoint: Any) -> None:
    directory = checkpoint.write()
    (directory / "tokenizer.json").write_text("{}")
    add_record(directory)
    (directory / "tokenizer.json").unlink()
    with pytest.raises(WeightError, match=r"tokenizer\.json is missing, but listed in conversion\.json"):
        check_checkpoint(directory)


def test_a_weight_file_that_the_record_does_not_list_is_refused(checkpoint: Any) -> None:
    directory = add_record(checkpoint.write_sharded())
    document = json.loads((directory / "conversion.json").read_text())
    del document["files"][SHARDS[0]]
    (directory / "conversion.json").write_text(json.dumps(document))
    with pytest.raises(WeightError, match=rf"does not list {SHARDS[0]}"):
        check_checkpoint(directory)


def test_an_unchanged_file_is_not_hashed_again(checkpoint: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = add_record(checkpoint.write())
    check_checkpoint(directory)
    monkeypatch.setattr(verified_files, "hash_file", None)
    assert check_checkpoint(directory).verified_hash


def test_a_new_record_invalidates_the_marker(checkpoint: Any) -> None:
    directory = add_record(checkpoint.write())
    check_checkpoint(directory)
    text = (directory / "conversion.json").read_text()
    sha256 = json.loads(text)["files"]["model.safetensors"]["sha256"]
    (directory / "conversion.json").write_text(text.replace(sha256, "0" * 64))
    with pytest.raises(WeightError, match=f"recorded {'0' * 64}"):
        check_checkpoint(directory)


@pytest.mark.parametrize("content", ["nonsense", "[]"])
def test_a_damaged_marker_means_hashing_again(checkpoint: Any, cache_dir: Path, content: str) -> None:
    directory = add_record(checkpoint.write())
    check_checkpoint(directory)
    (marker,) = (cache_dir / "verified").iterdir()
    marker.write_text(content)
    flip_last_byte(directory / "model.safetensors")
    with pytest.raises(WeightError, match="has sha256"):
        check_checkpoint(directory)


def test_an_unwritable_cache_warns_once_and_still_verifies(
    checkpoint: Any, cache_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = add_record(checkpoint.write())
    cache_dir.write_text("a file where the directory should be")
    verified_files._warn_unwritable.cache_clear()
    assert check_checkpoint(directory).verified_hash
    assert check_checkpoint(directory).verified_hash
    events = [record.message.split()[0] for record in caplog.records if record.levelname == "WARNING"]
    assert events.count("event=verified_cache_unwritable") == 1


def test_importing_needs_no_array_library() -> None:
    code = (
        "import sys, vllm_omni.quantization.checkpoint as c; "
        "print([m for m in ('torch', 'numpy', 'vllm', 'transformers', 'gguf') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
