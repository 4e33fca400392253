"""`gguf_import`: what the imported directory holds and what is refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from vllm_omni.errors import ConfigError, WeightError
from vllm_omni.quantization.checkpoint import check_checkpoint
from vllm_omni.quantization.conversion_record import hash_file, read_record
from vllm_omni.quantization.gguf_import import import_gguf, plan_import


def test_the_directory_is_a_sound_checkpoint(sample: Any, tmp_path: Path) -> None:
    out = tmp_path / "out"
    import_gguf(plan_import(sample.write(), "float32"), out)
    assert sorted(path.name for path in out.iterdir()) == [
        "chat_template.jinja",
        "config.json",
        "conversion.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    report = check_checkpoint(out)
    assert report.verified_hash
    assert report.num_tensors == len(sample.tensors)
    weights = load_file(out / "model.safetensors")
    np.testing.assert_array_equal(weights["model.layers.0.mlp.up_proj.weight"], sample.tensors["blk.0.ffn_up.weight"])
    assert (out / "chat_template.jinja").read_text() == sample.metadata["tokenizer.chat_template"]


def test_the_record_names_source_and_files(sample: Any, tmp_path: Path) -> None:
    out = tmp_path / "out"
    written = import_gguf(plan_import(sample.write(), "float16"), out)
    assert read_record(out) == written
    assert written.source == {"tiny.gguf": hash_file(sample.path)}
    assert written.dtype == "float16"
    assert written.settings == {"architecture": "llama", "source_tensor_types": {"F32": 11}}
    assert written.files["model.safetensors"] == hash_file(out / "model.safetensors")


def test_shards_and_index(sample: Any, tmp_path: Path) -> None:
    plan = plan_import(sample.write(), "bfloat16")
    import_gguf(plan, tmp_path / "out", max_shard_bytes=5000)
    report = check_checkpoint(tmp_path / "out")
    assert len(report.files) > 2
    assert report.files[0] == f"model-00001-of-{len(report.files):05d}.safetensors"
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == plan.weight_bytes == 2 * report.num_parameters


def test_progress_adds_up(sample: Any, tmp_path: Path) -> None:
    plan = plan_import(sample.write(), "float16")
    steps: list[tuple[str, int]] = []
    import_gguf(plan, tmp_path / "out", progress=lambda name, num_bytes: steps.append((name, num_bytes)))
    assert sum(num_bytes for _, num_bytes in steps) == plan.weight_bytes
    assert {name for name, _ in steps} == {name for name, _, _ in plan.tensors}


def test_no_chat_template_means_no_file(sample: Any, tmp_path: Path) -> None:
    del sample.metadata["tokenizer.chat_template"]
    import_gguf(plan_import(sample.write(), "float32"), tmp_path / "out")
    assert not (tmp_path / "out" / "chat_template.jinja").exists()


def test_missing_and_unknown_tensors_are_listed_before_anything_is_written(sample: Any) -> None:
    del sample.tensors["blk.0.attn_k.weight"]
    sample.tensors["blk.0.mystery.weight"] = np.ones(4, np.float32)
    with pytest.raises(WeightError, match=r"1 missing: .*k_proj\.weight; 1 unexpected: blk\.0\.mystery\.weight"):
        plan_import(sample.write(), "float32")


def test_a_damaged_value_leaves_no_directory(sample: Any, tmp_path: Path) -> None:
    sample.tensors["blk.0.ffn_norm.weight"][0] = np.nan
    plan = plan_import(sample.write(), "float32")
    with pytest.raises(WeightError, match="not finite"):
        import_gguf(plan, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.gguf"]


def test_a_part_of_a_split_file_is_refused(sample: Any) -> None:
    sample.metadata["split.count"] = 3
    with pytest.raises(WeightError, match="one part of a split GGUF"):
        plan_import(sample.write(), "float32")


def test_other_arguments_are_refused(sample: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--dtype 'int8', accepted: bfloat16, float16, float32"):
        plan_import(sample.write(), "int8")
    with pytest.raises(ConfigError, match="no such file"):
        plan_import(tmp_path / "absent.gguf", "float32")
    with pytest.raises(ConfigError, match="holds the source"):
        import_gguf(plan_import(sample.path, "float32"), tmp_path, overwrite=True)
