import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vllm_omni.errors import WeightError
from vllm_omni.quantization.artifact import is_artifact, matrix_table, read_artifact
from vllm_omni.quantization.artifact_writer import ArtifactFile
from vllm_omni.quantization.checkpoint import check_checkpoint
from vllm_omni.quantization.conversion_record import ConversionRecord, hash_directory, write_record
from vllm_omni.quantization.packed_format import MatrixFormat
from vllm_omni.quantization.safetensors_format import TensorEntry

NORMS = ("model.norm", "model.layers.0.input_layernorm", "model.layers.0.post_attention_layernorm")
SHAPES = {
    "model.embed_tokens": (20, 40),
    "model.layers.0.self_attn.q_proj": (40, 40),
    "model.layers.0.self_attn.k_proj": (20, 40),
    "model.layers.0.self_attn.v_proj": (20, 40),
    "model.layers.0.self_attn.o_proj": (40, 40),
    "model.layers.0.mlp.gate_proj": (64, 40),
    "model.layers.0.mlp.up_proj": (64, 40),
    "model.layers.0.mlp.down_proj": (40, 64),
}
NUM_WEIGHTS = 20 * 40 + 2 * 40 * 40 + 2 * 20 * 40 + 3 * 64 * 40 + 3 * 40
DOWN = "model.layers.0.mlp.down_proj.weight"


def artifact_config() -> dict[str, Any]:
    return {
        "architectures": ["OmniDecoderForCausalLM"],
        "model_type": "llama",
        "hidden_size": 40,
        "intermediate_size": 64,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "num_hidden_layers": 1,
        "vocab_size": 20,
        "tie_word_embeddings": True,
        "quantization_config": {"quant_method": "omni_int4", "version": 1, "bits": 4, "group_size": 32},
    }


@dataclass
class Sample:
    """A one-layer artifact with random bytes for weights; tests change its parts before `write`."""

    directory: Path
    config: dict[str, Any] = field(default_factory=artifact_config)
    matrices: dict[str, MatrixFormat] = field(
        default_factory=lambda: {f"{name}.weight": MatrixFormat(*shape, 4, 32) for name, shape in SHAPES.items()}
    )
    tensors: dict[str, TensorEntry] = field(
        default_factory=lambda: {f"{name}.weight": TensorEntry("BF16", (40,)) for name in NORMS}
    )

    def write(self) -> Path:
        self.directory.mkdir()
        (self.directory / "config.json").write_text(json.dumps(self.config))
        file = ArtifactFile(self.directory, self.matrices, self.tensors)
        file.prepare()
        rng = np.random.default_rng(0)
        for name, entry in self.entries().items():
            file.write(name, [rng.bytes(entry.num_bytes)])
        write_record(self.directory, ConversionRecord("test", "bfloat16", {}, hash_directory(self.directory)))
        return self.directory

    def entries(self) -> dict[str, TensorEntry]:
        return {name: TensorEntry("U8", each.packed_shape) for name, each in self.matrices.items()} | self.tensors


@pytest.fixture
def sample(tmp_path: Path) -> Sample:
    return Sample(tmp_path / "artifact")


def edit_header(directory: Path, before: str, after: str) -> None:
    """Replaces text of the weight file's header by text of the same length, and forgets the record."""
    assert len(before) == len(after)
    path = directory / "model.safetensors"
    content = path.read_bytes()
    assert content.count(before.encode()) >= 1
    path.write_bytes(content.replace(before.encode(), after.encode(), 1))
    (directory / "conversion.json").unlink()


def test_a_sound_artifact(sample: Sample) -> None:
    directory = sample.write()
    artifact = read_artifact(directory)
    assert {name: each.format for name, each in artifact.matrices.items()} == sample.matrices
    assert {name: each.entry for name, each in artifact.tensors.items()} == sample.tensors
    assert artifact.num_weights == NUM_WEIGHTS
    size = (directory / "model.safetensors").stat().st_size
    assert artifact.bits_per_weight == 8 * size / NUM_WEIGHTS
    assert artifact.config["model_type"] == "llama"


def test_offsets_are_where_the_bytes_are(sample: Sample) -> None:
    artifact = read_artifact(sample.write())
    data = (artifact.directory / "model.safetensors").read_bytes()
    rng = np.random.default_rng(0)
    for name, entry in sample.entries().items():
        stored = artifact.matrices.get(name) or artifact.tensors[name]
        assert data[stored.begin : stored.begin + entry.num_bytes] == rng.bytes(entry.num_bytes)
        assert name not in artifact.matrices or stored.begin % 64 == 0


def test_the_checkpoint_check_accepts_it(sample: Sample) -> None:
    report = check_checkpoint(sample.write())
    assert report.num_parameters == NUM_WEIGHTS
    assert report.num_tensors == 11
    assert report.verified_hash


def test_a_truncated_file_is_refused(sample: Sample) -> None:
    path = sample.write() / "model.safetensors"
    os.truncate(path, path.stat().st_size - 64)
    with pytest.raises(WeightError, match=r"truncated: it has \d+ bytes, its header needs \d+"):
        check_checkpoint(path.parent)


def test_a_tampered_byte_is_refused(sample: Sample) -> None:
    path = sample.write() / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1000] ^= 1
    path.write_bytes(content)
    with pytest.raises(WeightError, match=r"model\.safetensors has sha256 .*, recorded"):
        check_checkpoint(path.parent)


