"""Building the library: with no compiler, with one that fails, and with one that only writes its output file."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tests.native.builds import ROOT, native_build

FAKE_COMPILER = """#!/bin/sh
echo "$@" >> {log}
while [ $# -gt 0 ]; do
    if [ "$1" = -o ]; then echo built > "$2"; fi
    shift
done
"""


def script(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@pytest.fixture
def fake_compiler(tmp_path: Path) -> Path:
    return script(tmp_path / "fake-c++", FAKE_COMPILER.format(log=tmp_path / "commands"))


def commands(tmp_path: Path) -> list[str]:
    return (tmp_path / "commands").read_text().splitlines()


# Which compiler.


def test_the_compiler_may_be_named_with_arguments(monkeypatch: pytest.MonkeyPatch, fake_compiler: Path) -> None:
    monkeypatch.setenv("CXX", f"{fake_compiler} --wrapped 'two words'")
    assert native_build.find_compiler() == (str(fake_compiler), "--wrapped", "two words")


def test_a_named_compiler_that_is_missing_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/nowhere/c++")
    with pytest.raises(native_build.BuildError, match="no C\\+\\+ compiler: CXX='/nowhere/c\\+\\+' is not a program"):
        native_build.find_compiler()


def test_no_compiler_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(native_build.BuildError, match="none of c\\+\\+, g\\+\\+, clang\\+\\+ is on PATH"):
        native_build.find_compiler()


# What is compiled.


@pytest.mark.parametrize(
    ("family", "arms"),
    [
        ("x86_64", {"generic", "avx2", "avx512_vnni"}),
        ("aarch64", {"generic", "neon_dotprod"}),
        ("riscv64", {"generic"}),
    ],
)
def test_a_family_gets_its_arms(tmp_path: Path, fake_compiler: Path, family: str, arms: set[str]) -> None:
    native_build.build(tmp_path / "lib.so", native_build.Target((str(fake_compiler),), family))
    sources = [word for command in commands(tmp_path) for word in command.split() if word.endswith(".cpp")]
    assert {Path(source).stem for source in sources if "/kernels/" in source} == arms
    assert len(sources) == len(arms) + len(list((ROOT / "csrc").glob("*.cpp")))


def test_only_an_arm_gets_the_flags_of_its_instruction_set(tmp_path: Path, fake_compiler: Path) -> None:
    native_build.build(tmp_path / "lib.so", native_build.Target((str(fake_compiler),), "x86_64"))
    with_avx512 = [command for command in commands(tmp_path) if "-mavx512f" in command]
    with_avx2 = [command for command in commands(tmp_path) if "-mavx2" in command]
    assert len(with_avx512) == 1 and "avx512_vnni.cpp" in with_avx512[0]
    assert len(with_avx2) == 2


def test_every_arm_has_a_family(tmp_path: Path) -> None:
    arms = {arm for family in native_build.ARM_FLAGS.values() for arm in family}
    assert arms | {"generic"} == {file.stem for file in (ROOT / "csrc" / "kernels").glob("*.cpp")}


def test_a_failed_build_says_why_and_keeps_what_was_there(tmp_path: Path) -> None:
    failing = script(tmp_path / "c++", "#!/bin/sh\necho 'note' >&2\necho 'x.cpp:1: error: no such thing' >&2\nexit 1\n")
    (tmp_path / "lib.so").write_text("older")
    with pytest.raises(native_build.BuildError) as caught:
        native_build.build(tmp_path / "lib.so", native_build.Target((str(failing),)))
    assert str(caught.value) == f"{failing} failed: x.cpp:1: error: no such thing"
    assert (tmp_path / "lib.so").read_text() == "older"


# Installation.


def install(tmp_path: Path, compiler: str, *options: str) -> "subprocess.CompletedProcess[str]":
    """The build step of `setup.py`, into a directory of the test."""
    return subprocess.run(
        [sys.executable, "setup.py", "build_ext", "--build-lib", str(tmp_path / "lib"), "--build-temp", str(tmp_path)],
        cwd=ROOT, env={**os.environ, "CXX": compiler, "VLLM_OMNI_TARGET_DEVICE": "cpu"}, capture_output=True, text=True,
    )  # fmt: skip


def test_an_installation_builds_a_plain_shared_library(tmp_path: Path, fake_compiler: Path) -> None:
    done = install(tmp_path, str(fake_compiler))
    assert done.returncode == 0, done.stderr
    assert [path.name for path in (tmp_path / "lib").rglob("*.so")] == ["libomni_native.so"]
    assert (tmp_path / "lib" / "vllm_omni" / "native" / "libomni_native.so").read_text() == "built\n"


def test_an_installation_without_a_compiler_succeeds_and_says_so(tmp_path: Path) -> None:
    done = install(tmp_path, "/nowhere/c++")
    assert done.returncode == 0, done.stderr
    assert "WARNING: the native core was not built, the package runs without it: no C++ compiler" in done.stderr
    assert list((tmp_path / "lib").rglob("*.so")) == []
