"""Which backends of the native core a test run has really tested, natively or emulated.

A plugin of pytest. A backend counts as tested when tests of every file of `NATIVE_TESTS` have passed on it, and none
has failed. The terminal summary names each other backend, why, and what to install; where CI=true is set, such a run
fails.
"""

import os
from collections import defaultdict
from collections.abc import Iterable, Mapping

import pytest

from tests.native.arms import EMULATED
from tests.native.builds import VARIANTS

BACKENDS = ("avx512_vnni", "avx2", "generic", "neon_dotprod")
# Files of tests/parity whose tests take the fixture `arm`; of these, `test_native_bits` compares backends bit by bit.
NATIVE_TESTS = (
    "test_native_attention",
    "test_native_bits",
    "test_native_decoder",
    "test_native_linear",
    "test_native_sampling",
    "test_native_vectors",
)
# Backend to the build that emulates it.
EMULATORS: Mapping[str, str] = {"avx512_vnni": "simde", "neon_dotprod": "qemu"}
PACKAGES = ("libsimde-dev", "qemu-user", "g++-aarch64-linux-gnu")
PROPERTY = "native_backend"


class BackendCoverage:
    """Collects, during one run, the test files that have passed on each backend.

    Args:
        must_test_all: An untested backend fails the run.
    """

    def __init__(self, must_test_all: bool):
        self.must_test_all = must_test_all
        self.is_asked = must_test_all
        self.passed: dict[str, set[str]] = defaultdict(set)
        self.failed: set[str] = set()
        self.ways: dict[str, set[str]] = defaultdict(set)

    def untested(self) -> dict[str, str]:
        """Backend to the reason, of those that the run has not tested."""
        return {name: reason for name in BACKENDS if (reason := self._why_untested(name)) is not None}

    def _why_untested(self, backend: str) -> str | None:
        if backend in self.failed:
            return "its tests failed"
        missing = sorted(set(NATIVE_TESTS) - self.passed[backend])
        if not missing:
            return None
        if self.passed[backend]:
            return f"no test of {', '.join(missing)} passed on it"
        return f"no test ran on it; {missing_emulator(backend)}"

    @pytest.hookimpl
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.is_asked |= any(item.path.stem in NATIVE_TESTS for item in session.items)

    @pytest.hookimpl
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        arm = arm_of(item)
        if arm is not None:
            isa, variant, _ = arm
            item.user_properties.append((PROPERTY, f"{isa}/{variant}/{item.path.stem}"))

    @pytest.hookimpl
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for name, value in report.user_properties:
            if name == PROPERTY:
                self.add(report, *str(value).split("/"))

    def add(self, report: pytest.TestReport, backend: str, variant: str, file: str) -> None:
        """Takes one phase of a test into account."""
        if report.failed:
            self.failed.add(backend)
        elif report.when == "call" and report.passed:
            self.passed[backend].add(file)
            self.ways[backend].add("emulated" if variant in EMULATED else "native")

    @pytest.hookimpl
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        has_run = not session.config.option.collectonly
        if has_run and self.must_test_all and self.untested() and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    @pytest.hookimpl
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if terminalreporter.config.option.collectonly or not self.is_asked:
            return
        untested = self.untested()
        terminalreporter.section("backends of the native core")
        for line in summary_lines(self.ways, untested):
            terminalreporter.line(line)
        if untested and self.must_test_all:
            terminalreporter.line("CI=true: a backend that was not tested fails the run", red=True)


def summary_lines(ways: Mapping[str, Iterable[str]], untested: Mapping[str, str]) -> list[str]:
    """One line for each backend."""
    return [
        f"{name}: NOT TESTED: {untested[name]}" if name in untested else f"{name}: {' and '.join(sorted(ways[name]))}"
        for name in BACKENDS
    ]


def missing_emulator(backend: str) -> str:
    """What this machine needs to run a backend that its processor does not."""
    if backend not in EMULATORS:
        return "it has no emulator: run the tests on a processor that has it"
    missing = VARIANTS[EMULATORS[backend]].missing()
    if missing is None:
        return "its emulator is installed, but the run did not select its tests"
    return f"{missing}; install {' '.join(PACKAGES)}"


def arm_of(item: pytest.Item) -> tuple[str, str, int] | None:
    """The parameter of the fixture `arm`, where the test takes that of tests/parity."""
    callspec = getattr(item, "callspec", None)
    arm = None if callspec is None else callspec.params.get("arm")
    return arm if isinstance(arm, tuple) else None


def register(config: pytest.Config) -> None:
    """Adds the plugin to a run."""
    config.pluginmanager.register(BackendCoverage(os.environ.get("CI") == "true"), "native-backends")
