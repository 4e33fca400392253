"""A team of the native core of these sources."""

from collections.abc import Iterator

import pytest

from tests.native.arms import native_library
from tests.native.builds import missing_compiler
from vllm_omni.native.library import Library
from vllm_omni.native.ops import Team


@pytest.fixture(scope="session")
def library() -> Library:
    missing = missing_compiler()
    if missing is not None:
        pytest.skip(missing)
    return native_library()


@pytest.fixture
def team(library: Library) -> Iterator[Team]:
    with Team(2, library=library) as team:
        yield team
