"""Artifacts made from plain checkpoints, kept in the cache directory: a checkpoint is packed at its first start only.

    <cache>/artifacts/<directory name>-<key>-<identity>    an artifact
    <cache>/artifacts/<directory name>-<key>.lock          makes a second start wait for the first

The key stands for the source's path and for how it is packed, the identity for the names, sizes and modification times
of its files. So no other checkpoint's weights ever appear under a path that a start was given: it reads its own, or
fails because they are gone.

One artifact is kept per key. Where it has another identity and the source's content is still what its record says, it
is renamed; else the checkpoint is packed, and only then the old artifact is removed. Its files are unlinked, never
written to: a server that has mapped them keeps them. An interrupted packing is continued at the next start.
"""

import fcntl
import hashlib
import json
import logging
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, replace
from pathlib import Path

from vllm_omni import envs
from vllm_omni.errors import ConfigError, WeightError
from vllm_omni.quantization.checkpoint import check_checkpoint
from vllm_omni.quantization.conversion_record import RECORD_NAME, ConversionRecord, hash_file, read_record
from vllm_omni.quantization.journal import JOURNAL_NAME
from vllm_omni.quantization.output_directory import PARTIAL_SUFFIX, finish_directory
from vllm_omni.quantization.packed_format import FORMAT_VERSION
from vllm_omni.quantization.quantize_settings import QuantizeSettings

logger = logging.getLogger("vllm_omni.quantization")

# Called with the bytes that will be written and a label; gives what is called with each tensor's name and bytes.
ProgressBar = Callable[[int, str], AbstractContextManager[Callable[[str, int], None]]]
KEY_LENGTH = 16
IDENTITY_LENGTH = 8
# Files that an artifact is made of or copies; notes beside them change nothing.
SOURCE_SUFFIXES = frozenset({".safetensors", ".json", ".jinja", ".model", ".txt"})


def artifact_path(source: Path, settings: QuantizeSettings) -> Path:
    """Where the artifact of `source`, as it is now, belongs, whether or not it is there.

    Raises:
        ConfigError: The source cannot be read.
    """
    place = _place(source, settings)
    return place.with_name(f"{place.name}-{_identity(source)}")


def cached_artifact(source: Path, settings: QuantizeSettings, progress_bar: ProgressBar) -> Path:
    """The sound artifact of a plain checkpoint, made now where it is not in the cache.

    Args:
        source: Checkpoint directory.
        settings: How it is packed; without calibration.
        progress_bar: Shows the packing.

    Raises:
        ConfigError: The source cannot be read, or the cache directory cannot be used or has no space.
        WeightError: The checkpoint is damaged, not of a kind that can be packed, or changed while it was packed.
    """
    place = _place(source, settings)
    with _locked(place):
        # Taken first: of a file that changes from now on, the next start sees another time.
        out = artifact_path(source, settings)
        if _is_sound(out):
            logger.info("event=artifact_found source=%s artifact=%s", source, out)
        elif not _rename_touched(source, place, out):
            _pack(source, settings, out, progress_bar)
        _tidy(place, out)
    return out


def _place(source: Path, settings: QuantizeSettings) -> Path:
    """The artifact's path without its identity."""
    path = source.resolve()
    text = json.dumps([FORMAT_VERSION, str(path), asdict(settings)])
    return envs.VLLM_OMNI_CACHE_DIR / "artifacts" / f"{path.name}-{_digest(text, KEY_LENGTH)}"


def _identity(source: Path) -> str:
    with _source_errors(source):
        stats = [(path.name, path.stat()) for path in _source_files(source)]
    return _digest(json.dumps([[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats]), IDENTITY_LENGTH)


def _source_files(source: Path) -> list[Path]:
    return sorted(path for path in source.iterdir() if path.is_file() and path.suffix in SOURCE_SUFFIXES)


def _digest(text: str, length: int) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:length]


@contextmanager
def _locked(place: Path) -> Iterator[None]:
    """Keeps other processes from the artifacts of one key; waits for one that is packing."""
    path = place.with_name(place.name + ".lock")
    with _cache_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        stream = path.open("w")
    with stream:
        with _cache_errors(path):
            _await(stream.fileno(), place)
        yield


