"""Compiles the native core with the system's C++ compiler; `python csrc/build.py` puts the library into the package.

Used by `setup.py` when the package is installed, and by tests for sanitizer, emulated and cross builds. Nothing but
the standard library is needed. Each arm in `kernels/` is compiled with its own flags and chosen at run time; arms of
another processor family are left out.
"""

import argparse
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

CSRC = Path(__file__).resolve().parent
LIBRARY = CSRC.parent / "vllm_omni" / "native" / "libomni_native.so"
COMPILERS = ("c++", "g++", "clang++")
NUM_JOBS = 2
COMMON_FLAGS = (
    "-std=c++17", "-O3", "-ffp-contract=off", "-fPIC", "-fvisibility=hidden", "-fopenmp-simd", "-pthread",
    "-Wall", "-Wextra", "-Wno-psabi", "-Werror=return-type",
)  # fmt: skip
# Processor family to its arms and their flags. The generic arm runs everywhere and has no flags of its own.
ARM_FLAGS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "x86_64": {
        "avx2": ("-mavx2", "-mfma", "-mf16c"),
        "avx512_vnni": (
            "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni", "-mavx2", "-mfma", "-mf16c",
        ),
    },
    "aarch64": {"neon_dotprod": ("-march=armv8.2-a+dotprod",)},
}  # fmt: skip
FAMILIES = {"amd64": "x86_64", "arm64": "aarch64"}


class BuildError(Exception):
    """The library could not be built; the text is one line and says why."""


@dataclass(frozen=True)
class Target:
    """What to build.

    Attributes:
        compiler: Command and leading arguments; empty: CXX, else the first of `COMPILERS` that is found.
        family: Processor family, a key of `ARM_FLAGS` or another; None: this machine's.
        flags: More flags for compiling and linking, after the common ones.
        arm_flags: Replaces the flags of an arm.
        program: Sources of a program that is linked with the core; empty: the shared library is built.
    """

    compiler: tuple[str, ...] = ()
    family: str | None = None
    flags: tuple[str, ...] = ()
    arm_flags: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    program: tuple[Path, ...] = ()


def sources() -> list[Path]:
    """Every source of the core, all arms included."""
    return [*sorted(CSRC.glob("*.cpp")), *sorted(CSRC.glob("kernels/*.cpp"))]


def headers() -> list[Path]:
    """Every file that sources include, and this one."""
    return [*sorted(CSRC.glob("include/*.h")), *sorted(CSRC.glob("kernels/*.inl")), CSRC / "build.py"]


def find_compiler() -> tuple[str, ...]:
    """The compiler's command: CXX where it is set, else the first one found.

    Raises:
        BuildError: There is none.
    """
    chosen = os.environ.get("CXX")
    command = tuple(shlex.split(chosen)) if chosen else next(((name,) for name in COMPILERS if shutil.which(name)), ())
    if not command:
        raise BuildError(f"no C++ compiler: none of {', '.join(COMPILERS)} is on PATH, and CXX is not set")
    if shutil.which(command[0]) is None:
        raise BuildError(f"no C++ compiler: CXX={chosen!r} is not a program on PATH")
    return command


def build(output: Path, target: Target | None = None) -> Path:
    """Compiles and links `output`, by default the library of this machine, and returns it.

    What was there is replaced only when all went well.

    Raises:
        BuildError: There is no compiler, or it failed.
    """
    target = target or Target()
    compiler = target.compiler or find_compiler()
    files = _files_of(target)
    with tempfile.TemporaryDirectory(prefix="omni-native-") as scratch:
        objects = [Path(scratch) / f"{number}-{file.stem}.o" for number, file in enumerate(files)]
        commands = [_compile_command(compiler, target, *pair) for pair in zip(files, objects, strict=True)]
        with ThreadPoolExecutor(NUM_JOBS) as pool:
            list(pool.map(_run, commands))
        linked = Path(scratch) / output.name
        kind = () if target.program else ("-shared",)
        _run([*compiler, *kind, *map(str, objects), "-o", str(linked), "-pthread", *target.flags])
        _replace(linked, output)
    return output


def family_of(target: Target) -> str:
    """The processor family that `target` is for."""
    machine = platform.machine().lower()
    return target.family or FAMILIES.get(machine, machine)


def _files_of(target: Target) -> list[Path]:
    """Sources that `target` consists of: arms of other families have no place in it."""
    arms = {"generic", *ARM_FLAGS.get(family_of(target), {})}
    files = [file for file in sources() if file.parent == CSRC or file.stem in arms]
    if not files:
        raise BuildError(f"no sources in {CSRC}")
    return [*files, *target.program]


def _compile_command(compiler: Sequence[str], target: Target, source: Path, output: Path) -> list[str]:
    arms = {**ARM_FLAGS.get(family_of(target), {}), **target.arm_flags}
    arm = arms.get(source.stem, ()) if source.parent.name == "kernels" else ()
    return [
        *compiler,
        *COMMON_FLAGS,
        *arm,
        *target.flags,
        f"-I{CSRC / 'include'}",
        "-c",
        str(source),
        "-o",
        str(output),
    ]


def _run(command: Sequence[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise BuildError(f"{command[0]} cannot be run: {error}") from error
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}, nothing printed"]
        first = next((line for line in lines if "error" in line), lines[-1])
        raise BuildError(f"{command[0]} failed: {first.strip()}")
    sys.stderr.write(done.stderr)


def _replace(source: Path, output: Path) -> None:
    """Puts the new file in place at once: a process that has the old one loaded keeps it."""
    output.parent.mkdir(parents=True, exist_ok=True)
    neighbour = output.with_name(f".{output.name}.new")
    shutil.copy(source, neighbour)
    neighbour.replace(output)


def main() -> int:
    parser = argparse.ArgumentParser(description="Compile the native core.")
    parser.add_argument("--output", type=Path, default=LIBRARY, help="the library to write (default: %(default)s)")
    arguments = parser.parse_args()
    try:
        print(build(arguments.output))
    except BuildError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
