"""The plugin that says which backends a test run has really tested."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.native import arms
from tests.native.arms import EMULATED, missing_arm
from tests.native.backends import BACKENDS, NATIVE_TESTS, PROPERTY, BackendCoverage, summary_lines
from tests.native.builds import VARIANTS, missing_compiler, native_build

BuildError = native_build.BuildError

ROOT = Path(__file__).parents[3]


def report(arm: str, file: str, outcome: str = "passed", when: str = "call") -> pytest.TestReport:
    properties = [(PROPERTY, f"{arm}/{file}"), ("another", "property")]
    return pytest.TestReport("id", ("", 0, ""), {}, outcome, None, when, user_properties=properties)  # type: ignore[arg-type]


def covered(*arms: str) -> BackendCoverage:
    """A run in which a test of every file has passed on each of `arms`."""
    coverage = BackendCoverage(must_test_all=True)
    for arm in arms:
        for file in NATIVE_TESTS:
            coverage.pytest_runtest_logreport(report(arm, file))
    return coverage


ALL = ("avx512_vnni/simde", "avx2/native", "avx2/sanitized", "generic/native", "neon_dotprod/qemu")


def test_a_backend_is_tested_natively_or_emulated() -> None:
    coverage = covered(*ALL)
    assert coverage.untested() == {}
    assert coverage.ways == {
        "avx512_vnni": {"emulated"}, "avx2": {"native"}, "generic": {"native"}, "neon_dotprod": {"emulated"}
    }  # fmt: skip


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_backend_on_which_nothing_ran_is_untested(backend: str) -> None:
    coverage = covered(*(arm for arm in ALL if not arm.startswith(backend)))
    assert list(coverage.untested()) == [backend]
    assert "no test ran on it" in coverage.untested()[backend]


@pytest.mark.parametrize(("outcome", "when"), [("skipped", "call"), ("skipped", "setup"), ("passed", "setup")])
def test_what_did_not_pass_does_not_count(outcome: str, when: str) -> None:
    coverage = covered(*ALL[:-1])
    for file in NATIVE_TESTS:
        coverage.pytest_runtest_logreport(report(ALL[-1], file, outcome, when))
    assert list(coverage.untested()) == ["neon_dotprod"]


def test_a_file_without_a_passed_test_is_named() -> None:
    coverage = covered(*ALL[:-1])
    for file in NATIVE_TESTS[:-1]:
        coverage.pytest_runtest_logreport(report(ALL[-1], file))
    assert coverage.untested() == {"neon_dotprod": f"no test of {NATIVE_TESTS[-1]} passed on it"}


@pytest.mark.parametrize("when", ["setup", "call", "teardown"])
def test_one_failure_is_enough(when: str) -> None:
    coverage = covered(*ALL)
    coverage.pytest_runtest_logreport(report("avx2/sanitized", NATIVE_TESTS[0], "failed", when))
    assert coverage.untested() == {"avx2": "its tests failed"}


def test_other_tests_do_not_count() -> None:
    coverage = BackendCoverage(must_test_all=True)
    coverage.pytest_runtest_logreport(pytest.TestReport("id", ("", 0, ""), {}, "passed", None, "call"))
    assert list(coverage.untested()) == list(BACKENDS)


def test_the_summary_has_a_line_for_each_backend() -> None:
    ways = {"avx2": {"native"}, "generic": {"native", "emulated"}, "neon_dotprod": {"emulated"}}
    assert summary_lines(ways, {"avx512_vnni": "why"}) == [
        "avx512_vnni: NOT TESTED: why",
        "avx2: native",
        "generic: emulated and native",
        "neon_dotprod: emulated",
    ]


def test_emulated_arms_do_not_ask_what_the_processor_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor for the library that tells it, which a machine with a cross compiler alone cannot build."""

    def refuse() -> tuple[str, ...]:
        raise BuildError("no C++ compiler")

    monkeypatch.setattr(arms, "runnable_isas", refuse)
    for name in EMULATED:
        monkeypatch.setitem(VARIANTS, name, replace(VARIANTS[name], missing=lambda: None))
    assert missing_arm(("neon_dotprod", "qemu", 2)) is None
    assert missing_arm(("avx512_vnni", "simde", 2)) is None
    with pytest.raises(BuildError):
        missing_arm(("avx2", "native", 1))


def test_the_named_files_are_those_that_take_an_arm() -> None:
    files = (ROOT / "tests" / "parity").glob("test_*.py")
    taking = {path.stem for path in files if "(arm: Arm" in path.read_text() and "def arm(" not in path.read_text()}
    assert taking == set(NATIVE_TESTS)


@pytest.mark.skipif(missing_compiler() is not None, reason="the native core cannot be compiled here")
@pytest.mark.parametrize(("ci", "exit_code"), [("true", 1), ("", 0)])
def test_a_run_of_one_file_fails_in_ci_only(ci: str, exit_code: int) -> None:
    """A real run: one test passes on every arm, and the other files have not been run."""
    words = ["-q", "-p", "no:cacheprovider", "tests/parity/test_native_vectors.py", "-k", "zeros_is_zero"]
    environment = {**os.environ, "CI": ci}
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *words], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240
    )
    assert run.returncode == exit_code, run.stdout + run.stderr
    others = ", ".join(name for name in NATIVE_TESTS if name != "test_native_vectors")
    assert f"generic: NOT TESTED: no test of {others} passed on it" in run.stdout
    assert ("CI=true: a backend that was not tested fails the run" in run.stdout) == (ci == "true")
