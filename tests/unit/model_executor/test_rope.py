from typing import Any

import numpy as np
import pytest

from vllm_omni.errors import ConfigError
from vllm_omni.model_executor.models.decoder.rope import rope_angles, rope_parameters


def test_the_table_holds_cosines_then_sines() -> None:
    table = rope_angles({"rope_theta": 100.0}, 4).table(3)
    frequencies = [1.0, 0.1]
    expected = [[np.cos(p * f) for f in frequencies] + [np.sin(p * f) for f in frequencies] for p in range(3)]
    assert table.dtype == np.float32
    np.testing.assert_allclose(table, expected, rtol=1e-6)


def test_a_part_of_the_head_may_be_rotated() -> None:
    config = {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5}}
    np.testing.assert_array_equal(rope_angles(config, 8).table(3), rope_angles({"rope_theta": 100.0}, 4).table(3))


def test_linear_scaling_slows_positions() -> None:
    scaled = rope_angles({"rope_scaling": {"type": "linear", "factor": 4.0}}, 8).table(9)
    np.testing.assert_allclose(scaled[::4], rope_angles({}, 8).table(3), rtol=1e-6)


def test_both_layouts_of_the_settings_are_read_alike() -> None:
    old = {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}, "max_position_embeddings": 64}
    new = {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}, "max_position_embeddings": 64}
    assert {key: value for key, value in rope_parameters(old).items() if key != "type"} == rope_parameters(new)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rope_type": "longrope"}, "rope_type is 'longrope'; accepted: default, linear, llama3, yarn"),
        ({"rope_type": "linear"}, "factor of the RoPE settings is None"),
        ({"rope_type": "linear", "factor": "2"}, "factor of the RoPE settings is '2'"),
        ({"partial_rotary_factor": 0.4}, "3 of 8 head dimensions"),
    ],
)
def test_what_is_not_known_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        rope_angles({"rope_parameters": settings}, 8).table(2)
