"""The only reader (and writer) of environment variables in the package.

Each variable is one row of `VARIABLES`. Reading is an attribute access, evaluated each time:
`envs.VLLM_OMNI_CACHE_DIR`. A malformed value raises `ConfigError` naming the variable, the value and what is
accepted. Every row has its line in `docs/configuration/environment_variables.md`; a test compares the two.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from vllm_omni.errors import ConfigError

TRUE_WORDS = frozenset({"1", "true", "yes", "on"})
FALSE_WORDS = frozenset({"0", "false", "no", "off", ""})


@dataclass(frozen=True)
class Variable:
    """One environment variable.

    Attributes:
        default: Value when the variable is unset.
        parse: Text to value; raises ValueError, whose text says what is accepted.
        meaning: One line for the inventory.
        category: `public_omni`, `inherited_vllm` or `platform_external`.
    """

    default: Any
    parse: Callable[[str], Any]
    meaning: str
    category: str = "public_omni"


def parse_bool(text: str) -> bool:
    word = text.strip().lower()
    if word in TRUE_WORDS:
        return True
    if word in FALSE_WORDS:
        return False
    raise ValueError("accepted: 1, true, yes, on, 0, false, no, off")


def parse_positive_int(text: str) -> int:
    if not text.strip().isdigit() or int(text) < 1:
        raise ValueError("accepted: a whole number, 1 or more")
    return int(text)


def parse_path(text: str) -> Path:
    return Path(text).expanduser()


def parse_choice(choices: Iterable[str]) -> Callable[[str], str]:
    accepted = tuple(choices)

    def parse(text: str) -> str:
        if text not in accepted:
            raise ValueError("accepted: " + ", ".join(accepted))
        return text

    return parse


VARIABLES: Mapping[str, Variable] = MappingProxyType(
    {
        "VLLM_OMNI_CACHE_DIR": Variable(
            Path("~/.cache/vllm-omni").expanduser(),
            parse_path,
            "Directory that remembers which checkpoint files were verified, and holds packed artifacts (gigabytes) "
            "under `artifacts`.",
        ),
        "VLLM_OMNI_CPU_RELEASE_MEMORY": Variable(
            True, parse_bool, "Return freed heap memory to the operating system once the model is loaded."
        ),
        "VLLM_OMNI_EDGE_BUILD": Variable(
            False, parse_bool, "At install time: require only the core runtime (`requirements/<device>-edge.txt`)."
        ),
        "VLLM_OMNI_NATIVE_ISA": Variable(
            None,
            parse_choice(("avx512_vnni", "avx2", "neon_dotprod", "generic")),
            "Instruction set of the native core; unset: the best that this machine can run.",
        ),
        "VLLM_OMNI_NATIVE_LIBRARY": Variable(
            None, parse_path, "The native core's library file, in place of the one built at installation."
        ),
        "VLLM_OMNI_NUM_THREADS": Variable(
            None, parse_positive_int, "Compute threads; unset: from cgroup quota, affinity mask and physical cores."
        ),
        "VLLM_OMNI_SHIM_EAGER_IMPORT": Variable(
            True, parse_bool, "Keep torch's compiler from being imported where nothing is compiled."
        ),
        "VLLM_OMNI_SHIM_EMBEDDING_PACK": Variable(
            True, parse_bool, "Keep the table of an input embedding from being packed for multiplication as well."
        ),
        "VLLM_OMNI_SHIM_NGRAM_DRAFTS": Variable(
            True, parse_bool, "Search n-gram drafts without numba where it is not installed."
        ),
        "VLLM_OMNI_SHIM_PROCESS_GROUPS": Variable(
            True, parse_bool, "Make the process groups of the one process without gloo's threads."
        ),
        "VLLM_OMNI_TARGET_DEVICE": Variable(
            None,
            parse_choice(("cpu", "cuda")),
            "At install time: which device's requirements to take; unset: detected.",
        ),
        "VLLM_API_KEY": Variable(
            None, str, "API key required of clients, as `--api-key`; the flag wins.", "inherited_vllm"
        ),
        "VLLM_LOGGING_LEVEL": Variable(
            "WARNING",
            parse_choice(("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")),
            "Level of vLLM's own messages; this package's events are always logged at INFO.",
            "inherited_vllm",
        ),
        "VLLM_PLUGINS": Variable(
            None, str, "Comma-separated vLLM plugins to load; when set it must name `vllm_omni`.", "inherited_vllm"
        ),
    }
)


def __getattr__(name: str) -> Any:
    """The parsed value of a registered variable, read now."""
    if name not in VARIABLES:
        raise AttributeError(name)
    variable = VARIABLES[name]
    text = os.environ.get(name)
    if text is None:
        return variable.default
    try:
        return variable.parse(text)
    except ValueError as error:
        raise ConfigError(f"environment variable {name}={text!r} is not valid; {error}") from error


def export(values: Mapping[str, str]) -> None:
    """Sets variables that other libraries read when they are imported; existing values are replaced."""
    os.environ.update(values)


@contextmanager
def kept(names: Iterable[str]) -> Iterator[None]:
    """Restores the named variables, set or unset, when the block ends."""
    before = {name: os.environ.get(name) for name in names}
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
