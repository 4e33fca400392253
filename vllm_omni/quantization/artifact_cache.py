"""Artifacts made from plain checkpoints, kept in the cache directory: a checkpoint is packed at its first start only.

`<cache>/artifacts/<directory name>-<key>`, where the key stands for the source's path and for how it is packed. The
artifact's record says of which files it was made (name, size, modification time); when these are other ones, or the
artifact is damaged, it is made again in the same place. The old files are unlinked, never written to: a server that has
mapped them keeps them. A lock beside the artifact makes a second start wait for the first. An interrupted packing is
continued at the next start.
"""

import fcntl
import hashlib
import json
import logging
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vllm_omni import envs
from vllm_omni.errors import ConfigError, WeightError
from vllm_omni.quantization.checkpoint import check_checkpoint
from vllm_omni.quantization.conversion_record import read_record
from vllm_omni.quantization.journal import JOURNAL_NAME
from vllm_omni.quantization.output_directory import PARTIAL_SUFFIX
from vllm_omni.quantization.packed_format import FORMAT_VERSION
from vllm_omni.quantization.quantize_settings import QuantizeSettings

logger = logging.getLogger("vllm_omni.quantization")

# Called with the bytes that will be written and a label; gives what is called with each tensor's name and bytes.
ProgressBar = Callable[[int, str], AbstractContextManager[Callable[[str, int], None]]]
KEY_LENGTH = 16
# Files that an artifact is made of or copies; notes beside them change nothing.
SOURCE_SUFFIXES = frozenset({".safetensors", ".json", ".jinja", ".model", ".txt"})
# Name to size and modification time; the record's settings have it under the key.
SourceFiles = Mapping[str, list[int]]
FILES_KEY = "source_files"


def artifact_path(source: Path, settings: QuantizeSettings) -> Path:
    """Where the artifact of `source` belongs, whether or not it is there."""
    place = source.resolve()
    text = json.dumps([FORMAT_VERSION, str(place), asdict(settings)])
    key = hashlib.sha256(text.encode()).hexdigest()[:KEY_LENGTH]
    return envs.VLLM_OMNI_CACHE_DIR / "artifacts" / f"{place.name}-{key}"


def cached_artifact(source: Path, settings: QuantizeSettings, progress_bar: ProgressBar) -> Path:
    """The sound artifact of a plain checkpoint, made now where it is not in the cache.

    Args:
        source: Checkpoint directory.
        settings: How it is packed; without calibration.
        progress_bar: Shows the packing.

    Raises:
        ConfigError: The cache directory cannot be written or has no space.
        WeightError: The checkpoint is damaged, or not of a kind that can be packed.
    """
    out = artifact_path(source, settings)
    with _locked(out):
        # Taken first: of a file that changes from now on, the next start sees another time.
        files = _source_files(source)
        if _is_current(out, files):
            logger.info("event=artifact_found source=%s artifact=%s", source, out)
        else:
            _pack(source, settings, out, files, progress_bar)
    return out


def _source_files(source: Path) -> SourceFiles:
    files = sorted(path for path in source.iterdir() if path.is_file() and path.suffix in SOURCE_SUFFIXES)
    return {path.name: [path.stat().st_size, path.stat().st_mtime_ns] for path in files}


@contextmanager
def _locked(out: Path) -> Iterator[None]:
    """Keeps other processes from the artifact; waits for one that is packing it."""
    path = out.with_name(out.name + ".lock")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        stream = path.open("w")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error}; set VLLM_OMNI_CACHE_DIR to another directory") from error
    with stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info("event=artifact_awaited artifact=%s reason=another process is packing it", out)
            fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def _is_current(out: Path, files: SourceFiles) -> bool:
    """Whether a sound artifact of these files is there; says why not, where there is another one."""
    try:
        record = read_record(out)
        if record is None:
            return False
        made_of = record.settings.get(FILES_KEY)
        if made_of != files:
            reason = _difference(made_of, files)
            logger.warning("event=artifact_outdated artifact=%s action=pack_again reason=%s", out, reason)
            return False
        check_checkpoint(out)
    except WeightError as error:
        logger.warning("event=artifact_damaged artifact=%s action=pack_again reason=%s", out, error)
        return False
    return True


def _difference(made_of: Any, files: SourceFiles) -> str:
    if not isinstance(made_of, dict):
        return "source_not_recorded"
    names = sorted(name for name in made_of.keys() | files.keys() if made_of.get(name) != files.get(name))
    return "source_changed:" + ",".join(names)


def _pack(source: Path, settings: QuantizeSettings, out: Path, files: SourceFiles, progress_bar: ProgressBar) -> None:
    from vllm_omni.quantization.quantize import open_source, plan_quantize, quantize

    begin_s = time.monotonic()
    plan = plan_quantize(open_source(source), settings)
    logger.info("event=artifact_begun source=%s artifact=%s bytes=%d", source, out, plan.weight_bytes)
    partial = out.with_name(out.name + PARTIAL_SUFFIX)
    # Nobody else writes here: what is damaged, or was left without the journal by which it could be continued, can go.
    _remove(out)
    if not (partial / JOURNAL_NAME).is_file():
        _remove(partial)
    with progress_bar(plan.weight_bytes, "pack weights") as advance:
        quantize(plan, out, progress=advance, facts={"source_path": str(source.resolve()), FILES_KEY: files})
    logger.info("event=artifact_made artifact=%s seconds=%.1f", out, time.monotonic() - begin_s)


def _remove(directory: Path) -> None:
    if not directory.exists():
        return
    try:
        shutil.rmtree(directory)
    except OSError as error:
        raise ConfigError(
            f"{directory} cannot be removed: {error}; remove it, or set VLLM_OMNI_CACHE_DIR to another directory"
        ) from error
