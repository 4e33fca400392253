"""The arms of the native core, each as one value of the fixture `arm`."""

from collections.abc import Iterator

import pytest

from tests.native.arms import ARMS, Arm, name_of, open_arm


@pytest.fixture(scope="session", params=ARMS, ids=name_of)
def arm(request: pytest.FixtureRequest) -> Iterator[Arm]:
    """One instruction set in one build with one number of threads; tests of what cannot run here are skipped."""
    opened = open_arm(request.param)
    yield opened
    opened.close()
