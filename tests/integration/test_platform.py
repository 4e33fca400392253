"""The CPU platform against vLLM's own: an explicit KV size wins, and nothing leaks into the environment."""

import os
from types import SimpleNamespace

import pytest

from vllm_omni import envs

GIB = 1 << 30


@pytest.fixture
def platform(monkeypatch: pytest.MonkeyPatch) -> type:
    """The platform class over a stand-in for vLLM's, which behaves as vLLM does when VLLM_CPU_KVCACHE_SPACE is set."""
    from vllm.platforms.cpu import CpuPlatform

    from vllm_omni.platforms.cpu.platform import OmniCpuPlatform

    def check_and_update_config(vllm_config: SimpleNamespace) -> None:
        vllm_config.cache_config.kv_cache_memory_bytes = GIB
        envs.export({"LD_PRELOAD": "/lib/of/vllm.so"})

    monkeypatch.setattr(CpuPlatform, "check_and_update_config", check_and_update_config)
    return OmniCpuPlatform


def config(kv_bytes: int | None) -> SimpleNamespace:
    return SimpleNamespace(
        cache_config=SimpleNamespace(kv_cache_memory_bytes=kv_bytes), parallel_config=SimpleNamespace(worker_cls="auto")
    )


def test_an_explicit_kv_size_beats_the_environment(platform: type) -> None:
    given = config(kv_bytes=1 << 29)
    platform.check_and_update_config(given)  # type: ignore[attr-defined]
    assert given.cache_config.kv_cache_memory_bytes == 1 << 29


def test_without_an_explicit_kv_size_the_environment_counts(platform: type) -> None:
    given = config(kv_bytes=None)
    platform.check_and_update_config(given)  # type: ignore[attr-defined]
    assert given.cache_config.kv_cache_memory_bytes == GIB


def test_children_of_the_application_inherit_no_preload(platform: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    platform.check_and_update_config(config(kv_bytes=1))  # type: ignore[attr-defined]
    assert "LD_PRELOAD" not in os.environ


def test_the_worker_is_ours(platform: type) -> None:
    given = config(kv_bytes=1)
    platform.check_and_update_config(given)  # type: ignore[attr-defined]
    assert given.parallel_config.worker_cls == "vllm_omni.worker.cpu_worker.OmniCPUWorker"
