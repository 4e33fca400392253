"""A plain checkpoint under the edge profile is packed once, into the cache; others are served as they are."""

import fcntl
import json
import logging
import threading
from pathlib import Path

import pytest

from vllm_omni.entrypoints.omni_base import prepare
from vllm_omni.errors import ConfigError
from vllm_omni.quantization.artifact import read_artifact

EVENTS = "vllm_omni.quantization"


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def use_cache(cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("VLLM_OMNI_CACHE_DIR", str(cache))
    caplog.set_level(logging.INFO, logger=EVENTS)


def test_a_plain_checkpoint_is_packed_once(smollm2: Path, cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = prepare(str(smollm2), deploy_profile="edge")
    assert first.facts.path.parent == cache / "artifacts"
    assert first.facts.quant_method == "omni_int4"
    assert read_artifact(first.facts.path).bits_per_weight < 4.8
    assert "event=artifact_made" in caplog.text
    caplog.clear()
    assert prepare(str(smollm2), deploy_profile="edge").facts.path == first.facts.path
    assert "event=artifact_found" in caplog.text and "event=artifact_made" not in caplog.text


def test_the_packed_form_keeps_the_users_settings(smollm2: Path) -> None:
    packed = prepare(str(smollm2), deploy_profile="edge", overrides={"max_num_seqs": 3, "kv_cache_dtype": "int8"})
    assert packed.stage(0).max_num_seqs == 3
    assert packed.stage(0).kv_cache_dtype == "int8_per_token_head"


def test_none_serves_what_is_given(smollm2: Path) -> None:
    given = prepare(str(smollm2), deploy_profile="edge", overrides={"quantization": "none"})
    assert given.facts.path == smollm2


def test_printing_the_configuration_packs_nothing(smollm2: Path, caplog: pytest.LogCaptureFixture) -> None:
    given = prepare(str(smollm2), deploy_profile="edge", check_weights=False)
    assert given.facts.path == smollm2
    assert "artifact" not in caplog.text


def test_another_dtype_is_served_as_it_is_with_the_reason(smollm2: Path, caplog: pytest.LogCaptureFixture) -> None:
    given = prepare(str(smollm2), deploy_profile="edge", overrides={"dtype": "bfloat16"})
    assert given.facts.path == smollm2
    assert "event=weights_not_packed" in caplog.text and "'bfloat16' is asked for" in caplog.text


def test_a_setting_of_artifacts_that_cannot_be_had_is_an_error(smollm2: Path) -> None:
    with pytest.raises(ConfigError, match="'bfloat16' is asked for"):
        prepare(str(smollm2), deploy_profile="edge", overrides={"dtype": "bfloat16", "kv_cache_dtype": "int8"})


def test_a_cache_that_cannot_be_written(
    smollm2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("no directory can be made below a file")
    monkeypatch.setenv("VLLM_OMNI_CACHE_DIR", str(tmp_path / "file" / "cache"))
    assert prepare(str(smollm2), deploy_profile="edge").facts.path == smollm2
    assert "event=weights_not_packed" in caplog.text
    with pytest.raises(ConfigError, match="quantization is 'omni_int4'"):
        prepare(str(smollm2), deploy_profile="edge", overrides={"quantization": "omni_int4"})


def test_a_model_that_the_decoder_stack_does_not_compute(
    smollm2: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = tmp_path / "scaled"
    model.mkdir()
    for path in smollm2.iterdir():
        if path.name not in ("config.json", "conversion.json"):
            (model / path.name).symlink_to(path)
    config = json.loads((smollm2 / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "longrope", "factor": 2.0, "rope_theta": 10000.0}
    (model / "config.json").write_text(json.dumps(config))
    assert prepare(str(model), deploy_profile="edge").facts.path == model
    assert "event=weights_not_packed" in caplog.text and "longrope" in caplog.text


def test_without_the_native_core_the_plain_checkpoint_is_served(
    smollm2: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("vllm_omni.native.library.DEFAULT_PATH", Path("/nonexistent/libomni_native.so"))
    assert prepare(str(smollm2), deploy_profile="edge").facts.path == smollm2
    assert "native core" in caplog.text


def test_a_damaged_artifact_is_made_again(smollm2: Path, caplog: pytest.LogCaptureFixture) -> None:
    artifact = prepare(str(smollm2), deploy_profile="edge").facts.path
    weights = artifact / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-64])
    caplog.clear()
    assert prepare(str(smollm2), deploy_profile="edge").facts.path == artifact
    assert "event=artifact_damaged" in caplog.text and "event=artifact_made" in caplog.text


@pytest.mark.parametrize("overrides", [{"kv_cache_dtype": "fp8"}, {"block_size": 24}], ids=str)
def test_settings_that_packed_weights_cannot_have_pack_nothing(
    smollm2: Path, overrides: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_OMNI_CACHE_DIR", str(tmp_path))
    assert prepare(str(smollm2), deploy_profile="edge", overrides=overrides).facts.path == smollm2
    assert not (tmp_path / "artifacts").exists()


def test_a_second_start_waits_for_the_first(smollm2: Path, caplog: pytest.LogCaptureFixture) -> None:
    artifact = prepare(str(smollm2), deploy_profile="edge").facts.path
    found: list[Path] = []
    start = threading.Thread(target=lambda: found.append(prepare(str(smollm2), deploy_profile="edge").facts.path))
    with artifact.with_name(artifact.name.rpartition("-")[0] + ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        start.start()
        start.join(2)
        assert found == [] and start.is_alive()
        assert "event=artifact_awaited" in caplog.text
    start.join(60)
    assert found == [artifact]
