"""Artifacts made from plain checkpoints, kept in the cache directory: a checkpoint is packed at its first start only.

`<cache>/artifacts/<directory name>-<key>`, where the key stands for the source's files (name, size, modification time)
and for how they are packed. A lock beside it makes a second start wait for the first. An interrupted packing is
continued at the next start; a damaged artifact is made again.
"""

import fcntl
import hashlib
import json
import logging
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict
from pathlib import Path

from vllm_omni import envs
from vllm_omni.errors import ConfigError, WeightError
from vllm_omni.quantization.checkpoint import check_checkpoint
from vllm_omni.quantization.conversion_record import RECORD_NAME
from vllm_omni.quantization.journal import JOURNAL_NAME
from vllm_omni.quantization.output_directory import PARTIAL_SUFFIX
from vllm_omni.quantization.packed_format import FORMAT_VERSION
from vllm_omni.quantization.quantize_settings import QuantizeSettings

logger = logging.getLogger("vllm_omni.quantization")

# Called with the bytes that will be written and a label; gives what is called with each tensor's name and bytes.
ProgressBar = Callable[[int, str], AbstractContextManager[Callable[[str, int], None]]]
KEY_LENGTH = 16
# Files that an artifact is made of or copies; notes beside them change nothing.
SOURCE_SUFFIXES = frozenset({".safetensors", ".json", ".jinja", ".model"})


def artifact_path(source: Path, settings: QuantizeSettings) -> Path:
    """Where the artifact of `source` belongs, whether or not it is there."""
    files = sorted(path for path in source.iterdir() if path.is_file() and path.suffix in SOURCE_SUFFIXES)
    identity = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    text = json.dumps([FORMAT_VERSION, identity, asdict(settings)])
    key = hashlib.sha256(text.encode()).hexdigest()[:KEY_LENGTH]
    return envs.VLLM_OMNI_CACHE_DIR / "artifacts" / f"{source.resolve().name}-{key}"


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
        if _is_sound(out):
            logger.info("event=artifact_found source=%s artifact=%s", source, out)
        else:
            _pack(source, settings, out, progress_bar)
    return out


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


def _is_sound(out: Path) -> bool:
    if not (out / RECORD_NAME).is_file():
        return False
    try:
        check_checkpoint(out)
    except WeightError as error:
        logger.warning("event=artifact_damaged artifact=%s action=pack_again reason=%s", out, error)
        return False
    return True


def _pack(source: Path, settings: QuantizeSettings, out: Path, progress_bar: ProgressBar) -> None:
    from vllm_omni.quantization.quantize import open_source, plan_quantize, quantize

    begin_s = time.monotonic()
    plan = plan_quantize(open_source(source), settings)
    logger.info("event=artifact_begun source=%s artifact=%s bytes=%d", source, out, plan.weight_bytes)
    partial = out.with_name(out.name + PARTIAL_SUFFIX)
    # Nobody else writes here: what is damaged, or was left without the journal by which it could be continued, can go.
    shutil.rmtree(out, ignore_errors=True)
    if not (partial / JOURNAL_NAME).is_file():
        shutil.rmtree(partial, ignore_errors=True)
    with progress_bar(plan.weight_bytes, "pack weights") as advance:
        quantize(plan, out, progress=advance)
    logger.info("event=artifact_made artifact=%s seconds=%.1f", out, time.monotonic() - begin_s)
