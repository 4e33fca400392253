import logging
import mmap
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import Checkpoint
from vllm_omni.errors import ConfigError, WeightError
from vllm_omni.quantization import artifact_cache
from vllm_omni.quantization.artifact_cache import artifact_path, cached_artifact
from vllm_omni.quantization.checkpoint import check_checkpoint
from vllm_omni.quantization.conversion_record import read_record
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
    """Another checkpoint of the same size at the same path, as a training run or a download leaves it."""
    path = checkpoint.directory / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:-4] + b"\x00\x00\x80\x3f")
    os.utime(path, ns=(2, 2))


def touch(source: Path) -> None:
    for path in source.iterdir():
        os.utime(path, ns=(1, 1))


def cached_names(cache_dir: Path) -> list[str]:
    """Everything but the locks."""
    return sorted(path.name for path in (cache_dir / "artifacts").iterdir() if path.suffix != ".lock")


def test_a_checkpoint_is_packed_once(source: Path, cache_dir: Path, events: Any) -> None:
    out = artifact(source)
    assert out == artifact_path(source, SETTINGS)
    assert check_checkpoint(out).verified_hash
    events.clear()
    assert artifact(source) == out
    assert "event=artifact_found" in events.text and "event=artifact_begun" not in events.text
    assert cached_names(cache_dir) == [out.name]


def test_a_replaced_checkpoint_has_an_artifact_of_another_name(
    source: Path, checkpoint: Checkpoint, cache_dir: Path, events: Any
) -> None:
    """A start that was given the old path must never find the other checkpoint's weights there."""
    old = artifact(source)
    before = (old / "model.safetensors").read_bytes()
    replace_tensors(checkpoint)
    new = artifact(source)
    assert new != old and new.name.rpartition("-")[0] == old.name.rpartition("-")[0]
    assert (new / "model.safetensors").read_bytes() != before
    assert (
        f"event=artifact_outdated artifact={old} action=pack_again reason=source_changed:model.safetensors"
        in events.text
    )
    assert cached_names(cache_dir) == [new.name]


def test_the_old_artifact_stays_until_the_new_one_is_there(
    source: Path, checkpoint: Checkpoint, cache_dir: Path, events: Any
) -> None:
    old = artifact(source)
    replace_tensors(checkpoint)
    with pytest.raises(Interrupted):
        cached_artifact(source, SETTINGS, stopping_bar)
    assert check_checkpoint(old).verified_hash
    new = artifact(source)
    assert "event=conversion_resumed" in events.text
    assert cached_names(cache_dir) == [new.name]


@pytest.mark.parametrize(
    ("change", "changed"),
    [
        (lambda model: (model / "config.json").write_text((model / "config.json").read_text() + " "), "config.json"),
        (lambda model: (model / "merges.txt").write_text("a b"), "merges.txt"),
        (lambda model: (model / "tokenizer_config.json").write_text("[]"), "tokenizer_config.json"),
        (lambda model: (model / "chat_template.jinja").unlink(), "chat_template.jinja"),
        (lambda model: (model / "consolidated.safetensors").write_bytes(b"y"), "consolidated.safetensors"),
    ],
)
def test_every_file_that_an_artifact_is_made_of_counts(source: Path, change: Any, changed: str, events: Any) -> None:
    (source / "chat_template.jinja").write_text("{{ messages }}")
    (source / "tokenizer_config.json").write_text("{}")
    (source / "consolidated.safetensors").write_bytes(b"x")
    artifact(source)
    events.clear()
    change(source)
    touch(source)
    out = artifact(source)
    assert f"reason=source_changed:{changed}\n" in events.text
    assert "event=artifact_made" in events.text
    assert sorted(path.name for path in out.glob("*.jinja")) == sorted(path.name for path in source.glob("*.jinja"))


