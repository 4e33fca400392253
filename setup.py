"""Builds the distribution `vllm-omni-edge`, and the native core where there is a C++ compiler.

`VLLM_OMNI_TARGET_DEVICE` (`cpu` or `cuda`) chooses the requirements; unset, CUDA is taken where an NVIDIA driver is
loaded. `VLLM_OMNI_EDGE_BUILD=1` takes only what serving on a device needs. `CXX` names the compiler. Without one the
installation succeeds all the same, and the package runs without the native core.
"""

import importlib.util
import sys
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent
REQUIREMENTS = ROOT / "requirements"
NATIVE_LIBRARY = "vllm_omni.native.libomni_native"


def load_module(name: str, path: Path):
    """A module by file: the package itself need not be importable while it is built."""
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def load_light_module(name: str):
    """A module of the package that needs nothing but the standard library."""
    return load_module(f"vllm_omni.{name}", ROOT / "vllm_omni" / f"{name}.py")


def read_requirements(name: str) -> list[str]:
    """Requirements of a file and of the files it includes, without the reasons."""
    found = []
    for line in (REQUIREMENTS / name).read_text().splitlines():
        line = line.partition(" #")[0].strip()
        if line.startswith("-r "):
            found += read_requirements(line.removeprefix("-r ").strip())
        elif line and not line.startswith("#"):
            found.append(line)
    return found


load_light_module("errors")
version = load_light_module("version").__version__
envs = load_light_module("envs")
native_build = load_module("omni_native_build", ROOT / "csrc" / "build.py")
device = envs.VLLM_OMNI_TARGET_DEVICE or ("cuda" if Path("/proc/driver/nvidia/version").exists() else "cpu")
requirements = f"{device}-edge.txt" if envs.VLLM_OMNI_EDGE_BUILD else f"{device}.txt"


class BuildNative(build_ext):
    """Compiles the native core: a plain shared library, and no reason for an installation to fail."""

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split(".")).with_suffix(".so"))

    def build_extension(self, ext: Extension) -> None:
        output = Path(self.get_ext_fullpath(ext.name))
        try:
            native_build.build(output)
        except native_build.BuildError as error:
            print(f"WARNING: the native core was not built, the package runs without it: {error}", file=sys.stderr)
            output.unlink(missing_ok=True)
            if self.editable_mode:
                native_build.LIBRARY.unlink(missing_ok=True)  # an older one would not fit this source tree


def relative(paths: list[Path]) -> list[str]:
    return [path.relative_to(ROOT.resolve()).as_posix() for path in paths]


setup(
    name="vllm-omni-edge",
    version=version,
    description="Language models on small CPU machines behind an OpenAI-compatible API, with vLLM as the engine",
    long_description=(ROOT / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE", "NOTICE"],
    python_requires=">=3.11,<3.14",
    packages=find_packages(include=["vllm_omni", "vllm_omni.*"]),
    package_data={"vllm_omni": ["deploy/**/*.yaml", "quantization/data/*.txt"]},
    ext_modules=[
        Extension(
            NATIVE_LIBRARY,
            sources=relative(native_build.sources()),
            depends=relative(native_build.headers()),
            optional=True,
        )
    ],
    cmdclass={"build_ext": BuildNative},
    install_requires=read_requirements(requirements),
    extras_require={name: read_requirements(f"{name}.txt") for name in ("edge", "diffusion", "bench", "dev")},
    entry_points={
        "console_scripts": ["vllm-omni = vllm_omni.entrypoints.cli.main:main"],
        "vllm.platform_plugins": ["vllm_omni = vllm_omni.platforms.cpu.plugin:platform_class"],
        "vllm.general_plugins": ["vllm_omni = vllm_omni.platforms.cpu.plugin:register_models"],
    },
)
