import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

from vllm_omni.errors import ConfigError, WeightError
from vllm_omni.quantization.artifact import read_artifact
from vllm_omni.quantization.calibration import SHARED_INPUTS
from vllm_omni.quantization.checkpoint import check_checkpoint
from vllm_omni.quantization.conversion_record import read_record
from vllm_omni.quantization.packing import dequantize, unpack
from vllm_omni.quantization.quantize import open_source, plan_quantize, quantize
from vllm_omni.quantization.quantize_settings import Override, QuantizeSettings
from vllm_omni.quantization.safetensors_format import TensorEntry, write_shard

HIDDEN, MLP, VOCAB = 48, 80, 40
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": MLP,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "num_hidden_layers": 2,
    "vocab_size": VOCAB,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
LAYER_SHAPES = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (16, HIDDEN),
    "self_attn.v_proj": (16, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (MLP, HIDDEN),
    "mlp.up_proj": (MLP, HIDDEN),
    "mlp.down_proj": (HIDDEN, MLP),
    "input_layernorm": (HIDDEN,),
    "post_attention_layernorm": (HIDDEN,),
}
OUT_NAMES = ["config.json", "conversion.json", "model.safetensors", "tokenizer.json"]
WEIGHTS = Mapping[str, np.ndarray]


def all_shapes() -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCAB, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        "lm_head.weight": (VOCAB, HIDDEN),
    }
    for layer in range(2):
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in LAYER_SHAPES.items()}
    return shapes


def bf16(values: np.ndarray) -> np.ndarray:
    return (values.astype(np.float32).view(np.uint32) & 0xFFFF0000).view(np.float32)


@pytest.fixture
def weights() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {name: bf16(rng.standard_normal(shape)) for name, shape in all_shapes().items()}


@pytest.fixture
def model(tmp_path: Path, weights: dict[str, np.ndarray]) -> Path:
    return write_model(tmp_path / "model", weights, CONFIG)


def write_model(directory: Path, weights: WEIGHTS, config: dict[str, Any]) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "tokenizer.json").write_text("{}")
    entries = [(name, TensorEntry("BF16", values.shape)) for name, values in weights.items()]
    pieces = [(values.view(np.uint32) >> 16).astype("<u2").tobytes() for values in weights.values()]
    write_shard(directory / "model.safetensors", entries, pieces)
    return directory


def run(model: Path, out: Path, settings: QuantizeSettings | None = None, **arguments: Any) -> Path:
    quantize(plan_quantize(open_source(model), settings or QuantizeSettings()), out, **arguments)
    return out


def dequantized(directory: Path) -> dict[str, np.ndarray]:
    stored = load_matrices(directory)
    return {
        name: dequantize(
            unpack(stored[name], each.format.rows, each.format.columns, each.format.bits, each.format.group_size)
        )
        for name, each in read_artifact(directory).matrices.items()
    }


def load_matrices(directory: Path) -> dict[str, np.ndarray]:
    artifact = read_artifact(directory)
    data = np.memmap(directory / "model.safetensors", np.uint8, "r")
    return {
        name: data[each.begin : each.begin + each.format.num_bytes].reshape(each.format.packed_shape)
        for name, each in artifact.matrices.items()
    }


class Interrupted(Exception):
    pass


def interrupt(*args: Any) -> None:
    raise Interrupted


def stop_after(name: str) -> Any:
    def progress(written: str, num_bytes: int) -> None:
        if written == name:
            raise Interrupted

    return progress


@pytest.mark.parametrize(("bits", "group_size", "bound"), [(4, 32, 0.08), (4, 128, 0.11), (8, 64, 0.006)])
def test_weights_are_near(
    model: Path, tmp_path: Path, weights: WEIGHTS, bits: int, group_size: int, bound: float
) -> None:
    out = run(model, tmp_path / "out", QuantizeSettings(bits, group_size))
    values = dequantized(out)
    assert values.keys() == {name for name, each in weights.items() if each.ndim == 2}
    for name, each in values.items():
        error = float(np.linalg.norm(each - weights[name]) / np.linalg.norm(weights[name]))
        assert 0 < error < bound, name


