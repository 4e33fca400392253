"""Builds the distribution `vllm-omni-edge`.

`VLLM_OMNI_TARGET_DEVICE` (`cpu` or `cuda`) chooses the requirements; unset, CUDA is taken where an NVIDIA driver is
loaded. `VLLM_OMNI_EDGE_BUILD=1` takes only what serving on a device needs.
"""

import importlib.util
import sys
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
REQUIREMENTS = ROOT / "requirements"


def load_light_module(name: str):
    """A module of the package by file: the package itself need not be importable while it is built."""
    spec = importlib.util.spec_from_file_location(f"vllm_omni.{name}", ROOT / "vllm_omni" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[f"vllm_omni.{name}"] = module
    spec.loader.exec_module(module)
    return module


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
device = envs.VLLM_OMNI_TARGET_DEVICE or ("cuda" if Path("/proc/driver/nvidia/version").exists() else "cpu")
requirements = f"{device}-edge.txt" if envs.VLLM_OMNI_EDGE_BUILD else f"{device}.txt"

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
    package_data={"vllm_omni": ["deploy/**/*.yaml"]},
    install_requires=read_requirements(requirements),
    extras_require={name: read_requirements(f"{name}.txt") for name in ("edge", "diffusion", "bench", "dev")},
    entry_points={
        "console_scripts": ["vllm-omni = vllm_omni.entrypoints.cli.main:main"],
        "vllm.platform_plugins": ["vllm_omni = vllm_omni.platforms.cpu.plugin:platform_class"],
        "vllm.general_plugins": ["vllm_omni = vllm_omni.platforms.cpu.plugin:register_models"],
    },
)
