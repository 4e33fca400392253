"""Threads of the native core touch the same memory only across a barrier, says the compiler's race detector."""

from collections.abc import Iterator

import numpy as np
import pytest

from tests.native.arms import Arm, open_arm
from tests.native.cases import random_matrix, random_rows
from tests.parity.test_native_decoder import FAMILIES, STEPS, assert_same_steps, frozen, scenario


@pytest.fixture(scope="module", params=("avx2", "generic"))
def arm(request: pytest.FixtureRequest) -> Iterator[Arm]:
    """Three threads, so that others finish a part of its owner. A race ends the driver, and with it the test."""
    opened = open_arm((request.param, "races", 3))
    yield opened
    opened.close()


@pytest.mark.parametrize("count", (1, 20))
def test_threads_that_take_parts_of_each_other(arm: Arm, count: int) -> None:
    sample = random_matrix(np.random.default_rng(0), (1601, 1000), 4, 32)
    assert np.isfinite(arm.linear(sample.packed, random_rows(np.random.default_rng(1), count, 1000))).all()


@pytest.mark.parametrize("name", ("llama", "everything"))
def test_steps_of_a_whole_stack(arm: Arm, name: str) -> None:
    assert_same_steps(arm, scenario(FAMILIES[name], "bfloat16", frozen(STEPS)), 0.0)