def _await(descriptor: int, place: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        logger.info("event=artifact_awaited artifact=%s reason=another process is packing it", place)
        fcntl.flock(descriptor, fcntl.LOCK_EX)


def _is_sound(out: Path) -> bool:
    """Whether a sound artifact is there; what is damaged is removed."""
    with _cache_errors(out):
        if not out.exists():
            return False
        try:
            if check_checkpoint(out).verified_hash:
                return True
            reason = f"it has no {RECORD_NAME}"
        except WeightError as error:
            reason = str(error)
    logger.warning("event=artifact_damaged artifact=%s action=pack_again reason=%s", out, reason)
    _remove(out)
    return False


def _rename_touched(source: Path, place: Path, out: Path) -> bool:
    """Takes over a sound artifact of the same content, whose source has other modification times now."""
    for other in _others(place, out):
        if other.name.endswith(PARTIAL_SUFFIX):
            continue
        if reason := _difference(source, other):
            logger.warning("event=artifact_outdated artifact=%s action=pack_again reason=%s", other, reason)
            continue
        logger.info("event=artifact_touched artifact=%s action=rename new_name=%s", other, out.name)
        with _cache_errors(other):
            other.rename(out)
        if _is_sound(out):
            return True
    return False


def _others(place: Path, out: Path) -> list[Path]:
    """Artifacts of other identities, and what interrupted packings left."""
    pattern = re.compile(rf"{re.escape(place.name)}-[0-9a-f]{{{IDENTITY_LENGTH}}}({re.escape(PARTIAL_SUFFIX)})?")
    with _cache_errors(place.parent):
        return sorted(path for path in place.parent.iterdir() if pattern.fullmatch(path.name) and path != out)


def _difference(source: Path, artifact: Path) -> str | None:
    """Which files of the source are not those that the artifact's record names; None: all are."""
    try:
        with _cache_errors(artifact):
            record = read_record(artifact)
    except WeightError:
        return "record_damaged"
    if record is None:
        return "record_missing"
    with _source_errors(source):
        changed = _changed_files(source, record)
    return "source_changed:" + ",".join(changed) if changed else None


def _changed_files(source: Path, record: ConversionRecord) -> list[str]:
    """By name and size; where these are the same, by content."""
    recorded = {name: entry.bytes for name, entry in record.source.items()}
    present = {path.name: path.stat().st_size for path in _source_files(source)}
    changed = sorted(name for name in recorded.keys() | present.keys() if recorded.get(name) != present.get(name))
    return changed or [name for name in sorted(present) if hash_file(source / name) != record.source[name]]


def _pack(source: Path, settings: QuantizeSettings, out: Path, progress_bar: ProgressBar) -> None:
    from vllm_omni.quantization.quantize import open_source, plan_quantize, quantize

    begin_s = time.monotonic()
    with _source_errors(source):
        plan = plan_quantize(open_source(source), settings)
    logger.info("event=artifact_begun source=%s artifact=%s bytes=%d", source, out, plan.weight_bytes)
    partial = out.with_name(out.name + PARTIAL_SUFFIX)
    _take_partial(_place(source, settings), out, partial)

    def amend(record: ConversionRecord) -> ConversionRecord:
        complete = _complete_record(source, record)
        if artifact_path(source, settings) != out:
            # Nothing says which tensors are of the old files: without a journal they are not continued.
            (partial / JOURNAL_NAME).unlink()
            raise WeightError(f"{source}: its files changed while they were packed; start again when it is complete")
        return complete

    with progress_bar(plan.weight_bytes, "pack weights") as advance, _source_errors(source):
        quantize(plan, out, progress=advance, amend=amend)
    logger.info("event=artifact_made artifact=%s seconds=%.1f", out, time.monotonic() - begin_s)


def _take_partial(place: Path, out: Path, partial: Path) -> None:
    """Gives what an interrupted packing left to this one: its journal says what of it can be continued."""
    for other in _others(place, out):
        if not other.name.endswith(PARTIAL_SUFFIX):
            continue
        if not (other / JOURNAL_NAME).is_file():
            _remove(other)
        elif not partial.exists():
            with _cache_errors(other):
                other.rename(partial)


def _complete_record(source: Path, record: ConversionRecord) -> ConversionRecord:
    """The record with every file that counts for the identity, so that it alone tells touched from changed."""
    with _source_errors(source):
        names = [path.name for path in _source_files(source)]
        added = {name: hash_file(source / name) for name in names if name not in record.source}
    settings = {**record.settings, "source_path": str(source.resolve())}
    return replace(record, source={**record.source, **added}, settings=settings)


def _tidy(place: Path, out: Path) -> None:
    """Leaves one artifact, without the journal of a packing that was killed at its end."""
    if (out / JOURNAL_NAME).is_file():
        finish_directory(out, JOURNAL_NAME)
    for other in _others(place, out):
        try:
            shutil.rmtree(other)
        except OSError as error:
            # The artifact of this start is sound.
            logger.warning("event=artifact_not_removed artifact=%s action=remove_it_yourself reason=%s", other, error)


def _remove(directory: Path) -> None:
    with _cache_errors(directory):
        shutil.rmtree(directory)


@contextmanager
def _cache_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read, written or removed: {error}; make that possible, or set VLLM_OMNI_CACHE_DIR to "
            "another directory"
        ) from error


@contextmanager
def _source_errors(source: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"{source} cannot be read: {error}; make it readable, or start again when nothing changes it any more"
        ) from error
