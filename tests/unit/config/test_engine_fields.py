import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from vllm_omni.config import engine_fields
from vllm_omni.config.engine_fields import accepted_engine_fields, accepts_text, engine_field_types
from vllm_omni.errors import ConfigError

SOURCE = """
class Other:
    unrelated: int

class EngineArgs:
    model: str = "x"
    revision: str | None = None
    loras: int = 3
    mapping: dict[str, int] | None = None
    _hidden: int = 0
    plain = 5
"""


@pytest.fixture(autouse=True)
def empty_cache() -> Iterator[None]:
    engine_field_types.cache_clear()
    yield
    engine_field_types.cache_clear()


def use_source(monkeypatch: pytest.MonkeyPatch, directory: Path, source: str) -> None:
    (directory / "engine").mkdir()
    (directory / "engine" / "arg_utils.py").write_text(source)
    spec = SimpleNamespace(submodule_search_locations=[str(directory)])
    monkeypatch.setattr(engine_fields.importlib.util, "find_spec", lambda name: spec)


def test_public_annotated_names_are_fields(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_source(monkeypatch, tmp_path, SOURCE)
    assert accepted_engine_fields() == {"model", "revision", "loras", "mapping"}


def test_text_fields_are_told_from_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_source(monkeypatch, tmp_path, SOURCE)
    assert [name for name in sorted(accepted_engine_fields()) if accepts_text(name)] == ["model", "revision"]


def test_vllm_of_another_shape_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_source(monkeypatch, tmp_path, "x = 1\n")
    with pytest.raises(ConfigError, match="has no class EngineArgs; install the vLLM version"):
        accepted_engine_fields()


@pytest.mark.parametrize("spec", [None, SimpleNamespace(submodule_search_locations=None)])
def test_missing_vllm_is_an_error(monkeypatch: pytest.MonkeyPatch, spec: SimpleNamespace | None) -> None:
    monkeypatch.setattr(engine_fields.importlib.util, "find_spec", lambda name: spec)
    with pytest.raises(ConfigError, match="vLLM is not installed"):
        accepted_engine_fields()


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_installed_vllm_has_the_fields_that_stages_set_directly() -> None:
    from vllm_omni.config.deploy_config import StageDeployConfig

    ours = {
        "stage_id",
        "num_threads",
        "tool_call_parser",
        "chat_template",
        "default_sampling_params",
        "devices",
        "engine_extras",
    }
    assert StageDeployConfig.model_fields.keys() - accepted_engine_fields() == ours
