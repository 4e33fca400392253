"""Checks a checkpoint directory before an engine is started on it.

Structure of every weight file, agreement of index, shards and `config.json`, and the hashes of converted directories.
Reads headers and, where a record asks for it, hashes bytes; it never builds a tensor and needs no array library.
Only the directory itself is looked at, not directories below it.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_omni.errors import WeightError
from vllm_omni.quantization.conversion_record import RECORD_NAME, read_record
from vllm_omni.quantization.safetensors_format import Shard, TensorEntry, read_shard
from vllm_omni.quantization.tensor_table import has_table, require_expected
from vllm_omni.quantization.verified_files import verify_files

INDEX_NAME = "model.safetensors.index.json"
ACCEPTED_FORMATS = "a directory with config.json and *.safetensors; a GGUF file after `vllm-omni convert`"
SHARD_NAME = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.safetensors")


@dataclass(frozen=True)
class CheckpointReport:
    """What a sound checkpoint holds.

    Attributes:
        total_bytes: Size of the weight files, headers included.
        num_tensors: Tensors over all weight files.
        num_parameters: Stored elements; packed formats hold several weights in one.
        files: Names of the weight files, sorted.
        verified_hash: The directory has a conversion record and every file it lists matches.
    """

    total_bytes: int
    num_tensors: int
    num_parameters: int
    files: tuple[str, ...]
    verified_hash: bool


def check_checkpoint(directory: Path) -> CheckpointReport:
    """Checks a Hugging Face model directory, in the time of reading a few headers.

    A directory with `conversion.json` is also hashed, once: later calls recognise unchanged files.

    Args:
        directory: Holds `config.json` and the weights.

    Raises:
        WeightError: There is no such checkpoint, its format is not accepted, a file is damaged, shards and index
            disagree, tensors are missing, unexpected, duplicate or of another shape than the configuration says,
            or a file differs from the conversion record.
    """
    config = _read_config(directory)
    index = _read_index(directory)
    names = sorted(set(index.values())) if index else _unindexed_names(directory)
    shards = {name: read_shard(directory / name) for name in names}
    tensors = _merge(directory, shards)
    if index:
        _check_index(directory, index, shards)
    if has_table(config):
        require_expected(config, {name: entry.shape for name, entry in tensors.items()}, str(directory))
    return CheckpointReport(
        total_bytes=sum(shard.file_bytes for shard in shards.values()),
        num_tensors=len(tensors),
        num_parameters=sum(entry.num_elements for entry in tensors.values()),
        files=tuple(names),
        verified_hash=_verify_record(directory, names),
    )


def _read_config(directory: Path) -> dict[str, Any]:
    if not directory.is_dir():
        raise WeightError(f"{directory}: no such directory; accepted: {ACCEPTED_FORMATS}")
    path = directory / "config.json"
    if not path.is_file():
        raise WeightError(f"{directory}: it has no config.json; accepted: {ACCEPTED_FORMATS}")
    return _read_object(path)


def _read_object(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise WeightError(f"{path}: not JSON ({error}); fetch or convert the checkpoint again") from error
    if not isinstance(document, dict):
        raise WeightError(f"{path}: it holds a {type(document).__name__}, accepted: a JSON object")
    return document


def _read_index(directory: Path) -> dict[str, str]:
    """Tensor name to shard name; empty without an index."""
    path = directory / INDEX_NAME
    if not path.is_file():
        return {}
    weight_map = _read_object(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise WeightError(f"{path}: weight_map is {weight_map!r}, accepted: tensor names with their shard")
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or Path(name).name != name:
            raise WeightError(f"{path}: {tensor} lies in {name!r}, accepted: a file name in the same directory")
    _require_present(directory, set(weight_map.values()), INDEX_NAME)
    return weight_map


def _unindexed_names(directory: Path) -> list[str]:
    names = sorted(path.name for path in directory.glob("*.safetensors"))
    # Some publishers add a second copy of all weights under this name; loaders skip it.
    names = [name for name in names if not name.startswith("consolidated")] or names
    if not names:
        raise _no_weights(directory)
    series = [match for match in map(SHARD_NAME.fullmatch, names) if match]
    expected = {
        f"{match['stem']}-{number:05d}-of-{match['count']}.safetensors"
        for match in series
        for number in range(1, int(match["count"]) + 1)
    }
    _require_present(directory, expected, "the numbering of the shards")
    return names


def _no_weights(directory: Path) -> WeightError:
    other = sorted(path.name for path in directory.iterdir() if path.suffix in {".bin", ".pt", ".pth", ".gguf"})
    found = f"only {', '.join(other[:5])}" if other else "no weight file"
    return WeightError(f"{directory}: it has {found}; accepted: {ACCEPTED_FORMATS}")


def _require_present(directory: Path, names: set[str], listed_by: str) -> None:
    missing = sorted(name for name in names if not (directory / name).is_file())
    if missing:
        raise WeightError(
            f"{directory}: {len(missing)} of {len(names)} weight files are missing: {', '.join(missing[:20])} "
            f"(listed by {listed_by}); fetch the checkpoint again"
        )


def _merge(directory: Path, shards: Mapping[str, Shard]) -> dict[str, TensorEntry]:
    tensors: dict[str, TensorEntry] = {}
    holder: dict[str, str] = {}
    for file_name, shard in shards.items():
        for name, entry in shard.tensors.items():
            if name in holder:
                raise WeightError(
                    f"{directory}: tensor {name} is in both {holder[name]} and {file_name}; "
                    "keep the files of one checkpoint only"
                )
            holder[name] = file_name
            tensors[name] = entry
    return tensors


def _check_index(directory: Path, index: Mapping[str, str], shards: Mapping[str, Shard]) -> None:
    actual = {name: file_name for file_name, shard in shards.items() for name in shard.tensors}
    wrong = sorted(name for name in index.keys() | actual.keys() if index.get(name) != actual.get(name))
    if wrong:
        name = wrong[0]
        raise WeightError(
            f"{directory / INDEX_NAME}: {len(wrong)} entries do not match the shards; {name} is listed in "
            f"{index.get(name, 'no shard')} and found in {actual.get(name, 'no shard')}; fetch the checkpoint again"
        )


def _verify_record(directory: Path, weight_names: list[str]) -> bool:
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
