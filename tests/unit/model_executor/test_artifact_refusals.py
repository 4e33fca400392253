"""An artifact whose model the stack cannot compute is refused before anything heavy is imported."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.unit.model_executor.conftest import ARTIFACT_CONFIG, write_artifact
from vllm_omni.entrypoints.omni_base import prepare
from vllm_omni.errors import ConfigError


def prepare_with(directory: Path, **changes: Any) -> None:
    (directory / "config.json").write_text(json.dumps(ARTIFACT_CONFIG | changes))
    prepare(str(directory))


def test_an_artifact_of_a_known_family_is_accepted(artifact_directory: Path) -> None:
    prepare_with(artifact_directory)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"omni_source_architecture": "GemmaForCausalLM"},
            "omni_source_architecture is 'GemmaForCausalLM'; accepted: Llama",
        ),
        ({"hidden_act": "relu"}, "hidden_act is 'relu'; accepted: silu"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope_type is 'longrope'; accepted: default"),
    ],
)
def test_what_cannot_be_computed_is_refused(artifact_directory: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        prepare_with(artifact_directory, **changes)


@pytest.mark.parametrize("head_dim", [4, 12, 520])
def test_heads_that_the_native_core_does_not_compute_are_refused(tmp_path: Path, head_dim: int) -> None:
    directory = write_artifact(tmp_path, ARTIFACT_CONFIG | {"head_dim": head_dim})
    with pytest.raises(ConfigError, match=f"head_dim is {head_dim}; accepted in packed weights: multiples of 8"):
        prepare(str(directory))


@pytest.mark.parametrize("head_dim", [8, 512])
def test_heads_at_the_limits_are_accepted(tmp_path: Path, head_dim: int) -> None:
    prepare(str(write_artifact(tmp_path, ARTIFACT_CONFIG | {"head_dim": head_dim})))
