"""What this machine may use: processors, instruction sets, memory.

Reads `/proc`, `/sys` and cgroup files under an injectable root, so recorded machines can be tested. An unknown is
None, never a guess. Loads neither torch nor vLLM.
"""

import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

ISA_FLAGS = (
    "sse4_2",
    "avx2",
    "f16c",
    "avx512f",
    "avx512_vnni",
    "avx512_bf16",
    "avx512_fp16",
    "avx_vnni",
    "amx_int8",
    "amx_bf16",
)
ARM_ISA_FLAGS = ("asimd", "asimdhp", "asimddp", "i8mm", "bf16", "sve")

# cgroup v1 writes "unlimited" as the largest page-aligned 64-bit number.
NO_LIMIT_BYTES = 1 << 60


@dataclass(frozen=True)
class HardwareReport:
    """What the process may use.

    Attributes:
        model_name: Processor name as the kernel reports it, None when it reports none.
        isa_flags: Those of `ISA_FLAGS` and `ARM_ISA_FLAGS` that the processor has.
        allowed_cpus: Logical processors in the affinity mask.
        physical_cores: Distinct cores behind `allowed_cpus`, None when the topology is unknown.
        quota_cpus: The cgroup's CPU quota in processors (may be a fraction), None when unlimited.
        total_bytes: Memory of the machine or, when smaller, of the cgroup.
        available_bytes: What can be allocated now without swapping, within the same limit.
    """

    model_name: str | None
    isa_flags: tuple[str, ...]
    allowed_cpus: tuple[int, ...]
    physical_cores: int | None
    quota_cpus: float | None
    total_bytes: int | None
    available_bytes: int | None

    @property
    def num_threads(self) -> int:
        """Compute threads worth starting: one per physical core, within the quota, at least one."""
        cores = self.physical_cores or len(self.allowed_cpus)
        if self.quota_cpus is not None:
            cores = min(cores, int(self.quota_cpus))
        return max(1, cores)


def probe_hardware(root: Path = Path("/"), allowed_cpus: Collection[int] | None = None) -> HardwareReport:
    """Reads the machine under `root`.

    Args:
        root: Where `/proc` and `/sys` are.
        allowed_cpus: The affinity mask; None asks the operating system.
    """
    cpus = tuple(sorted(os.sched_getaffinity(0) if allowed_cpus is None else allowed_cpus))
    fields = _cpuinfo(root)
    flags = set((fields.get("flags") or fields.get("Features") or "").split())
    groups = _cgroup_dirs(root)
    meminfo = _meminfo(root)
    return HardwareReport(
        model_name=fields.get("model name"),
        isa_flags=tuple(flag for flag in ISA_FLAGS + ARM_ISA_FLAGS if flag in flags),
        allowed_cpus=cpus,
        physical_cores=_physical_cores(root, cpus),
        quota_cpus=_quota_cpus(groups),
        total_bytes=_smallest(meminfo.get("MemTotal"), _memory_limit(groups)),
        available_bytes=_smallest(meminfo.get("MemAvailable"), _memory_left(groups)),
    )


def _read(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:
        return None


def _read_int(path: Path) -> int | None:
    text = (_read(path) or "").strip()
    return int(text) if text.isdigit() else None


def _smallest(*values: int | None) -> int | None:
    known = [value for value in values if value is not None]
    return min(known) if known else None


def _cpuinfo(root: Path) -> dict[str, str]:
    """Fields of the first processor."""
    text = _read(root / "proc/cpuinfo") or ""
    lines = (line.partition(":") for line in text.split("\n\n")[0].splitlines())
    return {key.strip(): value.strip() for key, _, value in lines}


def _meminfo(root: Path) -> dict[str, int]:
    """Fields of `/proc/meminfo` in bytes."""
    fields = {}
    for line in (_read(root / "proc/meminfo") or "").splitlines():
        key, _, value = line.partition(":")
        words = value.split()
        if words and words[0].isdigit():
            fields[key] = int(words[0]) * 1024
    return fields


def _physical_cores(root: Path, cpus: Collection[int]) -> int | None:
    cores = set()
    for cpu in cpus:
        topology = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
        core, package = _read_int(topology / "core_id"), _read_int(topology / "physical_package_id")
        if core is None or package is None:
            return None
        cores.add((package, core))
    return len(cores) or None


def _cgroup_dirs(root: Path) -> list[Path]:
    """The process's cgroup v2 directory and its parents, or the v1 controllers' roots, that exist."""
    base = root / "sys/fs/cgroup"
    entries = (line.split(":", 2) for line in (_read(root / "proc/self/cgroup") or "").splitlines())
    dirs = [base, base / "cpu", base / "memory"]
    for entry in entries:
        if len(entry) == 3:
            controller = base if entry[0] == "0" else base / entry[1]
            path = controller / entry[2].strip("/")
            dirs += [path, *(parent for parent in path.parents if base in parent.parents)]
    return [path for path in dict.fromkeys(dirs) if path.is_dir()]


def _quota_cpus(groups: Collection[Path]) -> float | None:
    quotas = []
    for group in groups:
        words = (_read(group / "cpu.max") or "").split()
        if len(words) == 2 and words[0].isdigit():
            quotas.append(int(words[0]) / int(words[1]))
        quota, period = _read_int(group / "cpu.cfs_quota_us"), _read_int(group / "cpu.cfs_period_us")
        if quota and period:
            quotas.append(quota / period)
    return min(quotas) if quotas else None


def _memory_limit(groups: Collection[Path]) -> int | None:
    limits = (_read_int(group / name) for group in groups for name in ("memory.max", "memory.limit_in_bytes"))
    return _smallest(*(limit for limit in limits if limit is not None and limit < NO_LIMIT_BYTES))


def _memory_left(groups: Collection[Path]) -> int | None:
    left = []
    for group in groups:
        for limit_name, usage_name in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            limit, usage = _read_int(group / limit_name), _read_int(group / usage_name)
            if limit is not None and usage is not None:
                left.append(max(0, limit - usage))
    return _smallest(*left)
