"""Artifacts made from plain checkpoints, kept in the cache directory: a checkpoint is packed at its first start only.

`<cache>/artifacts/<directory name>-<key>`, where the key stands for the source's files (name, size, modification time)
and for how they are packed. An interrupted packing is continued at the next start.
"""

import hashlib
import json
import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path

from vllm_omni import envs
from vllm_omni.quantization.conversion_record import RECORD_NAME
from vllm_omni.quantization.packed_format import FORMAT_VERSION
from vllm_omni.quantization.quantize_settings import QuantizeSettings

logger = logging.getLogger("vllm_omni.quantization")

# Called with the bytes that will be written; gives what is called with each tensor's name and bytes as they are.
ProgressBar = Callable[[int], AbstractContextManager[Callable[[str, int], None]]]
KEY_LENGTH = 16


def artifact_path(source: Path, settings: QuantizeSettings) -> Path:
    """Where the artifact of `source` belongs, whether or not it is there."""
    files = sorted(path for path in source.iterdir() if path.is_file())
    identity = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    text = json.dumps([FORMAT_VERSION, identity, asdict(settings)])
    key = hashlib.sha256(text.encode()).hexdigest()[:KEY_LENGTH]
    return envs.VLLM_OMNI_CACHE_DIR / "artifacts" / f"{source.resolve().name}-{key}"


def cached_artifact(source: Path, settings: QuantizeSettings, progress_bar: ProgressBar) -> Path:
    """The artifact of a plain checkpoint, made now where it is not in the cache.

    Args:
        source: Checkpoint directory.
        settings: How it is packed; without calibration.
        progress_bar: Shows the packing.

    Raises:
        ConfigError: The cache directory cannot be written, has no space, or another process is packing there.
        WeightError: The checkpoint is damaged, or not of a kind that can be packed.
    """
    out = artifact_path(source, settings)
    if (out / RECORD_NAME).is_file():
        logger.info("event=artifact_found source=%s artifact=%s", source, out)
        return out
    from vllm_omni.quantization.quantize import open_source, plan_quantize, quantize

    begin_s = time.monotonic()
    plan = plan_quantize(open_source(source), settings)
    logger.info("event=artifact_begun source=%s artifact=%s bytes=%d", source, out, plan.weight_bytes)
    with progress_bar(plan.weight_bytes) as advance:
        quantize(plan, out, progress=advance)
    logger.info("event=artifact_made artifact=%s seconds=%.1f", out, time.monotonic() - begin_s)
    return out
