import sys
from types import ModuleType
from typing import Any

import pytest

from vllm_omni.platforms.cpu import plugin

REGISTRY = "vllm.model_executor.models.registry"


class LazyModel:
    """Stands for vLLM's record of a class that is not loaded."""

    def __init__(self, name: str):
        self.name = name

    def load_model_cls(self) -> str:
        return f"class {self.name}"


class FakeRegistry:
    def __init__(self) -> None:
        self.models: dict[str, Any] = {"Lazy": LazyModel("Lazy"), "Loaded": "class Loaded", "Other": LazyModel("Other")}

    def register_model(self, name: str, model_class: Any) -> None:
        self.models[name] = model_class


@pytest.fixture(autouse=True)
def inactive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "_active", False)
    monkeypatch.setattr(plugin, "_architectures", ())


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> FakeRegistry:
    """vLLM's model registry, without vLLM."""
    made = FakeRegistry()
    parts = REGISTRY.split(".")
    for end in range(1, len(parts) + 1):
        name = ".".join(parts[:end])
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    module: Any = sys.modules[REGISTRY]
    module.ModelRegistry, module._LazyRegisteredModel = made, LazyModel
    return made


def test_nothing_happens_before_activation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)  # An import of it would now raise.
    assert plugin.platform_class() is None
    plugin.register_models()


def test_activation_names_the_platform_class() -> None:
    plugin.activate(["Lazy"])
    assert plugin.platform_class() == "vllm_omni.platforms.cpu.platform.OmniCpuPlatform"


def test_only_classes_about_to_be_served_are_loaded(registry: FakeRegistry) -> None:
    plugin.activate(iter(["Lazy", "Loaded", "Unknown"]))
    plugin.register_models()
    plugin.register_models()
    assert registry.models["Lazy"] == "class Lazy"
    assert registry.models["Loaded"] == "class Loaded"
    assert isinstance(registry.models["Other"], LazyModel)
    assert "Unknown" not in registry.models


def test_an_artifact_registers_the_decoder(registry: FakeRegistry, monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = ModuleType("registration")
    calls: list[str] = []
    module.register_decoder = lambda: calls.append("registered")
    monkeypatch.setitem(sys.modules, "vllm_omni.model_executor.models.decoder.registration", module)
    plugin.activate(["Lazy"])
    plugin.register_models()
    assert calls == []
    plugin.activate(["OmniDecoderForCausalLM"])
    plugin.register_models()
    assert calls == ["registered"]
