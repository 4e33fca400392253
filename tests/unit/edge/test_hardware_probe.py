import os
from dataclasses import FrozenInstanceError
from typing import Any

import pytest

from vllm_omni.edge.hardware_probe import HardwareReport, probe_hardware

GIB = 1 << 30
X86_CPUINFO = """processor\t: 0
vendor_id\t: GenuineIntel
model name\t: Example CPU @ 2.00GHz
flags\t\t: fpu sse4_2 avx2 f16c avx512f avx512_vnni avx512_bf16 amx_bf16 amx_int8 amx_tile

processor\t: 1
model name\t: Another CPU
flags\t\t: fpu sve
"""
ARM_CPUINFO = """processor\t: 0
BogoMIPS\t: 108.00
Features\t: fp asimd evtstrm aes crc32 asimdhp asimddp i8mm bf16
CPU implementer\t: 0x41

processor\t: 1
"""
MEMINFO = """MemTotal:        8388608 kB
MemFree:          100000 kB
MemAvailable:    4194304 kB
HugePages_Total:       0
"""


def probe(root: Any, num_cpus: int = 2) -> HardwareReport:
    return probe_hardware(root.path, range(num_cpus))


# Processors.


def test_two_plain_cores(root: Any) -> None:
    report = probe(root.add_cpus((0, 0), (0, 1)))
    assert report.allowed_cpus == (0, 1)
    assert report.physical_cores == 2
    assert report.quota_cpus is None
    assert report.num_threads == 2


def test_hyperthreads_count_once(root: Any) -> None:
    report = probe(root.add_cpus((0, 0), (0, 1), (0, 0), (0, 1)), num_cpus=4)
    assert report.physical_cores == 2
    assert report.num_threads == 2


def test_equal_core_numbers_in_two_packages_are_two_cores(root: Any) -> None:
    assert probe(root.add_cpus((0, 0), (1, 0))).physical_cores == 2


def test_only_cores_in_the_affinity_mask_count(root: Any) -> None:
    root.add_cpus((0, 0), (0, 1), (0, 2), (0, 3))
    report = probe_hardware(root.path, {3, 1})
    assert report.allowed_cpus == (1, 3)
    assert report.num_threads == 2


def test_the_mask_comes_from_the_operating_system_unless_given(root: Any) -> None:
    assert probe_hardware(root.path).allowed_cpus == tuple(sorted(os.sched_getaffinity(0)))


def test_half_a_topology_is_none(root: Any) -> None:
    root.write("sys/devices/system/cpu/cpu0/topology/core_id", 0)
    report = probe(root)
    assert report.physical_cores is None
    assert report.num_threads == 2


# CPU quota.


def test_quota_of_a_processor_and_a_half_gives_one_thread(root: Any) -> None:
    root.add_cpus((0, 0), (0, 1)).write("proc/self/cgroup", "0::/").write("sys/fs/cgroup/cpu.max", "150000 100000")
    report = probe(root)
    assert report.quota_cpus == 1.5
    assert report.num_threads == 1


def test_a_quota_below_one_processor_still_gives_one_thread(root: Any) -> None:
    root.write("sys/fs/cgroup/cpu.max", "50000 100000")
    report = probe(root)
    assert report.quota_cpus == 0.5
    assert report.num_threads == 1


def test_a_quota_above_the_cores_adds_no_thread(root: Any) -> None:
    root.add_cpus((0, 0), (0, 1)).write("sys/fs/cgroup/cpu.max", "800000 100000")
    assert probe(root).num_threads == 2


def test_an_unlimited_group_has_no_quota(root: Any) -> None:
    root.write("sys/fs/cgroup/cpu.max", "max 100000")
    assert probe(root).quota_cpus is None


@pytest.mark.parametrize("tightest", ["a.slice", "a.slice/b.service"])
def test_the_smallest_quota_on_the_way_up_counts(root: Any, tightest: str) -> None:
    root.write("proc/self/cgroup", "0::/a.slice/b.service")
    for group in ("a.slice", "a.slice/b.service"):
        quota = "200000" if group == tightest else "400000"
        root.write(f"sys/fs/cgroup/{group}/cpu.max", f"{quota} 100000")
    assert probe(root, num_cpus=8).quota_cpus == 2.0


def test_the_quota_of_an_unrelated_group_does_not_count(root: Any) -> None:
    root.write("proc/self/cgroup", "0::/mine").write("sys/fs/cgroup/mine/cpu.max", "max 100000")
    root.write("sys/fs/cgroup/other/cpu.max", "100000 100000")
    assert probe(root).quota_cpus is None


