"""Normalisation, rotation and gates: every arm against the reference."""

import numpy as np
import pytest

from tests.native.arms import Arm
from tests.native.cases import random_rows, rope_table
from vllm_omni.native.reference import gated_activation_ref, rms_norm_ref, rope_ref

FLOAT32_UNIT = 2.0**-24


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


@pytest.mark.parametrize("columns", [1, 7, 32, 33, 64, 576, 1000, 4096])
@pytest.mark.parametrize("rows", [1, 3, 33])
def test_rms_norm(arm: Arm, rng: np.random.Generator, rows: int, columns: int) -> None:
    x, weight = np.float32(3) * random_rows(rng, rows, columns), random_rows(rng, columns)
    # A sum in at least four parts: as many roundings as a part has terms.
    tolerance = (columns / 4 + 8) * FLOAT32_UNIT
    np.testing.assert_allclose(arm.rms_norm(x, weight, 1e-5), rms_norm_ref(x, weight, 1e-5), rtol=tolerance, atol=0)


def test_rms_norm_of_zeros_is_zero(arm: Arm) -> None:
    assert not arm.rms_norm(np.zeros((2, 96), np.float32), np.ones(96, np.float32), 1e-6).any()


def test_rms_norm_takes_eps_into_account(arm: Arm, rng: np.random.Generator) -> None:
    x, weight = np.float32(1e-3) * random_rows(rng, 2, 64), random_rows(rng, 64)
    np.testing.assert_allclose(arm.rms_norm(x, weight, 1e-5), rms_norm_ref(x, weight, 1e-5), rtol=3e-6, atol=0)


@pytest.mark.parametrize("style", ["halves", "pairs"])
@pytest.mark.parametrize(
    ("head_dim", "rotary_dim"), [(32, 32), (64, 32), (64, 64), (80, 20), (80, 80), (128, 2), (256, 128)]
)
def test_rope(arm: Arm, rng: np.random.Generator, head_dim: int, rotary_dim: int, style: str) -> None:
    table = rope_table(500, rotary_dim)
    for rows, heads in ((1, 1), (1, 5), (7, 3), (33, 8)):
        x = random_rows(rng, rows, heads, head_dim)
        positions = rng.integers(0, 500, rows)
        actual, expected = arm.rope(x, positions, table, style), rope_ref(x, positions, table, style)
        np.testing.assert_allclose(actual, expected, rtol=0, atol=4 * FLOAT32_UNIT * np.abs(x).max() * 2)
        np.testing.assert_array_equal(actual[..., rotary_dim:], x[..., rotary_dim:])


@pytest.mark.parametrize("activation", ["silu", "gelu"])
@pytest.mark.parametrize("count", [1, 3, 15, 16, 17, 100, 1536, 6661])
def test_gated_activation(arm: Arm, rng: np.random.Generator, count: int, activation: str) -> None:
    gate, up = 4 * random_rows(rng, count), random_rows(rng, count)
    actual, expected = arm.gated_activation(gate, up, activation), gated_activation_ref(gate, up, activation)
    # e^x is good to 2 units in the last place, erf to 1.5e-7.
    assert (np.abs(actual - expected) <= 8 * FLOAT32_UNIT * np.abs(gate * up) + 1e-37).all()


@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_gated_activation_of_extremes(arm: Arm, activation: str) -> None:
    gate = np.array([0, -0.0, 1e-30, -1e-30, 20, -20, 90, -90, 200, -200, 1e30, -1e30], np.float32)
    up = np.full(gate.shape, 2, np.float32)
    actual = arm.gated_activation(gate, up, activation)
    expected = gated_activation_ref(gate, up, activation)
    assert (np.abs(actual - expected) <= 8 * FLOAT32_UNIT * np.abs(gate * up) + 1e-30).all()
