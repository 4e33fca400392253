"""Builds of the native core for tests, each made once per state of its sources, under `build/native`."""

import hashlib
import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]
DRIVER = Path(__file__).with_name("driver.cpp")
BUILDS = ROOT / "build" / "native"


def load_build_module() -> ModuleType:
    """`csrc/build.py`, which is no part of a package."""
    spec = importlib.util.spec_from_file_location("omni_native_build", ROOT / "csrc" / "build.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


native_build = load_build_module()


@dataclass(frozen=True)
class Variant:
    """One way to build and to run the core.

    Attributes:
        missing: Why this machine cannot make or run it; None where it can.
        launcher: What the driver is started with; None: the shared library is built, for this process.
    """

    name: str
    missing: Callable[[], str | None]
    compiler: tuple[str, ...] = ()
    family: str | None = None
    flags: tuple[str, ...] = ()
    arm_flags: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    launcher: Callable[[], tuple[str, ...]] | None = None

    @property
    def output(self) -> Path:
        """Where the result of the sources as they are now belongs."""
        digest = hashlib.sha256(repr((self.compiler, self.flags, sorted(self.arm_flags.items()))).encode())
        for file in (*native_build.sources(), *native_build.headers(), DRIVER):
            digest.update(file.read_bytes())
        name = "libomni_native.so" if self.launcher is None else "driver"
        return BUILDS / f"{self.name}-{digest.hexdigest()[:12]}" / name

    def build(self) -> Path:
        """The library or the driver; older builds of this variant are removed."""
        output = self.output
        if not output.is_file():
            for old in BUILDS.glob(f"{self.name}-*"):
                shutil.rmtree(old)
            program = () if self.launcher is None else (DRIVER,)
            target = native_build.Target(self.compiler, self.family, self.flags, self.arm_flags, program)
            native_build.build(output, target)
        return output


def missing_compiler() -> str | None:
    try:
        native_build.find_compiler()
    except native_build.BuildError as error:
        return str(error)
    return None


@cache
def _missing_instrumentation(flags: tuple[str, ...]) -> str | None:
    """Whether a program with a sanitizer can be linked and run."""
    if missing_compiler() is not None:
        return missing_compiler()
    BUILDS.mkdir(parents=True, exist_ok=True)
    program = BUILDS / "sanitizer-probe"
    command = [*native_build.find_compiler(), *flags, "-x", "c++", "-", "-o", str(program)]
    done = subprocess.run(command, input="int main() {}", capture_output=True, text=True)
    if done.returncode or subprocess.run([program]).returncode:
        return f"programs built with {' '.join(flags)} do not run here"
    return None


def missing_sanitizers() -> str | None:
    return _missing_instrumentation(SANITIZERS)


def missing_race_detector() -> str | None:
    return _missing_instrumentation(RACE_DETECTOR)


def missing_simde() -> str | None:
    if not Path("/usr/include/simde/x86/avx512.h").is_file():
        return "SIMDe's headers (libsimde-dev) are not installed"
    return missing_compiler()


def missing_qemu() -> str | None:
    if shutil.which(CROSS_COMPILER) is None:
        return f"{CROSS_COMPILER} is not installed"
    return None if qemu() is not None else "qemu-user for aarch64 is not installed"


def qemu() -> str | None:
    return shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")


def qemu_command() -> tuple[str, ...]:
    command = qemu()
    assert command is not None
    return (command, "-cpu", "max")


def race_detector_command() -> tuple[str, ...]:
    """Ends the driver at the first race."""
    return ("env", "TSAN_OPTIONS=halt_on_error=1")


CROSS_COMPILER = "aarch64-linux-gnu-g++"
SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
RACE_DETECTOR = ("-fsanitize=thread",)
VARIANTS = {
    variant.name: variant
    for variant in (
        Variant("native", missing_compiler),
        Variant(
            "sanitized", missing_sanitizers, flags=(*SANITIZERS, "-g", "-O1", "-fno-omit-frame-pointer"), launcher=tuple
        ),
        Variant("races", missing_race_detector, flags=(*RACE_DETECTOR, "-g", "-O1"), launcher=race_detector_command),
        Variant(
            "qemu",
            missing_qemu,
            compiler=(CROSS_COMPILER,),
            family="aarch64",
            flags=("-static",),
            launcher=qemu_command,
        ),
        Variant(
            "simde",
            missing_simde,
            flags=("-DOMNI_SIMDE",),
            arm_flags={"avx512_vnni": ("-mavx2", "-mfma", "-mf16c")},
            launcher=tuple,
        ),
    )
}