@pytest.mark.parametrize("directory", ["cpu,cpuacct/box", "cpu"])
def test_quota_of_version_1(root: Any, directory: str) -> None:
    root.write("proc/self/cgroup", "4:memory:/box\n3:cpu,cpuacct:/box")
    root.write(f"sys/fs/cgroup/{directory}/cpu.cfs_quota_us", 300000)
    root.write(f"sys/fs/cgroup/{directory}/cpu.cfs_period_us", 100000)
    assert probe(root, num_cpus=8).quota_cpus == 3.0


def test_version_1_without_a_quota(root: Any) -> None:
    root.write("sys/fs/cgroup/cpu/cpu.cfs_quota_us", -1).write("sys/fs/cgroup/cpu/cpu.cfs_period_us", 100000)
    assert probe(root).quota_cpus is None


# Memory.


def test_memory_of_the_machine(root: Any) -> None:
    report = probe(root.write("proc/meminfo", MEMINFO))
    assert report.total_bytes == 8 * GIB
    assert report.available_bytes == 4 * GIB


def test_a_memory_limit_below_the_machine_counts(root: Any) -> None:
    root.write("proc/meminfo", MEMINFO).write("proc/self/cgroup", "0::/box")
    root.write("sys/fs/cgroup/box/memory.max", 2 * GIB).write("sys/fs/cgroup/box/memory.current", GIB // 2)
    report = probe(root)
    assert report.total_bytes == 2 * GIB
    assert report.available_bytes == 3 * GIB // 2


def test_a_memory_limit_above_the_machine_changes_nothing(root: Any) -> None:
    root.write("proc/meminfo", MEMINFO)
    root.write("sys/fs/cgroup/memory.max", 64 * GIB).write("sys/fs/cgroup/memory.current", GIB)
    report = probe(root)
    assert report.total_bytes == 8 * GIB
    assert report.available_bytes == 4 * GIB


def test_an_unlimited_group_has_no_memory_limit(root: Any) -> None:
    root.write("sys/fs/cgroup/memory.max", "max").write("sys/fs/cgroup/memory.current", GIB)
    report = probe(root)
    assert report.total_bytes is None
    assert report.available_bytes is None


def test_use_above_the_limit_leaves_nothing(root: Any) -> None:
    root.write("sys/fs/cgroup/memory.max", GIB).write("sys/fs/cgroup/memory.current", GIB + 4096)
    assert probe(root).available_bytes == 0


def test_memory_limit_of_version_1(root: Any) -> None:
    root.write("proc/meminfo", MEMINFO).write("proc/self/cgroup", "4:memory:/box")
    root.write("sys/fs/cgroup/memory/box/memory.limit_in_bytes", GIB)
    root.write("sys/fs/cgroup/memory/box/memory.usage_in_bytes", GIB // 4)
    report = probe(root)
    assert report.total_bytes == GIB
    assert report.available_bytes == 3 * GIB // 4


# Instruction sets and unknowns.


def test_flags_and_name_of_an_x86_processor(root: Any) -> None:
    report = probe(root.write("proc/cpuinfo", X86_CPUINFO))
    assert report.model_name == "Example CPU @ 2.00GHz"
    expected = {"sse4_2", "avx2", "f16c", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8", "amx_bf16"}
    assert set(report.isa_flags) == expected


def test_flags_of_an_arm_processor(root: Any) -> None:
    report = probe(root.write("proc/cpuinfo", ARM_CPUINFO))
    assert report.model_name is None
    assert set(report.isa_flags) == {"asimd", "asimdhp", "asimddp", "i8mm", "bf16"}


def test_what_is_not_reported_is_none(root: Any) -> None:
    expected = HardwareReport(
        model_name=None,
        isa_flags=(),
        allowed_cpus=(0, 1),
        physical_cores=None,
        quota_cpus=None,
        total_bytes=None,
        available_bytes=None,
    )
    assert probe(root) == expected


def test_malformed_files_count_as_not_reported(root: Any) -> None:
    root.write("proc/meminfo", "MemTotal: lots").write("proc/self/cgroup", "nonsense").write("proc/cpuinfo", "flags")
    root.write("sys/fs/cgroup/cpu.max", "").write("sys/fs/cgroup/memory.max", "unknown")
    report = probe(root)
    assert (report.quota_cpus, report.total_bytes, report.available_bytes, report.isa_flags) == (None, None, None, ())


def test_a_report_is_frozen(root: Any) -> None:
    report = probe(root)
    with pytest.raises(FrozenInstanceError):
        report.quota_cpus = 1.0  # type: ignore[misc]


def test_this_machine_can_be_probed() -> None:
    report = probe_hardware()
    assert 1 <= report.num_threads <= len(report.allowed_cpus)
    assert report.total_bytes is not None
    assert report.available_bytes is not None
    assert 0 < report.available_bytes <= report.total_bytes