@pytest.mark.parametrize("version", [2, "1", None])
def test_another_version_in_the_configuration_is_refused(sample: Sample, version: Any) -> None:
    sample.config["quantization_config"]["version"] = version
    with pytest.raises(WeightError, match=f"version {version}, this build reads 1; convert again with `vllm-omni quan"):
        check_checkpoint(sample.write())


def test_another_version_in_the_weight_file_is_refused(sample: Sample) -> None:
    directory = sample.write()
    edit_header(directory, r"\"version\":1", r"\"version\":2")
    with pytest.raises(WeightError, match=r"model\.safetensors: omni_int4 version 2, this build reads 1"):
        check_checkpoint(directory)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 48}, r"embed_tokens\.weight is \[20, 40\], expected \[20, 48\]"),
        ({"num_hidden_layers": 2}, r"9 missing: model\.layers\.1"),
        ({"model_type": "qwen2"}, r"3 missing: model\.layers\.0\.self_attn\.q_proj\.bias"),
        ({"tie_word_embeddings": False}, r"1 missing: lm_head\.weight"),
        ({"model_type": "mamba"}, "model_type is 'mamba', accepted in an artifact: llama"),
    ],
)
def test_another_model_is_refused(sample: Sample, changes: dict[str, Any], message: str) -> None:
    sample.config |= changes
    with pytest.raises(WeightError, match=message):
        check_checkpoint(sample.write())


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        (r"\"bits\":4", r"\"bits\":6", "matrix model.embed_tokens.weight: bits is 6, accepted: 4, 8"),
        (r"\"bits\":4", r"\"bits\":8", r"is stored as U8 \[2, 2, 320\], its table entry \(20 x 40, 8 bits"),
        (r"\"group_size\":32", r"\"group_size\":48", "group_size is 48, accepted: 32, 64, 128"),
        (r"\"rows\":20", r"\"rows\":40", "needs U8 .3, 2, 320."),
        (r"\"rows\":20", r"\"rowz\":20", "rows is None"),
        ('"omni_int4":', '"omni_int5":', "its __metadata__ has no key omni_int4"),
        (r"\"matrices\":{", r"\"matricez\":{", "matrices is None"),
        (r"{\"version\"", r"[\"version\"", "is not JSON"),
        (r"down_proj.weight\":{\"rows", r"dawn_proj.weight\":{\"rows", r"lists .*dawn_proj\.weight, which it does not"),
    ],
)
def test_a_damaged_table_is_refused(sample: Sample, before: str, after: str, message: str) -> None:
    directory = sample.write()
    edit_header(directory, before, after)
    with pytest.raises(WeightError, match=message) as caught:
        check_checkpoint(directory)
    assert "convert again" in str(caught.value)


def test_a_misaligned_matrix_is_refused(sample: Sample) -> None:
    path = sample.write() / "model.safetensors"
    content = path.read_bytes()
    (size,) = np.frombuffer(content[:8], "<u8")
    path.write_bytes(int(size + 32).to_bytes(8, "little") + content[8 : 8 + size] + b" " * 32 + content[8 + size :])
    with pytest.raises(WeightError, match=r"matrix model\.\S+ begins at byte \d+, accepted: multiples of 64"):
        read_artifact(path.parent)


def test_a_matrix_that_is_not_packed_is_refused(sample: Sample) -> None:
    del sample.matrices[DOWN]
    sample.tensors[DOWN] = TensorEntry("BF16", (40, 64))
    with pytest.raises(WeightError, match=r"mlp\.down_proj\.weight are stored unpacked"):
        check_checkpoint(sample.write())


def test_a_packed_matrix_without_table_entry_is_refused(sample: Sample) -> None:
    sample.tensors[DOWN] = TensorEntry("U8", sample.matrices.pop(DOWN).packed_shape)
    with pytest.raises(WeightError, match=r"down_proj\.weight has dtype U8 and is not in the table of matrices"):
        check_checkpoint(sample.write())


def test_a_second_copy_of_a_tied_matrix_is_refused(sample: Sample) -> None:
    sample.matrices["lm_head.weight"] = MatrixFormat(20, 40, 4, 32)
    with pytest.raises(WeightError, match=r"holds lm_head\.weight, which its configuration ties"):
        check_checkpoint(sample.write())


def test_an_untied_head_is_accepted(sample: Sample) -> None:
    sample.config["tie_word_embeddings"] = False
    sample.matrices["lm_head.weight"] = MatrixFormat(20, 40, 8, 64)
    assert "lm_head.weight" in read_artifact(sample.write()).matrices


def test_another_checkpoint_is_no_artifact(checkpoint: Any) -> None:
    directory = checkpoint.write()
    with pytest.raises(WeightError, match=r"quantization_config is None, accepted: .*vllm-omni quantize"):
        read_artifact(directory)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"quantization_config": {"quant_method": "omni_int4", "version": 9}}, True),
        ({"quantization_config": {"quant_method": "gptq"}}, False),
        ({"quantization_config": None}, False),
        ({}, False),
    ],
)
def test_artifacts_are_recognised(config: dict[str, Any], expected: bool) -> None:
    assert is_artifact(config) is expected


def test_the_table_is_as_documented() -> None:
    document = json.loads(matrix_table({"a.weight": MatrixFormat(576, 1536, 4, 32)}))
    assert document == {
        "version": 1,
        "matrices": {"a.weight": {"rows": 576, "columns": 1536, "bits": 4, "group_size": 32}},
    }


def test_importing_needs_no_array_library() -> None:
    code = (
        "import sys, vllm_omni.quantization.artifact; "
        "print([m for m in ('torch', 'numpy', 'vllm', 'gguf', 'tokenizers') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
