"""The names of all environment variables that the package reads, by category. Values are read by `vllm_omni.envs`."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from vllm_omni.envs import VARIABLES

CATEGORIES = (
    "public_omni",
    "inherited_vllm",
    "platform_external",
    "model_specific",
    "benchmark_transitional",
    "internal",
)
SECRET_WORDS = ("KEY", "TOKEN", "SECRET", "PASSWORD")


@dataclass(frozen=True)
class EnvironmentVariableClassification:
    """What kind of variable a name is.

    Attributes:
        category: One of `CATEGORIES`.
        model_disposition: Planned future of a model's own variable: promote, request_scope, external, internalize or
            deprecate_remove; None where nothing is planned.
        redact_value: Never print the value: it is a secret.
    """

    name: str
    category: str
    model_disposition: str | None = None
    redact_value: bool = False

    @property
    def is_public_omni(self) -> bool:
        return self.category == "public_omni"


ENVIRONMENT_VARIABLE_INVENTORY: Mapping[str, EnvironmentVariableClassification] = MappingProxyType(
    {
        name: EnvironmentVariableClassification(
            name, VARIABLES[name].category, redact_value=any(word in name.split("_") for word in SECRET_WORDS)
        )
        for name in sorted(VARIABLES)
    }
)