@pytest.mark.parametrize("is_sharded", [False, True])
def test_a_touched_checkpoint_is_not_packed_again(
    checkpoint: Checkpoint, cache_dir: Path, is_sharded: bool, events: Any
) -> None:
    source = checkpoint.write_sharded() if is_sharded else checkpoint.write()
    (source / "tokenizer.json").write_text("{}")
    old = artifact(source)
    before = (old / "model.safetensors").stat()
    events.clear()
    touch(source)
    new = artifact(source)
    assert new != old
    assert f"event=artifact_touched artifact={old} action=rename new_name={new.name}" in events.text
    assert "event=artifact_begun" not in events.text
    assert os.path.samestat((new / "model.safetensors").stat(), before)
    assert cached_names(cache_dir) == [new.name]
    assert check_checkpoint(new).verified_hash


def test_a_damaged_artifact_of_a_touched_checkpoint_is_packed_again(source: Path, cache_dir: Path, events: Any) -> None:
    weights = artifact(source) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    touch(source)
    new = artifact(source)
    assert "event=artifact_damaged" in events.text
    assert check_checkpoint(new).verified_hash
    assert cached_names(cache_dir) == [new.name]


def test_the_record_says_where_an_artifact_came_from(source: Path) -> None:
    (source / "merges.txt").write_text("a b")
    record = read_record(artifact(source))
    assert record is not None
    assert record.settings["source_path"] == str(source)
    assert sorted(record.source) == ["config.json", "merges.txt", "model.safetensors"]


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
    # One that has not opened them yet fails.
    assert not weights.exists()


def test_an_interrupted_packing_is_continued(source: Path, cache_dir: Path, events: Any) -> None:
    with pytest.raises(Interrupted):
        cached_artifact(source, SETTINGS, stopping_bar)
    out = artifact(source)
    assert "event=conversion_resumed" in events.text
    assert check_checkpoint(out).verified_hash
    assert cached_names(cache_dir) == [out.name]


def test_an_interrupted_packing_of_a_touched_source_is_continued(source: Path, cache_dir: Path, events: Any) -> None:
    with pytest.raises(Interrupted):
        cached_artifact(source, SETTINGS, stopping_bar)
    touch(source)
    out = artifact(source)
    assert "event=conversion_resumed" in events.text
    assert cached_names(cache_dir) == [out.name]


def test_what_was_left_without_a_journal_is_not_continued(source: Path, cache_dir: Path, events: Any) -> None:
    with pytest.raises(Interrupted):
        cached_artifact(source, SETTINGS, stopping_bar)
    out = artifact_path(source, SETTINGS)
    (out.with_name(out.name + ".partial") / "journal.jsonl").unlink()
    assert artifact(source) == out
    assert "event=conversion_resumed" not in events.text
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


@pytest.mark.parametrize("damage", ["shortened", "no record", "broken record"])
def test_what_is_damaged_is_packed_again(source: Path, damage: str, events: Any) -> None:
    out = artifact(source)
    weights, record = out / "model.safetensors", out / "conversion.json"
    whole = weights.read_bytes()
    if damage == "shortened":
        weights.write_bytes(whole[:-1])
    elif damage == "no record":
        record.unlink()
    else:
        record.write_text(record.read_text().replace('"settings": {', '"settings": [], "was": {'))
    events.clear()
    assert artifact(source) == out
    assert "event=artifact_damaged" in events.text and "event=artifact_made" in events.text
    assert weights.read_bytes() == whole
    events.clear()
    artifact(source)
    assert "event=artifact_found" in events.text


@pytest.mark.parametrize("damage", ["missing", "damaged"])
def test_an_old_artifact_without_a_usable_record_is_replaced(
    source: Path, cache_dir: Path, damage: str, events: Any
) -> None:
    record = artifact(source) / "conversion.json"
    if damage == "missing":
        record.unlink()
    else:
        record.write_text("{")
    touch(source)
    new = artifact(source)
    assert f"action=pack_again reason=record_{damage}" in events.text
    assert cached_names(cache_dir) == [new.name]


