"""Quantized artifact directories: what lies where, checked from headers alone.

An artifact is a checkpoint directory whose `config.json` names the method `omni_int4` and whose weight files hold
packed matrices (`csrc/README.md`) beside plain vectors. Needs no array library; a loader maps each file once and
takes views at the offsets given here.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_omni.errors import WeightError
from vllm_omni.quantization.checkpoint_files import CheckpointFiles, open_checkpoint
from vllm_omni.quantization.packed_format import (
    ALIGNMENT_BYTES,
    FORMAT_VERSION,
    METADATA_KEY,
    QUANT_METHOD,
    MatrixFormat,
)
from vllm_omni.quantization.safetensors_format import TensorEntry
from vllm_omni.quantization.tensor_table import (
    TABLE_MODEL_TYPES,
    TIED_NAME,
    Shape,
    expected_tensors,
    require_expected,
)

ARCHITECTURE = "OmniDecoderForCausalLM"
SOURCE_ARCHITECTURE_KEY = "omni_source_architecture"
PLAIN_DTYPES = ("BF16", "F16", "F32")
CONVERT_AGAIN = "convert again with `vllm-omni quantize SOURCE --out DIR`"


@dataclass(frozen=True)
class StoredMatrix:
    """A packed matrix in a file.

    Attributes:
        path: The file.
        begin: First byte in the file, a multiple of 64.
        format: Plain shape, bits and group size; its `packed_shape` is that of the uint8 view.
    """

    path: Path
    begin: int
    format: MatrixFormat


@dataclass(frozen=True)
class StoredTensor:
    """A plain tensor in a file: path, first byte in it, type (one of `PLAIN_DTYPES`) and shape."""

    path: Path
    begin: int
    entry: TensorEntry


@dataclass(frozen=True)
class Artifact:
    """A checked artifact.

    Attributes:
        directory: Where it is.
        config: Content of `config.json`.
        matrices: Name of the weight to where it lies. A tied output projection is not among them: the embedding,
            `model.embed_tokens.weight`, serves as both.
        tensors: The others, norms and biases.
        num_weights: Weights that all tensors stand for.
        num_bytes: Size of the weight files.
    """

    directory: Path
    config: Mapping[str, Any]
    matrices: Mapping[str, StoredMatrix]
    tensors: Mapping[str, StoredTensor]
    num_weights: int
    num_bytes: int

    @property
    def bits_per_weight(self) -> float:
        """Counted from the bytes of the weight files, headers and unpacked tensors included."""
        return 8 * self.num_bytes / self.num_weights


def is_artifact(config: Mapping[str, Any]) -> bool:
    """Whether a `config.json` is that of an artifact, of whatever version."""
    quantization = config.get("quantization_config")
    return isinstance(quantization, dict) and quantization.get("quant_method") == QUANT_METHOD


def read_artifact(directory: Path) -> Artifact:
    """Checks an artifact's headers and says what lies where. Hashes are `check_checkpoint`'s business.

    Raises:
        WeightError: The directory is no artifact, a file is damaged, or `check_artifact` refuses it.
    """
    files = open_checkpoint(directory)
    if not is_artifact(files.config):
        method = files.config.get("quantization_config")
        raise WeightError(
            f"{directory / 'config.json'}: quantization_config is {method!r}, accepted: one with quant_method "
            f"{QUANT_METHOD!r}; make an artifact of the checkpoint with `vllm-omni quantize {directory} --out DIR`"
        )
    return check_artifact(files)


def check_artifact(files: CheckpointFiles) -> Artifact:
    """The same for headers that were read already.

    Args:
        files: Of a directory for whose configuration `is_artifact` holds.

    Raises:
        WeightError: Another version, an unknown model type, bits or group size, a matrix whose stored shape, type or
            alignment is wrong, or tensors that are not those of the configuration.
    """
    _require_version(files.directory / "config.json", files.config["quantization_config"].get("version"))
    formats = _matrix_formats(files)
    matrices: dict[str, StoredMatrix] = {}
    tensors: dict[str, StoredTensor] = {}
    for name, file_name in files.holders.items():
        shard, path = files.shards[file_name], files.directory / file_name
        stored = StoredTensor(path, shard.begins[name], shard.tensors[name])
        if name in formats:
            matrices[name] = _stored_matrix(name, stored, formats[name])
        else:
            tensors[name] = _plain(name, stored)
    shapes: dict[str, Shape] = {name: (matrix.format.rows, matrix.format.columns) for name, matrix in matrices.items()}
    shapes |= {name: tensor.entry.shape for name, tensor in tensors.items()}
    _require_model(files, shapes, formats)
    return Artifact(
        directory=files.directory,
        config=files.config,
        matrices=matrices,
        tensors=tensors,
        num_weights=sum(math.prod(shape) for shape in shapes.values()),
        num_bytes=sum(shard.file_bytes for shard in files.shards.values()),
    )


def matrix_table(formats: Mapping[str, MatrixFormat]) -> str:
    """The text that a weight file has under `METADATA_KEY`."""
    matrices = {
        name: {"rows": each.rows, "columns": each.columns, "bits": each.bits, "group_size": each.group_size}
        for name, each in formats.items()
    }
    return json.dumps({"version": FORMAT_VERSION, "matrices": matrices}, separators=(",", ":"))


def _require_version(path: Path, version: Any) -> None:
    if version != FORMAT_VERSION:
        raise WeightError(
            f"{path}: {QUANT_METHOD} version {version}, this build reads {FORMAT_VERSION}; {CONVERT_AGAIN}"
        )


def _matrix_formats(files: CheckpointFiles) -> dict[str, MatrixFormat]:
    formats: dict[str, MatrixFormat] = {}
    for file_name, shard in files.shards.items():
        path = files.directory / file_name
        table = _table(path, shard.metadata.get(METADATA_KEY))
        unknown = sorted(name for name in table if name not in shard.tensors)
        if unknown:
            raise _damaged(path, f"its table lists {', '.join(unknown[:5])}, which it does not hold")
        formats |= {name: _format(path, name, fields) for name, fields in table.items()}
    return formats


def _table(path: Path, text: str | None) -> dict[str, Any]:
    if text is None:
        raise _damaged(path, f"its __metadata__ has no key {METADATA_KEY}")
    try:
        document = json.loads(text)
    except ValueError as error:
        raise _damaged(path, f"its table of matrices is not JSON ({error})") from error
    if not isinstance(document, dict):
        raise _damaged(path, "its table of matrices is not an object")
    _require_version(path, document.get("version"))
    matrices = document.get("matrices")
    if not isinstance(matrices, dict):
        raise _damaged(path, f"matrices is {matrices!r}, accepted: an object of matrix names")
    return matrices


def _format(path: Path, name: str, fields: Any) -> MatrixFormat:
    given = fields if isinstance(fields, dict) else {}
    try:
        return MatrixFormat(*(given.get(key) for key in ("rows", "columns", "bits", "group_size")))  # type: ignore[arg-type]
    except WeightError as error:
        raise _damaged(path, f"matrix {name}: {error}") from error


def _stored_matrix(name: str, stored: StoredTensor, expected: MatrixFormat) -> StoredMatrix:
    entry = TensorEntry("U8", expected.packed_shape)
    if stored.entry != entry:
        raise _damaged(
            stored.path,
            f"matrix {name} is stored as {stored.entry.dtype} {list(stored.entry.shape)}, its table entry "
            f"({expected.rows} x {expected.columns}, {expected.bits} bits, groups of {expected.group_size}) needs "
            f"{entry.dtype} {list(entry.shape)}",
        )
    if stored.begin % ALIGNMENT_BYTES:
        raise _damaged(
            stored.path, f"matrix {name} begins at byte {stored.begin}, accepted: multiples of {ALIGNMENT_BYTES}"
        )
    return StoredMatrix(stored.path, stored.begin, expected)


def _plain(name: str, stored: StoredTensor) -> StoredTensor:
    if stored.entry.dtype not in PLAIN_DTYPES:
        raise _damaged(
            stored.path,
            f"tensor {name} has dtype {stored.entry.dtype} and is not in the table of matrices, accepted without it: "
            + ", ".join(PLAIN_DTYPES),
        )
    return stored


def _require_model(files: CheckpointFiles, shapes: Mapping[str, Shape], formats: Mapping[str, MatrixFormat]) -> None:
    """The tensors are those of the configuration, and its matrices are packed."""
    config = files.config
    if config.get("model_type") not in TABLE_MODEL_TYPES:
        raise WeightError(
            f"{files.directory / 'config.json'}: model_type is {config.get('model_type')!r}, accepted in an artifact: "
            + ", ".join(TABLE_MODEL_TYPES)
        )
    require_expected(config, shapes, str(files.directory))
    unpacked = [name for name, shape in expected_tensors(config).items() if len(shape) == 2 and name not in formats]
    unpacked = [name for name in unpacked if name in shapes]
    if unpacked:
        raise _damaged(files.directory, f"{', '.join(unpacked[:5])} are stored unpacked")
    if config.get("tie_word_embeddings") and TIED_NAME in shapes:
        raise _damaged(files.directory, f"it holds {TIED_NAME}, which its configuration ties to the embedding")


def _damaged(path: Path, reason: str) -> WeightError:
    return WeightError(f"{path}: not an intact {QUANT_METHOD} artifact: {reason}; {CONVERT_AGAIN}")
