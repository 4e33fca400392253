"""In which form weights are held, and what multiplies with them. Pure."""

from collections.abc import Mapping
from typing import Any, Literal

WeightPath = Literal["native-w4a8", "torch-unpacked"]
# Key of vLLM's `additional_config` under which a model of this package tells what runs.
FACTS_KEY = "vllm_omni_model"


def choose_weight_path(native_isa: str | None, native_problem: str | None) -> tuple[WeightPath, str]:
    """The path and the reason for it.

    Both compute the same: codes of 4 or 8 bits times activations of 8 bits. `native-w4a8` reads the packed weights
    where their file is mapped; `torch-unpacked` holds them as float32.

    Args:
        native_isa: The native core's instruction set; None where it does not run.
        native_problem: Why it does not run.
    """
    if native_isa is not None:
        return "native-w4a8", f"the native core runs on {native_isa}"
    return "torch-unpacked", f"slow and large: {native_problem}"


def describe_paths(additional_config: Any, dtype: str) -> dict[str, Any]:
    """What runs, for `/health`: `weight_path` and `forward_path`; where the native core does, `native_isa`, `numerics`.

    Args:
        additional_config: vLLM's, after the model was loaded.
        dtype: What a model of vLLM's own computes in.
    """
    facts = additional_config.get(FACTS_KEY) if isinstance(additional_config, Mapping) else None
    return dict(facts) if facts else {"weight_path": f"vllm-{dtype}", "forward_path": "vllm"}
