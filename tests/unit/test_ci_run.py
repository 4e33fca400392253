"""CI's script, with programs in the place of apt-get, dpkg, id, sudo and make that write down how they were called."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.native.backends import PACKAGES

SCRIPT = Path(__file__).parents[2] / ".ci" / "run"
NEEDED = ("bash", "dirname", "grep", "nproc", "env")
INSTALL = "install --yes --no-install-recommends libsimde-dev qemu-user g++-aarch64-linux-gnu"


class FakeMachine:
    """A directory of programs that is the whole PATH of the script."""

    def __init__(self, directory: Path):
        self.programs = directory / "bin"
        self.calls = directory / "calls"
        self.programs.mkdir()
        self.calls.touch()
        for name in NEEDED:
            found = shutil.which(name)
            assert found is not None
            (self.programs / name).symlink_to(found)
        self.add("make", "echo CI=$CI")

    def add(self, name: str, does: str = "true") -> None:
        """A program that writes down its words and then does something."""
        path = self.programs / name
        path.write_text(f'#!/usr/bin/env bash\necho "{name} $*" >> {self.calls}\n{does}\n')
        path.chmod(0o755)

    def run(self) -> tuple[subprocess.CompletedProcess[str], list[str]]:
        """The script's end, and the calls but those of `id` and `dpkg`."""
        environment = {**os.environ, "PATH": str(self.programs)}
        done = subprocess.run([SCRIPT], env=environment, capture_output=True, text=True, timeout=30)
        calls = self.calls.read_text().splitlines()
        return done, [call for call in calls if call.partition(" ")[0] not in ("id", "dpkg")]


@pytest.fixture
def machine(tmp_path: Path) -> FakeMachine:
    """Debian, as root, without the packages."""
    made = FakeMachine(tmp_path)
    made.add("apt-get")
    made.add("dpkg", "exit 1")
    made.add("id", "echo 0")
    return made


def test_emulators_are_installed_before_the_tests_and_ci_is_set(machine: FakeMachine) -> None:
    done, calls = machine.run()
    assert done.returncode == 0, done.stderr
    assert calls == ["apt-get update", f"apt-get {INSTALL}", "make test"]
    assert "CI=true" in done.stdout
    assert INSTALL.endswith(" ".join(PACKAGES))


def test_installed_packages_are_left_alone(machine: FakeMachine) -> None:
    machine.add("dpkg")
    assert machine.run()[1] == ["make test"]


@pytest.mark.parametrize("failing", ["update", "install"])
def test_a_failed_installation_ends_the_run(machine: FakeMachine, failing: str) -> None:
    machine.add("apt-get", f"[ $1 != {failing} ]")
    done, calls = machine.run()
    assert done.returncode == 1
    assert "apt-get could not install libsimde-dev qemu-user g++-aarch64-linux-gnu" in done.stderr
    assert "make test" not in calls


def test_sudo_is_used_where_it_asks_for_no_password(machine: FakeMachine) -> None:
    machine.add("id", "echo 1000")
    machine.add("sudo", '[ "$2" = true ] || "${@:2}"')
    done, calls = machine.run()
    assert done.returncode == 0, done.stderr
    assert "apt-get update" in calls and f"apt-get {INSTALL}" in calls


def test_without_the_right_to_install_the_tests_decide(machine: FakeMachine) -> None:
    machine.add("id", "echo 1000")
    done, calls = machine.run()
    assert calls == ["make test"]
    assert "neither root nor sudo" in done.stderr


def test_without_apt_the_tests_decide(machine: FakeMachine) -> None:
    (machine.programs / "apt-get").unlink()
    done, calls = machine.run()
    assert calls == ["make test"]
    assert "no apt-get here" in done.stderr


def test_failed_tests_fail_the_run(machine: FakeMachine) -> None:
    machine.add("make", "exit 2")
    assert machine.run()[0].returncode == 2
