"""What the source distribution and the wheel hold, as setuptools itself lists it; nothing is built."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Made by tools, or by the installation itself.
MADE_SUFFIXES = frozenset({".pyc", ".so", ".o"})


@pytest.fixture(scope="module")
def listed(tmp_path_factory: pytest.TempPathFactory) -> frozenset[str]:
    """Files of the source distribution, relative to its root."""
    directory = tmp_path_factory.mktemp("egg")
    command = [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", str(directory)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    (sources,) = directory.glob("*.egg-info/SOURCES.txt")
    return frozenset(sources.read_text().splitlines())


def files_below(*names: str) -> set[str]:
    paths = [path for name in names for path in (ROOT / name).rglob("*") if path.is_file()]
    return {path.relative_to(ROOT).as_posix() for path in paths if path.suffix not in MADE_SUFFIXES}


def test_a_build_finds_all_that_it_reads(listed: frozenset[str]) -> None:
    """`setup.py` reads the requirements, compiles `csrc`, and takes the description from the README."""
    assert files_below("csrc", "requirements") - listed == set()
    assert {"setup.py", "pyproject.toml", "README.md", "LICENSE", "NOTICE"} <= listed


def test_the_package_is_complete(listed: frozenset[str]) -> None:
    """So is the wheel: no rule of MANIFEST.in names the package, its files come from `packages` and `package_data`."""
    assert "vllm_omni" not in (ROOT / "MANIFEST.in").read_text()
    assert files_below("vllm_omni") - listed == set()
    assert any(name.endswith("edge/text.yaml") for name in listed)


def test_nothing_else_is_shipped(listed: frozenset[str]) -> None:
    folders = {name.partition("/")[0] for name in listed if "/" in name and ".egg-info/" not in name}
    assert folders == {"csrc", "requirements", "vllm_omni"}
    assert [name for name in listed if Path(name).suffix in MADE_SUFFIXES] == []
