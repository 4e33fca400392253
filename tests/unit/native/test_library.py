import subprocess
from pathlib import Path

import pytest

from tests.native.builds import missing_compiler, native_build
from vllm_omni.errors import CapacityError, ConfigError, EngineError, HardwareError
from vllm_omni.native import library as module
from vllm_omni.native.library import Library, native_library, native_status
from vllm_omni.native.ops import Team
from vllm_omni.native.structures import ABI_VERSION

needs_compiler = pytest.mark.skipif(missing_compiler() is not None, reason=str(missing_compiler()))


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_OMNI_NATIVE_ISA", raising=False)
    monkeypatch.delenv("VLLM_OMNI_NATIVE_LIBRARY", raising=False)


@pytest.fixture
def installed(library: Library, monkeypatch: pytest.MonkeyPatch) -> Library:
    """The library, as if it were the one of the installation."""
    monkeypatch.setattr(module, "DEFAULT_PATH", library.path)
    return library


def compile_c(code: str, output: Path) -> Path:
    command = [*native_build.find_compiler(), "-shared", "-fPIC", "-x", "c++", "-", "-o", str(output)]
    subprocess.run(command, input=code, text=True, check=True)
    return output


# Which path runs.


def test_the_best_arm_runs(installed: Library) -> None:
    loaded = native_library()
    assert loaded is not None and loaded.path == installed.path
    assert str(native_status()) == f"native {installed.runnable_isas[0]}"
    assert native_status().isa == installed.runnable_isas[0]


def test_the_library_is_loaded_once(installed: Library) -> None:
    assert native_library() is native_library()


def test_runnable_arms_are_compiled_and_generic_is_the_last(library: Library) -> None:
    assert set(library.runnable_isas) <= set(library.compiled_isas)
    assert library.runnable_isas[-1] == library.compiled_isas[-1] == "generic"


def test_without_a_library_torch_runs_and_the_reason_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(module, "DEFAULT_PATH", tmp_path / "libomni_native.so")
    assert native_library() is None
    assert native_status().isa is None
    assert str(native_status()) == (
        "torch: the native core is not built (libomni_native.so is missing); "
        "install a C++17 compiler (g++ or clang++) and then this package again"
    )


def test_a_file_that_is_no_library_is_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "broken.so"
    path.write_bytes(b"\x7fELF, but not for long")
    monkeypatch.setattr(module, "DEFAULT_PATH", path)
    assert native_library() is None
    assert f"torch: {path} cannot be loaded: " in str(native_status())


@needs_compiler
def test_a_library_of_another_version_is_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = compile_c('extern "C" int omni_abi_version(void) { return 99; }', tmp_path / "other.so")
    monkeypatch.setattr(module, "DEFAULT_PATH", path)
    assert native_library() is None
    assert f"{path} has version 99 of the ABI, this package needs {ABI_VERSION}; install" in str(native_status())


@needs_compiler
def test_another_library_is_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = compile_c("int something;", tmp_path / "foreign.so")
    monkeypatch.setattr(module, "DEFAULT_PATH", path)
    assert native_library() is None
    assert f"{path} is not the native core of this package" in str(native_status())


def test_a_named_library_has_to_be_usable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("VLLM_OMNI_NATIVE_LIBRARY", str(tmp_path / "missing.so"))
    for ask in (native_library, native_status):
        with pytest.raises(ConfigError, match=r"VLLM_OMNI_NATIVE_LIBRARY='.*missing.so': .*is missing"):
            ask()


def test_a_named_library_is_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, library: Library) -> None:
    monkeypatch.setattr(module, "DEFAULT_PATH", tmp_path / "libomni_native.so")
    monkeypatch.setenv("VLLM_OMNI_NATIVE_LIBRARY", str(library.path))
    loaded = native_library()
    assert loaded is not None and loaded.path == library.path


# Forcing an arm.


def test_a_forced_arm_runs(installed: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_OMNI_NATIVE_ISA", "generic")
    assert str(native_status()) == "native generic"
    with Team(1) as team:
        assert team.isa == "generic"
        assert installed.functions.omni_team_isa(team.handle) == b"generic"


def test_a_forced_arm_that_cannot_run_is_an_error(installed: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    impossible = next(isa for isa in ("neon_dotprod", "avx2") if isa not in installed.runnable_isas)
    monkeypatch.setenv("VLLM_OMNI_NATIVE_ISA", impossible)
    runnable = ", ".join(installed.runnable_isas)
    for ask in (native_library, native_status, lambda: Team(1)):
        with pytest.raises(HardwareError, match=rf"VLLM_OMNI_NATIVE_ISA='{impossible}'.* can run: {runnable};"):
            ask()


def test_a_forced_arm_without_a_library_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(module, "DEFAULT_PATH", tmp_path / "libomni_native.so")
    monkeypatch.setenv("VLLM_OMNI_NATIVE_ISA", "generic")
    with pytest.raises(HardwareError, match=r"VLLM_OMNI_NATIVE_ISA='generic': the native core is not built"):
        native_library()


def test_an_argument_wins_over_the_variable(installed: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_OMNI_NATIVE_ISA", installed.runnable_isas[0])
    assert installed.select_isa("generic") == "generic"
    with pytest.raises(HardwareError, match=r"^isa='sse'"):
        installed.select_isa("sse")


# Results of functions.


@pytest.mark.parametrize(("code", "error"), [(-1, EngineError), (-2, HardwareError), (-3, CapacityError)])
def test_codes_become_errors(library: Library, code: int, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"^native core: "):
        library.check(code)


def test_zero_is_no_error(library: Library) -> None:
    library.check(0)
