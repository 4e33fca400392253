import pytest

from vllm_omni.config.environment_variable_inventory import CATEGORIES, ENVIRONMENT_VARIABLE_INVENTORY
from vllm_omni.envs import VARIABLES


def test_it_lists_every_variable_sorted() -> None:
    assert list(ENVIRONMENT_VARIABLE_INVENTORY) == sorted(VARIABLES)


def test_categories_are_known_and_public_names_carry_the_prefix() -> None:
    for name, entry in ENVIRONMENT_VARIABLE_INVENTORY.items():
        assert entry.name == name
        assert entry.category in CATEGORIES
        assert entry.model_disposition is None
        assert entry.is_public_omni == name.startswith("VLLM_OMNI_")


def test_secrets_are_redacted() -> None:
    assert ENVIRONMENT_VARIABLE_INVENTORY["VLLM_API_KEY"].redact_value
    assert not ENVIRONMENT_VARIABLE_INVENTORY["VLLM_OMNI_CACHE_DIR"].redact_value


def test_it_is_read_only() -> None:
    with pytest.raises(TypeError):
        ENVIRONMENT_VARIABLE_INVENTORY["X"] = None  # type: ignore[index]
