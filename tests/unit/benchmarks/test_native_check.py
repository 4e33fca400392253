import numpy as np
import pytest

from benchmarks.edge_harness.native_check import TOLERANCE, relative_difference, require_close
from vllm_omni.errors import EngineError


def test_the_difference_is_relative_to_the_length_of_the_row_that_is_furthest_off() -> None:
    expected = np.array([[3.0, 4.0], [30.0, 40.0]], np.float32)
    assert relative_difference(expected + np.float32([[0.0, 0.5], [0.5, 0.0]]), expected) == pytest.approx(0.1)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_number_that_is_not_finite_is_infinitely_far(value: float) -> None:
    numbers = np.array([[value, 1.0]], np.float32)
    assert relative_difference(numbers, numbers) == float("inf")


def test_a_small_difference_passes() -> None:
    require_close({"layers": TOLERANCE})


@pytest.mark.parametrize("value", [1.1 * TOLERANCE, float("inf"), float("nan")])
def test_a_large_difference_is_named(value: float) -> None:
    with pytest.raises(EngineError, match="head rows"):
        require_close({"layers": 0.0, "head rows": value})
