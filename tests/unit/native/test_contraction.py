"""The compiler fuses no multiplication and addition that the sources do not, on which equal bits rest.

Results of today's core hardly show it: where a product is added, it is exact, fused on purpose, or in double precision
and rounded after. So this asks the compiler, with the flags of the build, for an expression that does.
"""

import subprocess
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.native.arms import runnable_isas
from tests.native.builds import CROSS_COMPILER, missing_compiler, missing_qemu, native_build, qemu_command

# a * b rounds to c, so that the difference is 0; where it is fused, it is what the rounding lost.
PROBE = """
#include <cstdio>
#include <cstdlib>
template <typename T>
T difference(T a, T b, T c) { return a * b - c; }
int main(int, char** words) {
    const float a = float(atof(words[1])), product = float(atof(words[2]));
    const double wide = atof(words[3]), wide_product = atof(words[4]);
    // Compared at once, the difference would become a comparison, which has nothing to fuse.
    volatile float rest = difference(a, a, product);
    volatile double wide_rest = difference(wide, wide, wide_product);
    std::printf("%d", (rest != 0) + (wide_rest != 0));
}
"""
# Squares of these need more bits than there are. The rounded ones are given too: a product with two uses is not fused.
FLOAT, DOUBLE = np.float32(1 + 2.0**-13), 1 + 2.0**-32
NUMBERS = [float(FLOAT).hex(), float(FLOAT * FLOAT).hex(), DOUBLE.hex(), (DOUBLE * DOUBLE).hex()]
X86_ARMS = [isa for isa in native_build.ARM_FLAGS["x86_64"] if isa in (() if missing_compiler() else runnable_isas())]


def num_fused(compiler: Sequence[str], flags: Sequence[str], launcher: Sequence[str], directory: Path) -> int:
    """How many of the probe's expressions, in single and in double precision, a program with these flags fuses."""
    source, program = directory / "probe.cpp", directory / "probe"
    source.write_text(PROBE)
    subprocess.run([*compiler, *flags, str(source), "-o", str(program)], check=True, capture_output=True, timeout=60)
    run = subprocess.run([*launcher, str(program), *NUMBERS], check=True, capture_output=True, text=True, timeout=60)
    return int(run.stdout)


def without_the_flag() -> list[str]:
    return [flag for flag in native_build.COMMON_FLAGS if not flag.startswith("-ffp-contract")]


@pytest.mark.parametrize("isa", X86_ARMS)
def test_on_this_processor(isa: str, tmp_path: Path) -> None:
    compiler, arm = native_build.find_compiler(), native_build.ARM_FLAGS["x86_64"][isa]
    assert num_fused(compiler, [*native_build.COMMON_FLAGS, *arm], (), tmp_path) == 0
    # The probe can tell: a compiler that is allowed to fuse does.
    assert num_fused(compiler, [*without_the_flag(), "-ffp-contract=fast", *arm], (), tmp_path) == 2


@pytest.mark.skipif(missing_qemu() is not None, reason=str(missing_qemu()))
def test_on_arm_where_plain_code_has_fused_instructions(tmp_path: Path) -> None:
    compiler, launcher = (CROSS_COMPILER, "-static"), qemu_command()
    assert num_fused(compiler, native_build.COMMON_FLAGS, launcher, tmp_path) == 0
    assert num_fused(compiler, [*without_the_flag(), "-ffp-contract=fast"], launcher, tmp_path) == 2
