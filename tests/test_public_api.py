"""The names that applications may import; changing this list is a decision, not a side effect."""

import inspect

import pytest

import vllm_omni
from vllm_omni.entrypoints.async_omni import AsyncOmni
from vllm_omni.entrypoints.omni import Omni

ASYNC_METHODS = {"generate", "abort", "shutdown", "close", "check_health", "get_tokenizer"}
SYNC_METHODS = {"generate", "abort", "shutdown", "close", "check_health", "get_tokenizer", "__enter__", "__exit__"}


def test_the_names() -> None:
    assert vllm_omni.__all__ == ["AsyncOmni", "Omni", "__version__", "__version_tuple__"]


@pytest.mark.parametrize("name", vllm_omni.__all__)
def test_every_name_resolves(name: str) -> None:
    assert getattr(vllm_omni, name) is not None


def test_lazy_names_are_the_classes() -> None:
    assert vllm_omni.AsyncOmni is AsyncOmni
    assert vllm_omni.Omni is Omni


def test_another_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'vllm_omni' has no attribute 'Omnibus'"):
        _ = vllm_omni.Omnibus  # type: ignore[attr-defined]


def test_versions_agree() -> None:
    numbers = ".".join(str(part) for part in vllm_omni.__version_tuple__)
    assert vllm_omni.__version__.startswith(numbers)


@pytest.mark.parametrize(("owner", "methods"), [(AsyncOmni, ASYNC_METHODS), (Omni, SYNC_METHODS)])
def test_methods_that_applications_call(owner: type, methods: set[str]) -> None:
    assert {name for name in methods if callable(getattr(owner, name, None))} == methods


def test_construction_takes_the_model_alone_by_position() -> None:
    parameters = list(inspect.signature(AsyncOmni).parameters.values())
    positional = [parameter.name for parameter in parameters if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
    keywords = [parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]
    assert positional == ["model"]
    assert keywords[:3] == ["deploy_profile", "deploy_config", "stage_overrides"]
