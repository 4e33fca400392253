"""The files of a checkpoint directory: configuration, index, shard headers, and how they agree.

Reads headers only and needs no array library. Which tensors a model must have is judged elsewhere.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_omni.errors import WeightError
from vllm_omni.quantization.safetensors_format import Shard, TensorEntry, read_shard

INDEX_NAME = "model.safetensors.index.json"
ACCEPTED_FORMATS = "a directory with config.json and *.safetensors; a GGUF file after `vllm-omni convert`"
SHARD_NAME = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.safetensors")


@dataclass(frozen=True)
class CheckpointFiles:
    """A directory whose files are intact by themselves and agree on what lies where.

    Attributes:
        directory: Where they are.
        config: Content of `config.json`.
        shards: Name of each weight file, sorted, to its header.
        holders: Name of each tensor to the name of its file.
    """

    directory: Path
    config: dict[str, Any]
    shards: dict[str, Shard]
    holders: dict[str, str]

    @property
    def tensors(self) -> dict[str, TensorEntry]:
        """Name to type and shape, over all files."""
        return {name: self.shards[file_name].tensors[name] for name, file_name in self.holders.items()}


def open_checkpoint(directory: Path) -> CheckpointFiles:
    """Reads the headers of a directory.

    Raises:
        WeightError: There is no such checkpoint, its format is not accepted, a file is damaged or missing, a tensor
            occurs twice, or the index differs from the shards.
    """
    config = _read_config(directory)
    index = _read_index(directory)
    names = sorted(set(index.values())) if index else _unindexed_names(directory)
    shards = {name: read_shard(directory / name) for name in names}
    holders = _holders(directory, shards)
    if index:
        _check_index(directory, index, holders)
    return CheckpointFiles(directory, config, shards, holders)


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


def _holders(directory: Path, shards: Mapping[str, Shard]) -> dict[str, str]:
    holders: dict[str, str] = {}
    for file_name, shard in shards.items():
        for name in shard.tensors:
            if name in holders:
                raise WeightError(
                    f"{directory}: tensor {name} is in both {holders[name]} and {file_name}; "
                    "keep the files of one checkpoint only"
                )
            holders[name] = file_name
    return holders


def _check_index(directory: Path, index: Mapping[str, str], holders: Mapping[str, str]) -> None:
    wrong = sorted(name for name in index.keys() | holders.keys() if index.get(name) != holders.get(name))
    if wrong:
        name = wrong[0]
        raise WeightError(
            f"{directory / INDEX_NAME}: {len(wrong)} entries do not match the shards; {name} is listed in "
            f"{index.get(name, 'no shard')} and found in {holders.get(name, 'no shard')}; fetch the checkpoint again"
        )
