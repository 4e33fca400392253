"""The layer-by-layer runner against whole `transformers` models, and what calibration does for a model's outputs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from vllm_omni.model_executor.calibration import TorchLayerRunner, make_layer_runner
from vllm_omni.quantization.artifact import read_artifact
from vllm_omni.quantization.calibration import SHARED_INPUTS
from vllm_omni.quantization.packing import dequantize, unpack
from vllm_omni.quantization.quantize import open_source, plan_quantize, quantize
from vllm_omni.quantization.quantize_settings import QuantizeSettings

TINY = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
}
FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**TINY, attention_bias=True, mlp_bias=True)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**TINY)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**TINY, head_dim=32)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**TINY, sliding_window=40)),
}


@pytest.fixture(autouse=True)
def cache_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps verification markers out of the user's cache."""
    monkeypatch.setenv("VLLM_OMNI_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture(params=FAMILIES)
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    torch.manual_seed(0)
    model = FAMILIES[request.param]().eval()
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=0.15)
        elif "norm" not in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return model


def save(model: PreTrainedModel, directory: Path) -> Path:
    model.save_pretrained(directory)
    vocabulary = {f"w{index}": index for index in range(TINY["vocab_size"])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="w0"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


def text_of(num_tokens: int) -> str:
    ids = np.random.default_rng(0).integers(0, TINY["vocab_size"], num_tokens)
    return " ".join(f"w{index}" for index in ids)


def layer_weights(model: PreTrainedModel, layer: int) -> dict[str, np.ndarray]:
    return {name: values.numpy() for name, values in model.model.layers[layer].state_dict().items()}


def whole_moments(model: PreTrainedModel, windows: list[np.ndarray]) -> dict[tuple[int, str], np.ndarray]:
    """The same moments from forward passes of the whole model."""
    seen: dict[tuple[int, str], list[torch.Tensor]] = {}
    for layer, module in enumerate(model.model.layers):
        for name in SHARED_INPUTS:
            key = (layer, name)
            seen[key] = []
            module.get_submodule(name).register_forward_pre_hook(
                lambda _, inputs, key=key: seen[key].append(inputs[0].flatten(0, -2))
            )
    seen[(-1, "head")] = []
    model.lm_head.register_forward_pre_hook(lambda _, inputs: seen[(-1, "head")].append(inputs[0].flatten(0, -2)))
    with torch.no_grad():
        for ids in windows:
            model(torch.from_numpy(ids)[None])
    rows = {key: torch.cat(values).numpy() for key, values in seen.items()}
    return {key: each.T @ each / len(each) for key, each in rows.items()}


@pytest.mark.parametrize("is_full", [True, False])
def test_moments_are_those_of_the_whole_model(model: PreTrainedModel, is_full: bool) -> None:
    windows = [np.random.default_rng(seed).integers(0, TINY["vocab_size"], size) for seed, size in ((1, 40), (2, 7))]
    embedding = model.model.embed_tokens.weight.detach().numpy()
    runner = TorchLayerRunner(model.config.to_dict(), [embedding[ids] for ids in windows], is_full)
    expected = whole_moments(model, windows)
    for layer in range(TINY["num_hidden_layers"]):
        moments = runner.collect(layer, layer_weights(model, layer))
        # Running again with the same weights is what a resumed run does.
        runner.advance(layer, None if layer else layer_weights(model, layer))
        for name, values in moments.items():
            wanted = expected[(layer, name)] if is_full else expected[(layer, name)].diagonal()
            np.testing.assert_allclose(values, wanted, rtol=2e-4, atol=1e-5, err_msg=f"{layer} {name}")
    head = runner.finish(model.model.norm.weight.detach().numpy())
    wanted = expected[(-1, "head")] if is_full else expected[(-1, "head")].diagonal()
    np.testing.assert_allclose(head, wanted, rtol=2e-4, atol=1e-5)


def quantized_logits(source: Path, out: Path, settings: QuantizeSettings, model_class: Any, ids: torch.Tensor) -> Any:
    make_runner = make_layer_runner if settings.calibration_text else None
    quantize(plan_quantize(open_source(source), settings), out, make_runner=make_runner)
    model = model_class.from_pretrained(source, dtype=torch.float32).eval()
    state = model.state_dict()
    for name, stored in read_artifact(out).matrices.items():
        each = stored.format
        data = np.fromfile(stored.path, np.uint8, each.num_bytes, offset=stored.begin).reshape(each.packed_shape)
        values = dequantize(unpack(data, each.rows, each.columns, each.bits, each.group_size))
        state[name].copy_(torch.from_numpy(values))
    with torch.no_grad():
        return model(ids).logits


def test_compensation_brings_the_logits_nearer(model: PreTrainedModel, tmp_path: Path) -> None:
    source = save(model, tmp_path / "model")
    text = text_of(2000)
    ids = torch.randint(0, TINY["vocab_size"], (4, 39), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        expected = model(ids).logits
    choices = {"plain": ("rtn", None), "weighted": ("rtn", text), "gptq": ("gptq", text)}
    error = {}
    for name, (method, calibration) in choices.items():
        settings = QuantizeSettings(method=method, calibration_text=calibration)
        logits = quantized_logits(source, tmp_path / name, settings, type(model), ids)
        error[name] = float((logits - expected).square().mean())
    assert error["gptq"] < error["plain"]
    assert error["weighted"] < 1.1 * error["plain"]
