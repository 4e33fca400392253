import logging
import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import Checkpoint
from vllm_omni.errors import ConfigError
from vllm_omni.quantization.artifact_cache import artifact_path, cached_artifact
from vllm_omni.quantization.checkpoint import check_checkpoint
from vllm_omni.quantization.quantize_settings import QuantizeSettings

SETTINGS = QuantizeSettings()


class Interrupted(Exception):
    pass


@contextmanager
def no_bar(num_bytes: int, label: str) -> Iterator[Callable[[str, int], None]]:
    yield lambda name, written_bytes: None


@contextmanager
def stopping_bar(num_bytes: int, label: str) -> Iterator[Callable[[str, int], None]]:
    def advance(name: str, written_bytes: int) -> None:
        if name.endswith("k_proj.weight"):
            raise Interrupted

    yield advance


@pytest.fixture(autouse=True)
def events(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, logger="vllm_omni.quantization")
    return caplog


@pytest.fixture
def source(checkpoint: Checkpoint) -> Path:
    return checkpoint.write()


def artifact(source: Path, settings: QuantizeSettings = SETTINGS) -> Path:
    return cached_artifact(source, settings, no_bar)


def replace_tensors(checkpoint: Checkpoint) -> None:
    """Another checkpoint at the same path, as a training run or a download leaves it."""
    path = checkpoint.directory / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:-4] + b"\x00\x00\x80\x3f")


def cached_names(cache_dir: Path) -> list[str]:
    """Everything but the locks."""
    return [path.name for path in (cache_dir / "artifacts").iterdir() if path.suffix != ".lock"]


def test_a_checkpoint_is_packed_once(source: Path, cache_dir: Path, events: Any) -> None:
    out = artifact(source)
    assert out == artifact_path(source, SETTINGS)
    assert check_checkpoint(out).verified_hash
    events.clear()
    assert artifact(source) == out
    assert "event=artifact_found" in events.text and "event=artifact_begun" not in events.text
    assert cached_names(cache_dir) == [out.name]


def test_a_replaced_checkpoint_takes_the_place_of_the_old_one(
    source: Path, checkpoint: Checkpoint, cache_dir: Path, events: Any
) -> None:
    out = artifact(source)
    before = (out / "model.safetensors").read_bytes()
    replace_tensors(checkpoint)
    assert artifact(source) == out
    assert (out / "model.safetensors").read_bytes() != before
    assert "event=artifact_outdated" in events.text
    assert "action=pack_again reason=source_changed:model.safetensors" in events.text
    assert cached_names(cache_dir) == [out.name]


@pytest.mark.parametrize(
    ("change", "changed"),
    [
        (lambda model: os.utime(model / "config.json", ns=(1, 1)), "config.json"),
        (lambda model: (model / "merges.txt").write_text("a b"), "merges.txt"),
        (lambda model: (model / "tokenizer_config.json").write_text("{}"), "tokenizer_config.json"),
        (lambda model: (model / "chat_template.jinja").unlink(), "chat_template.jinja"),
    ],
)
def test_every_file_that_an_artifact_is_made_of_counts(source: Path, change: Any, changed: str, events: Any) -> None:
    (source / "chat_template.jinja").write_text("{{ messages }}")
    artifact(source)
    events.clear()
    change(source)
    out = artifact(source)
    assert f"reason=source_changed:{changed}" in events.text
    assert sorted(path.name for path in out.glob("*.jinja")) == sorted(path.name for path in source.glob("*.jinja"))


def test_notes_beside_a_checkpoint_do_not_count(source: Path, events: Any) -> None:
    artifact(source)
    events.clear()
    (source / "README.md").write_text("notes")
    artifact(source)
    assert "event=artifact_found" in events.text


def test_other_settings_and_other_places_have_artifacts_of_their_own(
    source: Path, tmp_path: Path, cache_dir: Path
) -> None:
    copy = Checkpoint(tmp_path / "copy").write()
    paths = {artifact(source), artifact(source, QuantizeSettings(bits=8)), artifact(copy)}
    assert sorted(cached_names(cache_dir)) == sorted(path.name for path in paths)
    assert len(paths) == 3


def test_a_link_to_a_checkpoint_shares_its_artifact(source: Path, tmp_path: Path, events: Any) -> None:
    (tmp_path / "link").symlink_to(source)
    assert artifact(tmp_path / "link") == artifact(source)
    assert "event=artifact_found" in events.text


def test_a_server_keeps_the_files_that_it_has_mapped(source: Path, checkpoint: Checkpoint) -> None:
    weights = artifact(source) / "model.safetensors"
    before = weights.read_bytes()
    with weights.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        replace_tensors(checkpoint)
        artifact(source)
        assert mapped[:] == before
    assert weights.read_bytes() != before


def test_an_interrupted_packing_is_continued(source: Path, cache_dir: Path, events: Any) -> None:
    with pytest.raises(Interrupted):
        cached_artifact(source, SETTINGS, stopping_bar)
    out = artifact(source)
    assert "event=conversion_resumed" in events.text
    assert check_checkpoint(out).verified_hash
    assert cached_names(cache_dir) == [out.name]


def test_an_interrupted_packing_of_another_source_is_not_continued(
    source: Path, checkpoint: Checkpoint, cache_dir: Path, events: Any
) -> None:
    with pytest.raises(Interrupted):
        cached_artifact(source, SETTINGS, stopping_bar)
    replace_tensors(checkpoint)
    out = artifact(source)
    assert "event=conversion_restarted" in events.text and "reason=changed:source" in events.text
    events.clear()
    assert artifact(source) == out
    assert "event=artifact_found" in events.text
    assert cached_names(cache_dir) == [out.name]


@pytest.mark.parametrize("damage", ["shortened", "no record", "record without a source", "broken record"])
def test_what_is_damaged_is_packed_again(source: Path, damage: str, events: Any) -> None:
    out = artifact(source)
    weights, record = out / "model.safetensors", out / "conversion.json"
    whole = weights.read_bytes()
    if damage == "shortened":
        weights.write_bytes(whole[:-1])
    elif damage == "no record":
        record.unlink()
    elif damage == "broken record":
        record.write_text(record.read_text().replace('"settings": {', '"settings": [], "was": {'))
    else:
        record.write_text(record.read_text().replace("source_files", "other_files"))
    events.clear()
    assert artifact(source) == out
    assert "event=artifact_made" in events.text
    assert weights.read_bytes() == whole
    events.clear()
    artifact(source)
    assert "event=artifact_found" in events.text


def test_a_source_that_changes_while_it_is_packed_is_packed_at_the_next_start(
    source: Path, checkpoint: Checkpoint, events: Any
) -> None:
    @contextmanager
    def changing_bar(num_bytes: int, label: str) -> Iterator[Callable[[str, int], None]]:
        os.utime(source / "config.json", ns=(1, 1))
        yield lambda name, written_bytes: None

    cached_artifact(source, SETTINGS, changing_bar)
    artifact(source)
    assert "event=artifact_outdated" in events.text


def test_an_artifact_that_cannot_be_removed_is_explained(
    source: Path, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = artifact(source)
    replace_tensors(checkpoint)

    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("shutil.rmtree", refuse)
    with pytest.raises(ConfigError, match=f"{out.name} cannot be removed: .*VLLM_OMNI_CACHE_DIR"):
        artifact(source)
