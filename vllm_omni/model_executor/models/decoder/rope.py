"""The table of rotary position embeddings: cosines, then sines, for each position of the longest sequence.

Formulas: RoFormer (arXiv 2104.09864) section 3.4; linear interpolation (arXiv 2306.15595); YaRN (arXiv 2309.00071)
sections 3.2 to 3.4; Llama 3.1's frequency bands as its published configuration names them.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from vllm_omni.errors import ConfigError

DEFAULT_THETA = 10000.0


def rope_table(config: Mapping[str, Any], head_dim: int, num_positions: int) -> np.ndarray:
    """[num_positions, rotary_dim] float32: cosines and sines, `rotary_dim / 2` each.

    Args:
        config: `config.json`, or `to_dict()` of the configuration object.
        head_dim: Size of a head; `partial_rotary_factor` of it is rotated.
        num_positions: Longest sequence.

    Raises:
        ConfigError: The RoPE type is not known, or one of its numbers is missing or no number.
    """
    parameters = rope_parameters(config)
    kind = parameters["rope_type"]
    if kind not in SCALINGS:
        raise ConfigError(
            f"config.json: rope_type is {kind!r}; accepted: {', '.join(SCALINGS)}. Serve the checkpoint that the "
            "artifact was made from"
        )
    rotary_dim = int(head_dim * _number(parameters, "partial_rotary_factor", 1.0))
    if rotary_dim < 2 or rotary_dim % 2:
        raise ConfigError(
            f"config.json: {rotary_dim} of {head_dim} head dimensions are rotated; accepted: an even number"
        )
    theta = _number(parameters, "rope_theta", DEFAULT_THETA)
    frequencies = theta ** -(np.arange(0, rotary_dim, 2, dtype=np.float64) / rotary_dim)
    frequencies, magnitude = SCALINGS[kind](frequencies, theta, parameters)
    angles = np.arange(num_positions, dtype=np.float64)[:, None] * frequencies
    return np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32) * np.float32(magnitude)


def rope_parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings in one map, whichever of the two layouts the configuration has."""
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    parameters = {key: value for key, value in given.items() if value is not None}
    parameters.setdefault("rope_type", parameters.get("type", "default"))
    for key in ("rope_theta", "partial_rotary_factor"):
        if config.get(key) is not None:
            parameters.setdefault(key, config[key])
    if config.get("max_position_embeddings") is not None:
        parameters.setdefault("original_max_position_embeddings", config["max_position_embeddings"])
    return parameters


def _number(parameters: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = parameters.get(key, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0:
        raise ConfigError(f"config.json: {key} of the RoPE settings is {value!r}; accepted: a number above 0")
    return float(value)


Scaled = tuple[np.ndarray, float]


def _default(frequencies: np.ndarray, _theta: float, _parameters: Mapping[str, Any]) -> Scaled:
    return frequencies, 1.0


def _linear(frequencies: np.ndarray, _theta: float, parameters: Mapping[str, Any]) -> Scaled:
    return frequencies / _number(parameters, "factor"), 1.0


def _llama3(frequencies: np.ndarray, _theta: float, parameters: Mapping[str, Any]) -> Scaled:
    """Long waves are slowed by `factor`, short ones kept, those between are mixed by their wavelength."""
    factor, original = _number(parameters, "factor"), _number(parameters, "original_max_position_embeddings")
    low, high = _number(parameters, "low_freq_factor"), _number(parameters, "high_freq_factor")
    turns = original * frequencies / (2 * math.pi)
    kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return frequencies * (kept + (1 - kept) / factor), 1.0


def _yarn(frequencies: np.ndarray, theta: float, parameters: Mapping[str, Any]) -> Scaled:
    """Dimensions that turn often are kept, those that turn rarely are slowed by `factor`, a ramp lies between."""
    factor, original = _number(parameters, "factor"), _number(parameters, "original_max_position_embeddings")
    rotary_dim = 2 * len(frequencies)

    def dimension(turns: float) -> float:
        return rotary_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = dimension(_number(parameters, "beta_fast", 32.0))
    high = dimension(_number(parameters, "beta_slow", 1.0))
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    # The ramp needs a width.
    width = high - low if high != low else 0.001
    slowed = np.clip((np.arange(len(frequencies)) - low) / width, 0.0, 1.0)
    return frequencies * (1 - slowed + slowed / factor), _yarn_magnitude(factor, parameters)


def _yarn_magnitude(factor: float, parameters: Mapping[str, Any]) -> float:
    """What cosines and sines are multiplied by, so that attention stays as sharp over longer sequences."""
    if "attention_factor" in parameters:
        return _number(parameters, "attention_factor")

    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if parameters.get("mscale") and parameters.get("mscale_all_dim"):
        return scale(_number(parameters, "mscale")) / scale(_number(parameters, "mscale_all_dim"))
    return scale(1.0)


SCALINGS: Mapping[str, Callable[[np.ndarray, float, Mapping[str, Any]], Scaled]] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}
