from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vllm_omni.config.artifact_fields import QUANT_METHOD, REASON
from vllm_omni.config.deployment import Deployment
from vllm_omni.config.resolve import resolve_deployment
from vllm_omni.errors import ConfigError
from vllm_omni.quantization import packed_format

MakeModel = Callable[..., Path]


def test_the_method_is_that_of_the_format() -> None:
    assert QUANT_METHOD == packed_format.QUANT_METHOD


@pytest.fixture
def resolve_artifact(make_model: MakeModel) -> Callable[..., Deployment]:
    """The deployment of an artifact with the given flags."""
    directory = make_model(quantization_config={"quant_method": QUANT_METHOD})
    return lambda **overrides: resolve_deployment(str(directory), overrides=overrides)


def test_an_artifact_sets_its_own_fields(resolve_artifact: Callable[..., Deployment]) -> None:
    deployment = resolve_artifact()
    stage = deployment.stage(0)
    assert (stage.dtype, stage.kv_cache_dtype, stage.load_format) == ("float32", "bfloat16", QUANT_METHOD)
    assert deployment.provenance["stages[0].dtype"] == REASON


def test_what_the_machine_would_choose_does_not_count(make_model: MakeModel) -> None:
    directory = make_model(quantization_config={"quant_method": QUANT_METHOD})
    deployment = resolve_deployment(str(directory), derive=lambda _: {"dtype": ("bfloat16", "hardware")})
    assert deployment.stage(0).dtype == "float32"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("auto", "bfloat16"),
        ("bfloat16", "bfloat16"),
        ("int8", "int8_per_token_head"),
        ("int8_per_token_head", "int8_per_token_head"),
    ],
)
def test_cache_types(resolve_artifact: Callable[..., Deployment], given: str, expected: str) -> None:
    assert resolve_artifact(kv_cache_dtype=given).stage(0).kv_cache_dtype == expected


def test_a_short_name_keeps_its_source(resolve_artifact: Callable[..., Deployment]) -> None:
    deployment = resolve_artifact(kv_cache_dtype="int8")
    assert deployment.provenance["stages[0].kv_cache_dtype"] == "int8 (--kv-cache-dtype)"


def test_blocks_are_small_unless_set(resolve_artifact: Callable[..., Deployment]) -> None:
    assert resolve_artifact().stage(0).block_size == 32
    assert resolve_artifact(block_size=64).stage(0).block_size == 64
    with pytest.raises(ConfigError, match=r"block_size is 24 \(--block-size\); accepted for .* multiples of 16"):
        resolve_artifact(block_size=24)


def test_the_method_is_not_handed_to_vllm(resolve_artifact: Callable[..., Deployment]) -> None:
    assert resolve_artifact(quantization=QUANT_METHOD).stage(0).quantization is None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("dtype", "bfloat16"),
        ("kv_cache_dtype", "fp8"),
        ("load_format", "dummy"),
        ("quantization", "awq"),
        ("attention_backend", "CPU_ATTN"),
    ],
)
def test_other_values_are_refused(resolve_artifact: Callable[..., Deployment], field: str, value: str) -> None:
    with pytest.raises(ConfigError, match=rf"{field} is '{value}' \(--{field.replace('_', '-')}\); accepted for"):
        resolve_artifact(**{field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [("kv_cache_dtype", "int8"), ("kv_cache_dtype", "int8_per_token_head"), ("load_format", "omni_int4")],
)
def test_what_only_an_artifact_has_is_refused_elsewhere(model: str, field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match="Make one with `vllm-omni quantize"):
        resolve_deployment(model, overrides={field: value})


def test_other_checkpoints_are_left_alone(model: str) -> None:
    stage = resolve_deployment(model).stage(0)
    assert (stage.dtype, stage.kv_cache_dtype, stage.load_format) == (None, None, None)
    assert stage.block_size is None
