import argparse
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFWriter
from tokenizers.pre_tokenizers import ByteLevel

from vllm_omni.entrypoints.cli import convert
from vllm_omni.errors import ConfigError, WeightError

TOKENS = ["<end>", "he", *sorted(ByteLevel.alphabet())]
SHAPES = {
    "token_embd": (len(TOKENS), 4),
    "output_norm": (4,),
    "blk.0.attn_norm": (4,),
    "blk.0.ffn_norm": (4,),
    "blk.0.attn_q": (4, 4),
    "blk.0.attn_k": (4, 4),
    "blk.0.attn_v": (4, 4),
    "blk.0.attn_output": (4, 4),
    "blk.0.ffn_gate": (4, 4),
    "blk.0.ffn_up": (4, 4),
    "blk.0.ffn_down": (4, 4),
}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(16)
    writer.add_embedding_length(4)
    writer.add_feed_forward_length(4)
    writer.add_head_count(2)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] + [1] * (len(TOKENS) - 1))
    writer.add_token_merges(["h e"])
    writer.add_eos_token_id(0)
    for name, shape in SHAPES.items():
        writer.add_tensor(f"{name}.weight", np.ones(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def run(*words: str | Path) -> int:
    parser = argparse.ArgumentParser()
    convert.add_arguments(parser)
    return convert.run(*parser.parse_known_args([str(word) for word in words]))


def test_converts_and_reports(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert run(source, "--out", out, "--dtype", "float16") == 0
    captured = capsys.readouterr()
    num_bytes = 2 * sum(int(np.prod(shape)) for shape in SHAPES.values())
    assert captured.out.startswith(f"directory={out} dtype=float16 tensors=11 bytes={num_bytes} seconds=")
    assert "model.layers.0.mlp.down_proj.weight" in captured.err
    assert (out / "model.safetensors").is_file()


def test_the_default_type_is_bfloat16(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(source, "--out", tmp_path / "out")
    assert "dtype=bfloat16" in capsys.readouterr().out


def test_an_existing_directory_needs_overwrite(source: Path, tmp_path: Path) -> None:
    run(source, "--out", tmp_path / "out")
    with pytest.raises(ConfigError, match="--overwrite"):
        run(source, "--out", tmp_path / "out")
    assert run(source, "--out", tmp_path / "out", "--overwrite") == 0


def test_errors_of_the_source_propagate(source: Path, tmp_path: Path) -> None:
    source.write_bytes(source.read_bytes()[:100])
    with pytest.raises(WeightError, match="truncated"):
        run(source, "--out", tmp_path / "out")
    with pytest.raises(ConfigError, match="no such file"):
        run(tmp_path / "absent.gguf", "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_arguments_are_checked(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run(source, "--out", "x", "--dtype", "int4")
    with pytest.raises(SystemExit):
        run(source)
    errors = capsys.readouterr().err
    assert "invalid choice: 'int4'" in errors
    assert "--out" in errors


def test_importing_the_subcommand_is_light() -> None:
    code = (
        "import sys, vllm_omni.entrypoints.cli.convert as c; "
        "print([m for m in ('numpy', 'gguf', 'tokenizers', 'tqdm', 'torch', 'vllm') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_unknown_arguments_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--numbr.*vllm-omni convert --help"):
        run("x.gguf", "--out", tmp_path / "out", "--numbr")
