import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from vllm_omni.entrypoints.cli import quantize
from vllm_omni.errors import ConfigError, WeightError
from vllm_omni.quantization import packed_format, quantize_settings

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "vocab_size": 24,
    "tie_word_embeddings": True,
}
SHAPES = {
    "model.embed_tokens": (24, 32),
    "model.norm": (32,),
    "model.layers.0.input_layernorm": (32,),
    "model.layers.0.post_attention_layernorm": (32,),
    "model.layers.0.self_attn.q_proj": (32, 32),
    "model.layers.0.self_attn.k_proj": (32, 32),
    "model.layers.0.self_attn.v_proj": (32, 32),
    "model.layers.0.self_attn.o_proj": (32, 32),
    "model.layers.0.mlp.gate_proj": (64, 32),
    "model.layers.0.mlp.up_proj": (64, 32),
    "model.layers.0.mlp.down_proj": (32, 64),
}


@pytest.fixture(autouse=True)
def cache_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_OMNI_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(CONFIG))
    rng = np.random.default_rng(0)
    tensors = {f"{name}.weight": rng.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}
    save_file(tensors, directory / "model.safetensors")
    return directory


def parse(*words: str | Path) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser()
    quantize.add_arguments(parser)
    return parser.parse_known_args([str(word) for word in words])


def run(*words: str | Path) -> int:
    return quantize.run(*parse(*words))


def test_quantizes_and_reports(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert run(source, "--out", out, "--bits", "8", "--group-size", "32", "--override", "down=4:64") == 0
    captured = capsys.readouterr()
    assert captured.out.startswith(f"directory={out} method=rtn bits=8 group_size=32 bits_per_weight=")
    assert "model.layers.0.mlp.down_proj.weight" in captured.err
    assert json.loads((out / "config.json").read_text())["quantization_config"]["bits"] == 8


def test_defaults(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(source, "--out", tmp_path / "out")
    assert " method=rtn bits=4 group_size=64 " in capsys.readouterr().out


def test_an_existing_directory_needs_overwrite(source: Path, tmp_path: Path) -> None:
    run(source, "--out", tmp_path / "out")
    with pytest.raises(ConfigError, match="--overwrite"):
        run(source, "--out", tmp_path / "out")
    assert run(source, "--out", tmp_path / "out", "--overwrite") == 0


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], {"keep_grid": True, "method": "rtn", "has_text": False}),
        (["--override", "head=8"], {"keep_grid": True}),
        (["--bits", "4"], {"keep_grid": False, "bits": 4}),
        (["--group-size", "128"], {"keep_grid": False, "group_size": 128}),
        (["--method", "rtn"], {"keep_grid": False, "has_text": False}),
        (["--method", "gptq"], {"keep_grid": False, "has_text": True}),
        (["--calibration", "default"], {"keep_grid": False, "has_text": True, "method": "rtn"}),
    ],
)
def test_settings_follow_the_flags(words: list[str], expected: dict[str, Any]) -> None:
    settings = quantize._settings(parse("x", "--out", "y", *words)[0])
    found = {**vars(settings), "has_text": settings.calibration_text is not None}
    assert {key: found[key] for key in expected} == expected


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--override", "head"], "--override 'head', accepted: PATTERN=BITS"),
        (["--override", "haed=8"], "--override haed: no matrix"),
        (["--calibration", "absent.txt"], "--calibration absent.txt: .*No such file"),
        (["--method", "gptq", "--calibration", "none"], "needs calibration; pass --calibration default"),
        (["--numbr"], r"--numbr.*vllm-omni quantize --help"),
    ],
)
def test_wrong_arguments_are_explained(source: Path, tmp_path: Path, words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run(source, "--out", tmp_path / "out", *words)
    assert not list(tmp_path.glob("out*"))


def test_errors_of_the_source_propagate(source: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        run(tmp_path / "absent", "--out", tmp_path / "out")
    path = source / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(WeightError, match="truncated"):
        run(source, "--out", tmp_path / "out")


def test_choices_are_those_of_the_format() -> None:
    """The command is light, so it repeats them."""
    assert tuple(packed_format.MAX_CODES) == quantize.BITS
    assert packed_format.GROUP_SIZES == quantize.GROUP_SIZES
    assert quantize_settings.METHODS == quantize.METHODS
    defaults = (quantize_settings.DEFAULT_BITS, quantize_settings.DEFAULT_METHOD)
    assert defaults == (quantize.BITS[0], quantize.METHODS[0])
    assert quantize_settings.DEFAULT_GROUP_SIZE == quantize.DEFAULT_GROUP_SIZE


def test_arguments_are_checked(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["x", "--out", "y", "--bits", "5"], ["x"], ["x", "--out", "y", "--method", "awq"]):
        with pytest.raises(SystemExit):
            run(*words)
    assert "invalid choice: 5" in capsys.readouterr().err


def test_importing_the_subcommand_is_light() -> None:
    code = (
        "import sys, vllm_omni.entrypoints.cli.quantize as c; "
        "print([m for m in ('numpy', 'gguf', 'tokenizers', 'tqdm', 'torch', 'vllm') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_rtn_needs_no_torch(source: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from vllm_omni.entrypoints.cli.main import main\n"
        "assert main(['quantize', sys.argv[1], '--out', sys.argv[2]]) == 0\n"
        "print([m for m in ('torch', 'transformers', 'vllm') if m in sys.modules])"
    )
    words = [sys.executable, "-c", code, str(source), str(tmp_path / "out")]
    result = subprocess.run(words, capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-1] == "[]"
