"""What becomes of a run that is killed, or refused, when all tensors are written."""

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import Checkpoint
from vllm_omni.errors import ConfigError
from vllm_omni.quantization.conversion_record import read_record
from vllm_omni.quantization.quantize import open_source, plan_quantize, quantize
from vllm_omni.quantization.quantize_settings import QuantizeSettings

OUT_NAMES = ["config.json", "conversion.json", "model.safetensors"]


class Interrupted(Exception):
    pass


def interrupt(*args: Any, **options: Any) -> None:
    raise Interrupted


@pytest.fixture
def source(checkpoint: Checkpoint) -> Path:
    return checkpoint.write()


def run(source: Path, out: Path, settings: QuantizeSettings | None = None, **arguments: Any) -> Path:
    quantize(plan_quantize(open_source(source), settings or QuantizeSettings()), out, **arguments)
    return out


def leave_journal(source: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """Ends a run after the renaming; gives what the directory holds."""
    with monkeypatch.context() as patch, pytest.raises(Interrupted):
        patch.setattr(Path, "unlink", interrupt)
        run(source, out)
    return {path.name: path.read_bytes() for path in out.iterdir()}


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_run_that_was_killed_after_the_renaming_is_done(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overwrite: bool, caplog: pytest.LogCaptureFixture
) -> None:
    out = tmp_path / "out"
    before = leave_journal(source, out, monkeypatch)
    assert sorted(before) == sorted([*OUT_NAMES, "journal.jsonl"])
    (tmp_path / ".out.vllm-omni-replaced").mkdir()
    plan = plan_quantize(open_source(source), QuantizeSettings())
    monkeypatch.setattr(plan.source, "rows", interrupt)
    written: list[int] = []
    with caplog.at_level(logging.INFO):
        record = quantize(plan, out, overwrite, progress=lambda name, num_bytes: written.append(num_bytes))
    assert record == read_record(out)
    assert sum(written) == plan.weight_bytes
    assert "event=conversion_finished" in caplog.text
    del before["journal.jsonl"]
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "out"]


def test_another_run_does_not_finish_it(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    before = leave_journal(source, out, monkeypatch)
    with pytest.raises(ConfigError, match="exists; pass another directory, or --overwrite"):
        run(source, out, QuantizeSettings(bits=8))
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    run(source, out, QuantizeSettings(bits=8), overwrite=True)
    assert json.loads((out / "config.json").read_text())["quantization_config"]["bits"] == 8
    assert sorted(path.name for path in out.iterdir()) == OUT_NAMES


@pytest.mark.parametrize("kind", ["link", "of another method", "damaged record"])
def test_a_directory_that_no_quantize_left_there_is_not_finished(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    out = tmp_path / "out"
    leave_journal(source, out, monkeypatch)
    record = out / "conversion.json"
    if kind == "of another method":
        record.write_text(record.read_text().replace('"quantize-rtn"', '"gguf-import"'))
    elif kind == "damaged record":
        record.write_text("{")
    else:
        out = tmp_path / "link"
        out.symlink_to(tmp_path / "out")
    with pytest.raises(ConfigError, match="exists; pass another directory, or --overwrite"):
        run(source, out)
    assert (out / "journal.jsonl").exists()


def test_a_directory_that_cannot_be_read_is_explained(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    leave_journal(source, out, monkeypatch)

    def refuse(directory: Path) -> None:
        raise PermissionError(13, "Permission denied", str(directory))

    monkeypatch.setattr("vllm_omni.quantization.quantize.read_record", refuse)
    with pytest.raises(ConfigError, match=r"out cannot be read: .*Permission denied.*; pass another directory"):
        run(source, out)


def test_an_amended_record_is_written(source: Path, tmp_path: Path) -> None:
    out = run(source, tmp_path / "out", amend=lambda record: replace(record, settings={"more": 1}))
    record = read_record(out)
    assert record is not None and record.settings == {"more": 1}


def test_what_refuses_the_record_keeps_the_directory_from_its_name(source: Path, tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        run(source, tmp_path / "out", amend=interrupt)
    assert not (tmp_path / "out").exists()
