"""The arms of the native core, each as one value of the fixture `arm`."""

from collections.abc import Iterator

import pytest

from tests.native.arms import Arm, name_of, open_arm, runnable_arms


@pytest.fixture(scope="session", params=runnable_arms(), ids=name_of)
def arm(request: pytest.FixtureRequest) -> Iterator[Arm]:
    """One instruction set in one build with one number of threads, of those that run here."""
    opened = open_arm(request.param)
    yield opened
    opened.close()
