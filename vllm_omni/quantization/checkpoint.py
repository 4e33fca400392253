"""Checks a checkpoint directory before an engine is started on it.

Structure of every weight file, agreement of index, shards and `config.json`, the packed matrices of quantized
artifacts, and the hashes of converted directories. Reads headers and, where a record asks for it, hashes bytes; it
never builds a tensor and needs no array library. Only the directory itself is looked at, not directories below it.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from vllm_omni.errors import WeightError
from vllm_omni.quantization.artifact import check_artifact, is_artifact
from vllm_omni.quantization.checkpoint_files import INDEX_NAME, CheckpointFiles, open_checkpoint
from vllm_omni.quantization.conversion_record import RECORD_NAME, read_record
from vllm_omni.quantization.tensor_table import has_table, require_expected
from vllm_omni.quantization.verified_files import verify_files

__all__ = ["INDEX_NAME", "CheckpointReport", "check_checkpoint"]


@dataclass(frozen=True)
class CheckpointReport:
    """What a sound checkpoint holds.

    Attributes:
        total_bytes: Size of the weight files, headers included.
        num_tensors: Tensors over all weight files.
        num_parameters: Weights of a quantized artifact; else stored elements, of which foreign packed formats hold
            several weights in one.
        files: Names of the weight files, sorted.
        verified_hash: The directory has a conversion record and every file it lists matches.
    """

    total_bytes: int
    num_tensors: int
    num_parameters: int
    files: tuple[str, ...]
    verified_hash: bool


def check_checkpoint(directory: Path) -> CheckpointReport:
    """Checks a Hugging Face model directory or a quantized artifact, in the time of reading a few headers.

    A directory with `conversion.json` is also hashed, once: later calls recognise unchanged files.

    Args:
        directory: Holds `config.json` and the weights.

    Raises:
        WeightError: There is no such checkpoint, its format is not accepted, a file is damaged, shards and index
            disagree, tensors are missing, unexpected, duplicate or of another shape than the configuration says,
            an artifact is of another version, or a file differs from the conversion record.
    """
    files = open_checkpoint(directory)
    return CheckpointReport(
        total_bytes=sum(shard.file_bytes for shard in files.shards.values()),
        num_tensors=len(files.holders),
        num_parameters=_check_tensors(files),
        files=tuple(files.shards),
        verified_hash=_verify_record(directory, files.shards),
    )


def _check_tensors(files: CheckpointFiles) -> int:
    """The number of weights."""
    if is_artifact(files.config):
        return check_artifact(files).num_weights
    tensors = files.tensors
    if has_table(files.config):
        require_expected(files.config, {name: entry.shape for name, entry in tensors.items()}, str(files.directory))
    return sum(entry.num_elements for entry in tensors.values())


def _verify_record(directory: Path, weight_names: Iterable[str]) -> bool:
    record = read_record(directory)
    if record is None:
        return False
    unlisted = [name for name in weight_names if name not in record.files]
    if unlisted:
        raise WeightError(
            f"{directory}: {RECORD_NAME} does not list {', '.join(unlisted)}; remove weight files that the "
            "conversion did not write, or convert the source again"
        )
    verify_files(directory, record)
    return True
