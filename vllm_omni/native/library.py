"""Finds, loads and checks the shared library of the native core, once per process.

The library is built when the package is installed, where there was a C++ compiler. `native_library()` is None where it
is absent or cannot be used, and `native_status()` says why: the torch path then runs. Whoever decides between the two
logs that text.
"""

import ctypes
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from vllm_omni import envs
from vllm_omni.errors import CapacityError, ConfigError, EngineError, HardwareError
from vllm_omni.native.structures import ABI_VERSION, ERROR_ISA, ERROR_MEMORY, FUNCTIONS, OK

LIBRARY_NAME = "libomni_native.so"
DEFAULT_PATH = Path(__file__).with_name(LIBRARY_NAME)
INSTALL_HINT = "install a C++17 compiler (g++ or clang++) and then this package again"


class Library:
    """The loaded library. Its functions are attributes of `functions`, under their names in the C ABI.

    Attributes:
        path: The file it was loaded from.
        compiled_isas: Names of the arms it contains, best first.
        runnable_isas: Those of them that this machine can run.
        numerics_version: Changes whenever the bits of a result do.
    """

    def __init__(self, path: Path):
        """Loads `path`.

        Raises:
            HardwareError: The file is missing, no library of this machine, or speaks another version of the ABI.
        """
        self.path = path
        self.functions = _load(path)
        self.compiled_isas = _names(self.functions.omni_compiled_isas())
        self.runnable_isas = _names(self.functions.omni_runnable_isas())
        self.numerics_version = int(self.functions.omni_numerics_version())

    def select_isa(self, isa: str | None = None) -> str:
        """The arm to run: `isa`, else VLLM_OMNI_NATIVE_ISA, else the best.

        Raises:
            HardwareError: This machine cannot run the arm that was asked for; the message lists what it can run.
        """
        source = "isa" if isa else "environment variable VLLM_OMNI_NATIVE_ISA"
        wanted = isa or envs.VLLM_OMNI_NATIVE_ISA
        if wanted is None:
            return self.runnable_isas[0]
        if wanted not in self.runnable_isas:
            raise HardwareError(
                f"{source}={wanted!r}: this machine cannot run that arm of the native core; it can run: "
                f"{', '.join(self.runnable_isas)}; choose one of these, or none for the best"
            )
        return wanted

    def check(self, code: int) -> None:
        """Raises the error that a function's result stands for, with the library's own text."""
        if code == OK:
            return
        classes: dict[int, type[Exception]] = {ERROR_ISA: HardwareError, ERROR_MEMORY: CapacityError}
        raise classes.get(code, EngineError)(f"native core: {self.last_error()}")

    def last_error(self) -> str:
        """Text of the last error in this thread."""
        return str(self.functions.omni_last_error().decode())


@dataclass(frozen=True)
class NativeStatus:
    """Which path runs and why; its text is for the log and for /health.

    Attributes:
        isa: The arm of the native core; None where torch runs.
        reason: Why torch runs; None where the native core does.
        numerics: Version of the bits that the native core computes; None where torch runs.
    """

    isa: str | None = None
    reason: str | None = None
    numerics: int | None = None

    def __str__(self) -> str:
        return f"native {self.isa}" if self.isa else f"torch: {self.reason}"


def native_library() -> Library | None:
    """The library, loaded at the first call; None where there is none that can be used.

    Raises:
        ConfigError: VLLM_OMNI_NATIVE_LIBRARY names a file that cannot be used.
        HardwareError: VLLM_OMNI_NATIVE_ISA forces an arm that cannot run here, or there is no library to force it in.
    """
    found = _find()
    if isinstance(found, Library):
        found.select_isa()
        return found
    if envs.VLLM_OMNI_NATIVE_ISA is not None:
        raise HardwareError(f"environment variable VLLM_OMNI_NATIVE_ISA={envs.VLLM_OMNI_NATIVE_ISA!r}: {found}")
    return None


def native_status() -> NativeStatus:
    """Which path runs in this process, and why. Raises what `native_library` raises."""
    library = native_library()
    if library is None:
        return NativeStatus(reason=str(_find()))
    return NativeStatus(isa=library.select_isa(), numerics=library.numerics_version)


def _find() -> Library | str:
    """The library of this process, or why there is none."""
    chosen = envs.VLLM_OMNI_NATIVE_LIBRARY
    found = _library_at(chosen or DEFAULT_PATH)
    if chosen is not None and not isinstance(found, Library):
        raise ConfigError(f"environment variable VLLM_OMNI_NATIVE_LIBRARY={str(chosen)!r}: {found}")
    return found


@cache
def _library_at(path: Path) -> Library | str:
    try:
        return Library(path)
    except HardwareError as error:
        return str(error)


def _load(path: Path) -> Any:
    """The library with its functions declared."""
    if not path.is_file():
        raise HardwareError(f"the native core is not built ({path.name} is missing); {INSTALL_HINT}")
    try:
        functions = ctypes.CDLL(str(path))
    except OSError as error:
        raise HardwareError(f"{path} cannot be loaded: {error}; {INSTALL_HINT}") from error
    if not hasattr(functions, "omni_abi_version"):
        raise HardwareError(f"{path} is not the native core of this package; {INSTALL_HINT}")
    version = functions.omni_abi_version()
    if version != ABI_VERSION:
        raise HardwareError(
            f"{path} has version {version} of the ABI, this package needs {ABI_VERSION}; {INSTALL_HINT}"
        )
    for name, (result, parameters) in FUNCTIONS.items():
        function = getattr(functions, name)
        function.restype, function.argtypes = result, parameters
    return functions


def _names(text: bytes) -> tuple[str, ...]:
    return tuple(text.decode().split(","))