def test_a_source_that_changes_while_it_is_packed_is_refused(
    source: Path, checkpoint: Checkpoint, cache_dir: Path, events: Any
) -> None:
    @contextmanager
    def changing_bar(num_bytes: int, label: str) -> Iterator[Callable[[str, int], None]]:
        replace_tensors(checkpoint)
        yield lambda name, written_bytes: None

    with pytest.raises(WeightError, match="its files changed while they were packed; start again when it is complete"):
        cached_artifact(source, SETTINGS, changing_bar)
    # What is there now may be of both: nothing of it is taken over.
    out = artifact(source)
    assert "event=artifact_made" in events.text and "event=conversion_resumed" not in events.text
    assert cached_names(cache_dir) == [out.name]


def test_what_a_packing_left_that_was_killed_at_its_end_is_removed(
    source: Path, monkeypatch: pytest.MonkeyPatch, events: Any
) -> None:
    def interrupt(path: Path, missing_ok: bool = False) -> None:
        raise Interrupted

    with monkeypatch.context() as patch, pytest.raises(Interrupted):
        patch.setattr(Path, "unlink", interrupt)
        artifact(source)
    out = artifact_path(source, SETTINGS)
    assert (out / "journal.jsonl").is_file()
    assert artifact(source) == out
    assert "event=artifact_found" in events.text
    assert not (out / "journal.jsonl").exists()


def refuse(path: Path, *args: Any) -> None:
    raise PermissionError(13, "Permission denied", str(path))


def test_an_old_artifact_that_cannot_be_removed_is_named(
    source: Path, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, events: Any
) -> None:
    old = artifact(source)
    replace_tensors(checkpoint)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", refuse)
        new = artifact(source)
    assert f"event=artifact_not_removed artifact={old} action=remove_it_yourself reason=" in events.text
    assert check_checkpoint(new).verified_hash
    artifact(source)
    assert not old.exists()


@pytest.mark.parametrize("step", ["remove a damaged artifact", "read", "list", "rename", "lock"])
def test_a_cache_that_cannot_be_used_is_explained(source: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    out = artifact(source)
    if step == "remove a damaged artifact":
        (out / "model.safetensors").write_bytes(b"")
        monkeypatch.setattr(shutil, "rmtree", refuse)
    elif step == "read":
        touch(source)
        monkeypatch.setattr(artifact_cache, "read_record", refuse)
    elif step == "list":
        iterdir = Path.iterdir
        monkeypatch.setattr(Path, "iterdir", lambda path: refuse(path) if path == out.parent else iterdir(path))
    elif step == "rename":
        touch(source)
        monkeypatch.setattr(Path, "rename", refuse)
    else:
        monkeypatch.setattr(artifact_cache.fcntl, "flock", refuse)
    with pytest.raises(ConfigError, match=r"cannot be read, written or removed: .*VLLM_OMNI_CACHE_DIR"):
        artifact(source)


@pytest.mark.parametrize("step", ["list", "state", "open", "hash for the record", "compare"])
def test_a_source_that_vanishes_is_explained(source: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    (source / "merges.txt").write_text("a b")

    def vanish(path: Path, *args: Any) -> None:
        raise FileNotFoundError(2, "No such file or directory", str(path))

    if step == "list":
        iterdir = Path.iterdir
        monkeypatch.setattr(Path, "iterdir", lambda path: vanish(path) if path == source else iterdir(path))
    elif step == "state":
        monkeypatch.setattr(artifact_cache, "_source_files", lambda source: [source / "vanished.json"])
    elif step == "open":
        monkeypatch.setattr("vllm_omni.quantization.quantize.open_source", vanish)
    else:
        if step == "compare":
            artifact(source)
            touch(source)
        monkeypatch.setattr(artifact_cache, "hash_file", vanish)
    with pytest.raises(ConfigError, match=r"model cannot be read: .*No such file.*; make it readable, or start again"):
        artifact(source)
