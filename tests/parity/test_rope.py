"""RoPE frequencies against those of transformers."""

from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from vllm_omni.model_executor.models.decoder.rope import SCALINGS, rope_angles

POSITIONS = 300
SETTINGS: dict[str, dict[str, Any]] = {
    "linear": {"factor": 3.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 128},
    "yarn_own_numbers": {
        "factor": 4.0,
        "original_max_position_embeddings": 128,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "attention_factor": 1.2,
    },
    "yarn_not_truncated": {"factor": 4.0, "original_max_position_embeddings": 128, "truncate": False},
    "yarn_mscale": {"factor": 4.0, "original_max_position_embeddings": 128, "mscale": 0.7, "mscale_all_dim": 1.1},
}


@pytest.mark.parametrize("name", list(SETTINGS))
def test_scaled_types(name: str) -> None:
    kind = name.split("_")[0]
    parameters = SETTINGS[name] | {"rope_type": kind, "rope_theta": 5e4}
    config = LlamaConfig(
        hidden_size=128, num_attention_heads=2, max_position_embeddings=512, rope_parameters=dict(parameters)
    )
    frequencies, magnitude = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    angles = np.arange(POSITIONS)[:, None] * frequencies.double().numpy()
    expected = np.concatenate([np.cos(angles), np.sin(angles)], axis=1) * magnitude
    # transformers computes the frequencies in float32.
    np.testing.assert_allclose(rope_angles(config.to_dict(), 64).table(POSITIONS), expected, atol=2e-4)


def test_every_scaled_type_is_compared() -> None:
    assert {name.split("_")[0] for name in SETTINGS} | {"default"} == set(SCALINGS)
