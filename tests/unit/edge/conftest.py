from pathlib import Path

import pytest


class RecordedRoot:
    """A directory with the files of `/proc` and `/sys` that a test needs."""

    def __init__(self, path: Path):
        self.path = path

    def write(self, name: str, text: str | int) -> "RecordedRoot":
        file = self.path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")
        return self

    def add_cpus(self, *cores: tuple[int, int]) -> "RecordedRoot":
        """One logical processor for each (package, core), numbered from 0."""
        for number, (package, core) in enumerate(cores):
            topology = f"sys/devices/system/cpu/cpu{number}/topology"
            self.write(f"{topology}/physical_package_id", package).write(f"{topology}/core_id", core)
        return self


@pytest.fixture
def root(tmp_path: Path) -> RecordedRoot:
    return RecordedRoot(tmp_path)
