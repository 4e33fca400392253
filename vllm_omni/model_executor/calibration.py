"""Runs the decoder layers of `transformers` one at a time, to see what their matrices meet.

The model is built without memory for its weights; a layer gets its tensors when it runs and gives them back after.
Everything is float32. Sequences are short enough that sliding windows never cut them.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModel

from vllm_omni.quantization.calibration import SHARED_INPUTS, TOKENS_PER_WINDOW, token_windows
from vllm_omni.quantization.quantize import QuantizePlan
from vllm_omni.quantization.quantize_settings import EMBEDDING_NAME
from vllm_omni.quantization.source_tensors import TensorSource


class TorchLayerRunner:
    """A `LayerRunner` on torch. Keeps the hidden states of all calibration tokens, and one layer's weights."""

    def __init__(self, config: Mapping[str, Any], hidden: Sequence[np.ndarray], has_full_moments: bool):
        """Builds the model without weights.

        Args:
            config: Content of `config.json`.
            hidden: [tokens, hidden] float32 for each sequence: its embedded tokens.
            has_full_moments: Whether `collect` gives whole matrices of moments, or their diagonals.
        """
        model_config = AutoConfig.for_model(**_plain_config(config))
        with torch.device("meta"):
            model = AutoModel.from_config(model_config, attn_implementation="sdpa", dtype=torch.float32)
        self._layers = model.eval().layers
        self._norm = model.norm
        # Its frequencies are computed when it is made, so it is made again outside of the meta device.
        self._rotary = type(model.rotary_emb)(config=model_config)
        self._hidden = [torch.from_numpy(each)[None] for each in hidden]
        self._outputs: list[torch.Tensor] | None = None
        self._has_full_moments = has_full_moments

    def collect(self, layer: int, weights: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        moments = {name: _Moments(self._has_full_moments) for name in SHARED_INPUTS}
        module = self._layers[layer]
        hooks = [
            module.get_submodule(name).register_forward_pre_hook(lambda _, inputs, each=each: each.add(inputs[0]))
            for name, each in moments.items()
        ]
        self._outputs = self._run(layer, weights)
        for hook in hooks:
            hook.remove()
        return {name: each.mean() for name, each in moments.items()}

    def advance(self, layer: int, weights: Mapping[str, np.ndarray] | None) -> None:
        outputs = self._outputs if weights is None else self._run(layer, weights)
        assert outputs is not None, f"layer {layer} has not run"
        self._hidden, self._outputs = outputs, None

    @torch.inference_mode()
    def finish(self, norm: np.ndarray) -> np.ndarray:
        self._norm.load_state_dict({"weight": torch.from_numpy(norm)}, assign=True)
        moments = _Moments(self._has_full_moments)
        for hidden in self._hidden:
            moments.add(self._norm(hidden))
        return moments.mean()

    @torch.inference_mode()
    def _run(self, layer: int, weights: Mapping[str, np.ndarray]) -> list[torch.Tensor]:
        module = self._layers[layer]
        tensors = {name: torch.from_numpy(values) for name, values in weights.items()}
        module.load_state_dict(tensors, strict=True, assign=True)
        outputs = [module(hidden, **self._positions(hidden)) for hidden in self._hidden]
        module.to("meta")
        return outputs

    def _positions(self, hidden: torch.Tensor) -> dict[str, Any]:
        position_ids = torch.arange(hidden.shape[1])[None]
        # Without a mask the attention is causal.
        return {
            "attention_mask": None,
            "position_ids": position_ids,
            "position_embeddings": self._rotary(hidden, position_ids),
        }


class _Moments:
    """Mean of x transpose(x) over the rows added, or of its diagonal."""

    def __init__(self, is_full: bool):
        self._is_full = is_full
        self._total: torch.Tensor | None = None
        self._num_rows = 0

    def add(self, inputs: torch.Tensor) -> None:
        rows = inputs.flatten(0, -2)
        products = rows.T @ rows if self._is_full else rows.square().sum(dim=0)
        self._total = products if self._total is None else self._total.add_(products)
        self._num_rows += len(rows)

    def mean(self) -> np.ndarray:
        assert self._total is not None, "no input was seen"
        return (self._total / self._num_rows).numpy()


def make_layer_runner(plan: QuantizePlan) -> TorchLayerRunner:
    """A runner on the calibration text of a plan.

    Raises:
        ConfigError: The text is too short.
        WeightError: The source has no `tokenizer.json`.
    """
    text = plan.settings.calibration_text
    assert text is not None
    length = min(TOKENS_PER_WINDOW, plan.source.config.get("sliding_window") or TOKENS_PER_WINDOW)
    windows = token_windows(plan.source.tokenizer(), text, length)
    embed = _embedding(plan.source)
    return TorchLayerRunner(plan.source.config, [embed(ids) for ids in windows], plan.settings.method == "gptq")


def _embedding(source: TensorSource) -> Callable[[np.ndarray], np.ndarray]:
    def embed(ids: np.ndarray) -> np.ndarray:
        distinct, positions = np.unique(ids, return_inverse=True)
        rows = np.concatenate([source.rows(EMBEDDING_NAME, int(each), int(each) + 1) for each in distinct])
        return rows[positions]

    return embed


def _plain_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Without what names a class or a type; AutoConfig takes the model type from it."""
    return {key: value for key, value in config.items() if key not in ("architectures", "dtype", "torch_dtype")}
