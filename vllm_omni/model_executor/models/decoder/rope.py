"""Rotary position embeddings: the angles of each dimension, and the table of cosines and sines over positions.

Formulas: RoFormer (arXiv 2104.09864) section 3.4; linear interpolation (arXiv 2306.15595); YaRN (arXiv 2309.00071)
sections 3.2 to 3.4; Llama 3.1's frequency bands as its published configuration names them.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Context, Decimal, localcontext
from typing import Any

import numpy as np

from vllm_omni.errors import ConfigError

DEFAULT_THETA = 10000.0
# Powers and logarithms are taken in decimal numbers: those of the C library depend on the processor.
DECIMALS = Context(prec=40)
PI = Decimal("3.1415926535897932384626433832795028841972")


@dataclass(frozen=True)
class RopeAngles:
    """How far a head's dimensions are turned from position to position.

    Attributes:
        frequencies: [rotary_dim / 2] float64, radians.
        magnitude: What cosines and sines are multiplied by.
    """

    frequencies: np.ndarray
    magnitude: float

    @property
    def rotary_dim(self) -> int:
        """Leading dimensions of a head that are turned."""
        return 2 * len(self.frequencies)

    def table(self, num_positions: int) -> np.ndarray:
        """[num_positions, rotary_dim] float32: cosines, then sines.

        By numpy, whose last bits depend on the processor; `native.ops.rope_table` gives the same bits on all.
        """
        angles = np.arange(num_positions, dtype=np.float64)[:, None] * self.frequencies
        table = np.concatenate([np.cos(angles), np.sin(angles)], axis=1)
        return table.astype(np.float32) * np.float32(self.magnitude)


def rope_angles(config: Mapping[str, Any], head_dim: int) -> RopeAngles:
    """The angles that `config` asks for, the same on every processor.

    Args:
        config: `config.json`, or `to_dict()` of the configuration object.
        head_dim: Size of a head; `partial_rotary_factor` of it is rotated.

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
    with localcontext(DECIMALS):
        powers = [Decimal(theta) ** (Decimal(-2 * i) / rotary_dim) for i in range(rotary_dim // 2)]
        frequencies, magnitude = SCALINGS[kind](np.array([float(power) for power in powers]), theta, parameters)
    return RopeAngles(frequencies, magnitude)


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

    def dimension(turns: float) -> Decimal:
        return rotary_dim * (Decimal(original) / (Decimal(turns) * 2 * PI)).ln() / (2 * Decimal(theta).ln())

    first = dimension(_number(parameters, "beta_fast", 32.0))
    last = dimension(_number(parameters, "beta_slow", 1.0))
    if parameters.get("truncate", True):
        first, last = Decimal(math.floor(first)), Decimal(math.ceil(last))
    low, high = float(max(first, Decimal(0))), float(min(last, Decimal(rotary_dim - 1)))
    # The ramp needs a width.
    width = high - low if high != low else 0.001
    slowed = np.clip((np.arange(len(frequencies)) - low) / width, 0.0, 1.0)
    return frequencies * (1 - slowed + slowed / factor), _yarn_magnitude(factor, parameters)


def _yarn_magnitude(factor: float, parameters: Mapping[str, Any]) -> float:
    """What cosines and sines are multiplied by, so that attention stays as sharp over longer sequences."""
    if "attention_factor" in parameters:
        return _number(parameters, "attention_factor")

    def scale(weight: float) -> float:
        return float(Decimal(weight) / 10 * Decimal(factor).ln() + 1) if factor > 1 else 1.0

    if parameters.get("mscale") and parameters.get("mscale_all_dim"):
        return scale(_number(parameters, "mscale")) / scale(_number(parameters, "mscale_all_dim"))
    return scale(1.0)


SCALINGS: Mapping[str, Callable[[np.ndarray, float, Mapping[str, Any]], Scaled]] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}