def test_the_directory_is_sound_and_complete(model: Path, tmp_path: Path) -> None:
    out = run(model, tmp_path / "out")
    report = check_checkpoint(out)
    assert report.verified_hash
    assert report.num_parameters == sum(int(np.prod(shape)) for shape in all_shapes().values())
    assert sorted(path.name for path in out.iterdir()) == OUT_NAMES
    assert not (tmp_path / "out.partial").exists()


def test_the_configuration_says_what_it_is(model: Path, tmp_path: Path) -> None:
    out = run(model, tmp_path / "out", QuantizeSettings(overrides=(Override("down", 8, 32),)))
    config = json.loads((out / "config.json").read_text())
    assert {key: config[key] for key in CONFIG if key != "architectures"} == {
        key: value for key, value in CONFIG.items() if key != "architectures"
    }
    assert config["architectures"] == ["OmniDecoderForCausalLM"]
    assert config["omni_source_architecture"] == "LlamaForCausalLM"
    artifact = read_artifact(out)
    assert config["quantization_config"] == {
        "quant_method": "omni_int4",
        "version": 1,
        "bits": 4,
        "group_size": 64,
        "method": "rtn",
        "bits_per_weight": round(artifact.bits_per_weight, 4),
    }
    down = artifact.matrices["model.layers.1.mlp.down_proj.weight"].format
    assert (down.bits, down.group_size) == (8, 32)


def test_the_record_names_source_and_method(model: Path, tmp_path: Path) -> None:
    record = read_record(run(model, tmp_path / "out"))
    assert record is not None
    assert (record.method, record.dtype) == ("quantize-rtn", "bfloat16")
    assert sorted(record.source) == ["config.json", "model.safetensors"]
    assert sorted(record.files) == ["config.json", "model.safetensors", "tokenizer.json"]


def test_vectors_are_stored_as_they_are(model: Path, tmp_path: Path) -> None:
    artifact = read_artifact(run(model, tmp_path / "out"))
    entry = artifact.tensors["model.norm.weight"].entry
    assert entry == TensorEntry("BF16", (HIDDEN,))
    source = open_source(model)
    begin = artifact.tensors["model.norm.weight"].begin
    data = (artifact.directory / "model.safetensors").read_bytes()
    assert data[begin : begin + entry.num_bytes] == source.plain("model.norm.weight")


def test_a_tied_head_is_stored_once(tmp_path: Path, weights: dict[str, np.ndarray]) -> None:
    model = write_model(tmp_path / "tied", weights, CONFIG | {"tie_word_embeddings": True})
    assert "lm_head.weight" not in read_artifact(run(model, tmp_path / "out")).matrices


def test_progress_adds_up(model: Path, tmp_path: Path) -> None:
    plan = plan_quantize(open_source(model), QuantizeSettings())
    written: list[int] = []
    quantize(plan, tmp_path / "out", progress=lambda name, num_bytes: written.append(num_bytes))
    assert sum(written) == plan.weight_bytes


