import shlex
from pathlib import Path

from benchmarks.edge_harness.provenance import collect_provenance, git_output, governor, package_version


def test_the_governor_is_read(tmp_path: Path) -> None:
    path = tmp_path / "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"
    path.parent.mkdir(parents=True)
    path.write_text("powersave\n")
    assert governor(tmp_path) == "powersave"


def test_a_machine_without_governor_has_none(tmp_path: Path) -> None:
    assert governor(tmp_path) is None


def test_a_package_that_is_not_installed_has_no_version() -> None:
    assert package_version("no-such-package-here") is None
    assert package_version("pytest") is not None


def test_a_directory_that_is_no_checkout_has_no_commit(tmp_path: Path) -> None:
    assert git_output(tmp_path, "rev-parse", "HEAD") is None


def test_the_command_can_be_pasted_again(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text("model name\t: Example\nflags\t: avx2 fpu\n")
    facts = collect_provenance(["python", "--model", "a b"], root=tmp_path, repository=tmp_path)
    assert shlex.split(facts["command"]) == ["python", "--model", "a b"]
    assert (facts["processor"], facts["instruction_sets"]) == ("Example", ["avx2"])
    assert facts["commit"] is facts["uncommitted_changes"] is None
