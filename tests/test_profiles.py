"""Every packaged deploy file resolves for every model type that it serves, and the documented numbers are true."""

import json
from itertools import pairwise
from pathlib import Path

import pytest

from vllm_omni.config.loader import DEPLOY_DIR
from vllm_omni.config.pipeline_registry import OMNI_PIPELINES
from vllm_omni.config.resolve import list_profiles, resolve_deployment

FILES = sorted(DEPLOY_DIR.rglob("*.yaml"))
MODEL_TYPES = sorted(set(OMNI_PIPELINES) - {"text"})
DOCUMENT = Path(__file__).parents[1] / "docs" / "profiles.md"


@pytest.fixture
def fake_model(tmp_path: Path, request: pytest.FixtureRequest) -> str:
    config = {
        "model_type": request.param,
        "architectures": ["LlamaForCausalLM"],
        "max_position_embeddings": 2048,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "hidden_size": 64,
        "vocab_size": 256,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    return str(tmp_path)


@pytest.mark.parametrize("fake_model", MODEL_TYPES, indirect=True)
@pytest.mark.parametrize("profile", [None, *list_profiles()])
def test_every_profile_resolves_for_every_registered_model_type(fake_model: str, profile: str | None) -> None:
    deployment = resolve_deployment(fake_model, deploy_profile=profile)
    assert len(deployment.config.stages) == len(deployment.pipeline.stages)
    assert deployment.describe()


@pytest.mark.parametrize("fake_model", ["llama"], indirect=True)
@pytest.mark.parametrize("file", FILES, ids=[str(file.relative_to(DEPLOY_DIR)) for file in FILES])
def test_every_packaged_file_loads_by_its_name(fake_model: str, file: Path) -> None:
    deployment = resolve_deployment(fake_model, deploy_config=str(file.relative_to(DEPLOY_DIR)))
    assert deployment.files[0] == file


@pytest.mark.parametrize("fake_model", ["llama"], indirect=True)
def test_edge_profile_for_text(fake_model: str) -> None:
    config = resolve_deployment(fake_model, deploy_profile="edge").config
    stage = config.stages[0]
    assert config.stage_topology == "inline"
    assert (stage.max_num_seqs, stage.max_num_batched_tokens, stage.max_model_len) == (4, 2048, None)
    assert stage.kv_cache_memory_bytes == 512 << 20
    assert stage.enforce_eager and stage.enable_prefix_caching and stage.enable_chunked_prefill
    assert stage.async_scheduling is False
    assert stage.compilation_config == {"mode": 0}


@pytest.mark.parametrize("fake_model", ["llama"], indirect=True)
@pytest.mark.parametrize(
    "key",
    [
        "max_num_seqs",
        "max_num_batched_tokens",
        "kv_cache_memory_bytes",
        "max_queued_requests",
        "max_request_bytes",
        "shutdown_timeout_s",
    ],
)
def test_documented_edge_numbers_are_those_of_the_file(fake_model: str, key: str) -> None:
    deployment = resolve_deployment(fake_model, deploy_profile="edge")
    stage = deployment.config.stages[0].model_dump()
    value = stage[key] if key in stage else deployment.config.orchestrator.model_dump()[key]
    shown = f"{value >> 20}MiB" if key.endswith("_bytes") else f"{value:g}"
    assert f"| `{key}` | {shown} |" in DOCUMENT.read_text()


@pytest.mark.parametrize("file", FILES, ids=[str(file.relative_to(DEPLOY_DIR)) for file in FILES])
def test_every_number_of_a_packaged_file_has_a_reason_above_it(file: Path) -> None:
    lines = file.read_text().splitlines()
    assert lines[0].startswith("#")
    for before, line in pairwise(lines):
        if line.strip().startswith(("max_num_seqs:", "max_num_batched_tokens:", "kv_cache_memory_bytes:")):
            assert before.strip().startswith("#"), line