def test_a_stopped_run_is_continued(model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    expected = load_matrices(run(model, tmp_path / "whole"))
    with pytest.raises(Interrupted):
        run(model, tmp_path / "out", progress=stop_after("model.layers.0.mlp.up_proj.weight"))
    assert not (tmp_path / "out").exists()
    written: dict[str, int] = {}
    with caplog.at_level(logging.INFO):
        out = run(
            model, tmp_path / "out", progress=lambda name, num: written.update({name: num + written.get(name, 0)})
        )
    assert "event=conversion_resumed" in caplog.text
    assert sum(written.values()) == plan_quantize(open_source(model), QuantizeSettings()).weight_bytes
    for name, values in load_matrices(out).items():
        np.testing.assert_array_equal(values, expected[name], err_msg=name)
    assert check_checkpoint(out).verified_hash


def test_finished_tensors_are_not_quantized_again(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stop = "model.layers.1.mlp.up_proj.weight"
    with pytest.raises(Interrupted):
        run(model, tmp_path / "out", progress=stop_after(stop))
    source = open_source(model)
    read: list[str] = []
    rows = source.rows
    monkeypatch.setattr(source, "rows", lambda name, begin, end: read.append(name) or rows(name, begin, end))
    quantize(plan_quantize(source, QuantizeSettings()), tmp_path / "out")
    assert read[0] == stop
    assert "model.layers.0.mlp.up_proj.weight" not in read


def test_a_run_that_was_killed_before_the_renaming_quantizes_nothing_again(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch, pytest.raises(Interrupted):
        patch.setattr(Path, "rename", interrupt)
        run(model, tmp_path / "out")
    source = open_source(model)
    monkeypatch.setattr(source, "rows", interrupt)
    quantize(plan_quantize(source, QuantizeSettings()), tmp_path / "out")
    assert check_checkpoint(tmp_path / "out").verified_hash
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == OUT_NAMES


@pytest.mark.parametrize("change", ["settings", "source"])
def test_other_settings_or_another_source_start_over(
    model: Path, tmp_path: Path, weights: dict[str, np.ndarray], change: str, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(Interrupted):
        run(model, tmp_path / "out", progress=stop_after("model.layers.0.mlp.up_proj.weight"))
    settings = QuantizeSettings(bits=8) if change == "settings" else QuantizeSettings()
    if change == "source":
        write_model(model, {name: -values for name, values in weights.items()}, CONFIG)
    out = run(model, tmp_path / "out", settings)
    assert "event=conversion_restarted" in caplog.text
    expected = load_matrices(run(model, tmp_path / "fresh", settings))
    for name, values in load_matrices(out).items():
        np.testing.assert_array_equal(values, expected[name], err_msg=name)


def test_an_existing_directory_needs_overwrite(model: Path, tmp_path: Path) -> None:
    out = run(model, tmp_path / "out")
    with pytest.raises(ConfigError, match="--overwrite"):
        run(model, out)
    assert run(model, out, overwrite=True) == out


def test_the_source_is_not_written_into(model: Path) -> None:
    for out in (model, model.parent, model / "out"):
        with pytest.raises(ConfigError, match=r"holds the source .*, or lies in it"):
            run(model, out, overwrite=True)


def test_damaged_weights_are_named(tmp_path: Path, weights: dict[str, np.ndarray]) -> None:
    weights["model.layers.0.mlp.up_proj.weight"][3, 3] = np.nan
    model = write_model(tmp_path / "bad", weights, CONFIG)
    with pytest.raises(WeightError, match=r"tensor model\.layers\.0\.mlp\.up_proj\.weight: it holds weights from nan"):
        run(model, tmp_path / "out")


def test_sources_are_checked(tmp_path: Path, checkpoint: Any) -> None:
    with pytest.raises(ConfigError, match=r"does not exist; accepted: a checkpoint directory, or a \.gguf file"):
        open_source(tmp_path / "absent")
    (tmp_path / "x.bin").write_text("x")
    with pytest.raises(ConfigError, match=r"is no \.gguf file"):
        open_source(tmp_path / "x.bin")
    checkpoint.config["model_type"] = "mamba"
    with pytest.raises(WeightError, match="model_type is 'mamba', accepted for quantizing: llama"):
        plan_quantize(open_source(checkpoint.write()), QuantizeSettings())


def test_an_artifact_is_not_quantized_again(model: Path, tmp_path: Path) -> None:
    with pytest.raises(WeightError, match="quantized already"):
        open_source(run(model, tmp_path / "out"))


def test_gguf_grids_are_kept(sample: Any, tmp_path: Path) -> None:
    sample.types |= {name: "Q4_1" for name, values in sample.tensors.items() if values.ndim == 2}
    path = sample.write()
    out = run(path, tmp_path / "out", QuantizeSettings(keep_grid=True))
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    assert (config["bits"], config["group_size"], config["method"]) == (4, 32, "gguf")
    source = open_source(path)
    for name, values in dequantized(out).items():
        np.testing.assert_array_equal(values, source.rows(name, 0, len(values)), err_msg=name)
    assert sorted(path.name for path in out.iterdir()) == [
        "chat_template.jinja", "config.json", "conversion.json", "generation_config.json", "model.safetensors",
        "tokenizer.json", "tokenizer_config.json",
    ]  # fmt: skip


def test_other_gguf_tensors_are_quantized(sample: Any, tmp_path: Path) -> None:
    sample.types |= {"blk.0.ffn_up.weight": "Q4_0", "token_embd.weight": "F16"}
    artifact = read_artifact(run(sample.write(), tmp_path / "out", QuantizeSettings(keep_grid=True)))
    assert artifact.matrices["model.layers.0.mlp.up_proj.weight"].format.group_size == 32
    assert artifact.matrices["model.embed_tokens.weight"].format.group_size == 64
    assert artifact.config["quantization_config"]["method"] == "rtn"


class FakeRunner:
    """Gives moments that say which layer and input they are from, and notes the calls."""

    def __init__(self, is_full: bool):
        self.is_full = is_full
        self.calls: list[tuple[str, int]] = []
        self.weights: dict[int, WEIGHTS] = {}

    def collect(self, layer: int, weights: WEIGHTS) -> dict[str, np.ndarray]:
        self.calls.append(("collect", layer))
        assert set(weights) == {f"{name}.weight" for name in LAYER_SHAPES}
        return {name: self._moments(MLP if name == "mlp.down_proj" else HIDDEN) for name in SHARED_INPUTS}

    def advance(self, layer: int, weights: WEIGHTS | None) -> None:
        self.calls.append(("advance", layer))
        if weights is not None:
            self.weights[layer] = weights

    def finish(self, norm: np.ndarray) -> np.ndarray:
        self.calls.append(("finish", len(norm)))
        return self._moments(HIDDEN)

    def _moments(self, size: int) -> np.ndarray:
        diagonal = np.linspace(1, 50, size, dtype=np.float32)
        return np.diag(diagonal) if self.is_full else diagonal


@pytest.mark.parametrize("method", ["rtn", "gptq"])
def test_calibration_weighs_the_layers_and_the_head(model: Path, tmp_path: Path, method: str) -> None:
    runner = FakeRunner(method == "gptq")
    settings = QuantizeSettings(method=method, calibration_text="text")
    out = run(model, tmp_path / "out", settings, make_runner=lambda plan: runner)
    order = [(kind, layer) for layer in range(2) for kind in ("collect", "advance")]
    assert runner.calls == [*order, ("finish", HIDDEN)]
    plain = load_matrices(run(model, tmp_path / "plain"))
    changed = {name for name, values in load_matrices(out).items() if not np.array_equal(values, plain[name])}
    assert changed == set(plain) - {"model.embed_tokens.weight"}
    # With gptq the next layer sees the quantized weights, with rtn the original ones.
    assert set(runner.weights) == ({0, 1} if method == "gptq" else set())
    if method == "gptq":
        values = dequantized(out)["model.layers.1.mlp.down_proj.weight"]
        np.testing.assert_array_equal(runner.weights[1]["mlp.down_proj.weight"], values)


@pytest.mark.parametrize("method", ["rtn", "gptq"])
def test_a_stopped_calibrated_run_is_continued(model: Path, tmp_path: Path, method: str) -> None:
    settings = QuantizeSettings(method=method, calibration_text="text")
    runners = [FakeRunner(method == "gptq") for _ in range(3)]
    stop = stop_after("model.layers.1.self_attn.q_proj.weight")
    with pytest.raises(Interrupted):
        run(model, tmp_path / "out", settings, progress=stop, make_runner=lambda plan: runners[0])
    out = run(model, tmp_path / "out", settings, make_runner=lambda plan: runners[1])
    assert runners[1].calls[:3] == [("advance", 0), ("collect", 1), ("advance", 1)]
    assert 0 in runners[1].weights
    expected = load_matrices(run(model, tmp_path / "whole", settings, make_runner=lambda plan: runners[2]))
    for name, values in load_matrices(out).items():
        np.testing.assert_array_equal(values, expected[name], err_msg=name)


def test_a_run_stopped_before_the_head_runs_all_layers(model: Path, tmp_path: Path) -> None:
    settings = QuantizeSettings(calibration_text="text")
    with pytest.raises(Interrupted):
        run(
            model,
            tmp_path / "out",
            settings,
            progress=stop_after("lm_head.weight"),
            make_runner=lambda plan: FakeRunner(False),
        )
    runner = FakeRunner(False)
    run(model, tmp_path / "out", settings, make_runner=lambda plan: runner)
    assert runner.calls == [("advance", 0), ("advance", 1), ("finish", HIDDEN)]


def test_the_safetensors_library_reads_the_file(model: Path, tmp_path: Path) -> None:
    out = run(model, tmp_path / "out", QuantizeSettings(8, 32))
    with safe_open(out / "model.safetensors", "numpy") as reader:
        assert reader.get_tensor("lm_head.weight").dtype == np.uint8
