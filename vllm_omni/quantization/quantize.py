"""Quantizes a checkpoint into an artifact directory. `docs/edge/quantize.md` describes the result.

Everything that can be refused is refused before the first byte is written. Matrices are then read, quantized, packed
and written in panels of rows, so memory holds a few panels; with calibration it holds one decoder layer. A run that
was stopped is continued by the same call.
"""

import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vllm_omni.errors import ConfigError, WeightError
from vllm_omni.quantization.artifact import ARCHITECTURE, SOURCE_ARCHITECTURE_KEY
from vllm_omni.quantization.artifact_writer import WEIGHT_FILE_NAME, ArtifactFile
from vllm_omni.quantization.calibrated_layers import CalibratedLayers
from vllm_omni.quantization.calibration import LayerRunner
from vllm_omni.quantization.conversion_record import (
    ConversionRecord,
    FileEntry,
    hash_directory,
    read_record,
    write_record,
)
from vllm_omni.quantization.gguf_source import GgufSource
from vllm_omni.quantization.grid_search import quantize_rtn
from vllm_omni.quantization.journal import JOURNAL_NAME, Journal, has_journal
from vllm_omni.quantization.json_file import write_json
from vllm_omni.quantization.output_directory import finish_directory, resumable_directory
from vllm_omni.quantization.packed_format import FORMAT_VERSION, QUANT_METHOD, MatrixFormat
from vllm_omni.quantization.packing import pack
from vllm_omni.quantization.panels import row_panels
from vllm_omni.quantization.quantize_settings import QuantizeSettings, choose_formats
from vllm_omni.quantization.safetensors_format import TensorEntry
from vllm_omni.quantization.source_tensors import HfSource, TensorSource
from vllm_omni.quantization.tensor_table import (
    IGNORED_SUFFIX,
    TABLE_MODEL_TYPES,
    TIED_NAME,
    expected_tensors,
    require_expected,
)
from vllm_omni.version import __version__

logger = logging.getLogger(__name__)

Progress = Callable[[str, int], None]
MakeRunner = Callable[["QuantizePlan"], LayerRunner]
Amend = Callable[[ConversionRecord], ConversionRecord]
METHOD_PREFIX = "quantize-"


@dataclass(frozen=True)
class QuantizePlan:
    """What will be written, decided from headers alone.

    Attributes:
        source: Where the weights come from.
        settings: The user's choice.
        matrices: Name to format of each packed matrix, in file order.
        kept: Matrices that are taken over exactly from the source's grid.
        plain: Name to entry of the other tensors.
    """

    source: TensorSource
    settings: QuantizeSettings
    matrices: Mapping[str, MatrixFormat]
    kept: frozenset[str]
    plain: Mapping[str, TensorEntry]

    @property
    def num_weights(self) -> int:
        matrices = sum(each.rows * each.columns for each in self.matrices.values())
        return matrices + sum(entry.num_elements for entry in self.plain.values())

    @property
    def weight_bytes(self) -> int:
        """Bytes of all tensors written, the header left out."""
        return sum(self.tensor_bytes.values())

    @property
    def tensor_bytes(self) -> dict[str, int]:
        """Name to bytes of each tensor written."""
        packed = {name: each.num_bytes for name, each in self.matrices.items()}
        return packed | {name: entry.num_bytes for name, entry in self.plain.items()}

    @property
    def method(self) -> str:
        """`rtn`, `gptq`, or `gguf` where every matrix is taken over."""
        return "gguf" if len(self.kept) == len(self.matrices) else self.settings.method

    @property
    def dominant_format(self) -> MatrixFormat:
        """A matrix with the bits and group size that most weights have."""
        sizes: dict[tuple[int, int], int] = {}
        for each in self.matrices.values():
            key = (each.bits, each.group_size)
            sizes[key] = sizes.get(key, 0) + each.rows * each.columns
        bits, group_size = max(sizes, key=lambda key: sizes[key])
        return MatrixFormat(1, 1, bits, group_size)


def open_source(path: Path) -> TensorSource:
    """A checkpoint directory or a `.gguf` file.

    Raises:
        ConfigError: There is neither.
        WeightError: It is damaged or not accepted.
    """
    if path.is_dir():
        return HfSource(path)
    if path.suffix == ".gguf":
        return GgufSource(path)
    what = "is no .gguf file" if path.exists() else "does not exist"
    raise ConfigError(f"source {path} {what}; accepted: a checkpoint directory, or a .gguf file")


def plan_quantize(source: TensorSource, settings: QuantizeSettings) -> QuantizePlan:
    """Decides what to write.

    Raises:
        ConfigError: An override meets no matrix, or calibration is asked for where nothing is quantized by it.
        WeightError: The model type is not supported, or tensors are not those of the configuration.
    """
    model_type = source.config.get("model_type")
    if model_type not in TABLE_MODEL_TYPES:
        raise WeightError(
            f"{source.path}: model_type is {model_type!r}, accepted for quantizing: {', '.join(TABLE_MODEL_TYPES)}"
        )
    shapes = {name: each.entry.shape for name, each in source.tensors.items() if not name.endswith(IGNORED_SUFFIX)}
    require_expected(source.config, shapes, str(source.path))
    if source.config.get("tie_word_embeddings"):
        shapes.pop(TIED_NAME, None)
    ordered = {name: shapes[name] for name in expected_tensors(source.config) if name in shapes}
    matrix_shapes = {name: (shape[0], shape[1]) for name, shape in ordered.items() if len(shape) == 2}
    grids = {name: each.grid for name, each in source.tensors.items() if each.grid}
    matrices, kept = choose_formats(settings, matrix_shapes, grids)
    plain = {name: source.tensors[name].entry for name in ordered if name not in matrices}
    return QuantizePlan(source, settings, matrices, kept, plain)


def quantize(
    plan: QuantizePlan,
    out: Path,
    overwrite: bool = False,
    progress: Progress | None = None,
    make_runner: MakeRunner | None = None,
    amend: Amend | None = None,
) -> ConversionRecord:
    """Writes the planned directory; it appears under its name only when it is complete.

    Where the same run was killed after that, it is done already: nothing but its journal is removed.

    Args:
        plan: From `plan_quantize`.
        out: Directory to make. What a stopped run with the same plan left in `out.partial` is continued.
        overwrite: Replace `out` if a conversion wrote it.
        progress: Called with a tensor's name and the bytes written for it; for tensors of an earlier run at once.
        make_runner: Makes what runs the layers; needed where the settings have a calibration text.
        amend: Called when all else is written; gives the record to write for the one that it is given. What it raises
            keeps the directory from getting its name.

    Raises:
        ConfigError: `out` exists and may not be replaced, is being written by another run, or cannot be written.
        WeightError: A tensor's values are not finite or beyond float16.
    """
    _require_outside(plan.source.path, out)
    source = plan.source.hashes()
    key = _journal_key(plan, source, ArtifactFile(out, plan.matrices, plan.plain).header)
    progress = progress or _no_progress
    if record := _finished(out, key):
        _report(plan.tensor_bytes, progress)
        return record
    with resumable_directory(out, overwrite, plan.weight_bytes, JOURNAL_NAME) as directory:
        file = ArtifactFile(directory, plan.matrices, plan.plain)
        journal = Journal(directory, key)
        file.prepare()
        _Run(plan, file, journal, progress).write_all(make_runner)
        plan.source.write_side_files(directory)
        write_json(directory / "config.json", artifact_config(plan, file.num_bytes))
        record = _record(plan, source, hash_directory(directory), file.num_bytes)
        record = amend(record) if amend else record
        write_record(directory, record)
    return record


def artifact_config(plan: QuantizePlan, file_bytes: int) -> dict[str, Any]:
    """The content of the artifact's `config.json`."""
    config = dict(plan.source.config)
    architectures = config.get("architectures") or [None]
    dominant = plan.dominant_format
    config["architectures"] = [ARCHITECTURE]
    config[SOURCE_ARCHITECTURE_KEY] = architectures[0]
    config["quantization_config"] = {
        "quant_method": QUANT_METHOD,
        "version": FORMAT_VERSION,
        "bits": dominant.bits,
        "group_size": dominant.group_size,
        "method": plan.method,
        "bits_per_weight": round(8 * file_bytes / plan.num_weights, 4),
    }
    return config


class _Run:
    """One run over the tensors that are not on disk yet."""

    def __init__(self, plan: QuantizePlan, file: ArtifactFile, journal: Journal, progress: Progress):
        self.plan = plan
        self.file = file
        self.journal = journal
        self.progress = progress

    def write_all(self, make_runner: MakeRunner | None) -> None:
        """Writes what is missing: plain tensors, matrices that need no activations, then the calibrated ones."""
        sizes = self.plan.tensor_bytes
        _report({name: sizes[name] for name in sorted(self.journal.done)}, self.progress)
        for name in self.plan.plain:
            self._write(name, iter([self.plan.source.plain(name)]))
        calibrated = self._calibrated_names()
        for name in self.plan.matrices:
            if name not in calibrated:
                self._write(name, self._pieces(name))
        if calibrated - self.journal.done:
            assert make_runner is not None, "calibration needs a runner"
            layers = CalibratedLayers(self.plan.source, self.plan.matrices, self.plan.settings.method, self.file)
            for name, pieces in layers.pieces(make_runner(self.plan), calibrated, self.journal.done):
                self._write(name, pieces)

    def _calibrated_names(self) -> set[str]:
        """Matrices quantized by activations: those of the layers, and an output projection of its own."""
        if self.plan.settings.calibration_text is None:
            return set()
        names = set(self.plan.matrices) - self.plan.kept
        return {name for name in names if name.startswith("model.layers.") or name == TIED_NAME}

    def _write(self, name: str, pieces: Iterator[bytes | np.ndarray]) -> None:
        if name in self.journal.done:
            return
        self.file.write(name, self._counted(name, pieces))
        self.journal.add(name)

    def _counted(self, name: str, pieces: Iterator[bytes | np.ndarray]) -> Iterator[bytes | np.ndarray]:
        for piece in pieces:
            yield piece
            self.progress(name, piece.nbytes if isinstance(piece, np.ndarray) else len(piece))

    def _pieces(self, name: str) -> Iterator[np.ndarray]:
        """A matrix without activations, packed panel by panel."""
        each, source = self.plan.matrices[name], self.plan.source
        for begin, end in row_panels(each.rows, each.columns):
            if name in self.plan.kept:
                yield pack(source.grid_rows(name, begin, end))
                continue
            try:
                yield pack(quantize_rtn(source.rows(name, begin, end), each.bits, each.group_size))
            except WeightError as error:
                raise WeightError(f"{source.path}: tensor {name}: {error}") from error


def _require_outside(source: Path, out: Path) -> None:
    source, out = source.resolve(), out.resolve()
    if source.is_relative_to(out) or (source.is_dir() and out.is_relative_to(source)):
        raise ConfigError(f"--out {out} holds the source {source}, or lies in it; pass another directory")


def _finished(out: Path, key: Mapping[str, Any]) -> ConversionRecord | None:
    """The record of a run under this key that was killed between the renaming and its end, which is made up for."""
    try:
        record = read_record(out) if not out.is_symlink() and has_journal(out, key) else None
    except OSError as error:
        raise ConfigError(
            f"--out {out} cannot be read: {error}; pass another directory, or make it readable"
        ) from error
    except WeightError:
        # Damaged after it was written: replaced or refused as any other directory.
        return None
    if record is None or not record.method.startswith(METHOD_PREFIX):
        return None
    finish_directory(out, JOURNAL_NAME)
    logger.info("event=conversion_finished directory=%s reason=an earlier run was killed at its end", out)
    return record


def _journal_key(plan: QuantizePlan, source: Mapping[str, FileEntry], header: bytes) -> dict[str, Any]:
    text = plan.settings.calibration_text
    return {
        "tool_version": __version__,
        "method": plan.settings.method,
        "kept": sorted(plan.kept),
        "calibration": None if text is None else hashlib.sha256(text.encode()).hexdigest(),
        "layout": hashlib.sha256(header).hexdigest(),
        "source": {name: entry.sha256 for name, entry in source.items()},
    }


def _record(
    plan: QuantizePlan,
    source: Mapping[str, FileEntry],
    files: dict[str, FileEntry],
    file_bytes: int,
) -> ConversionRecord:
    files.pop(JOURNAL_NAME, None)
    dominant, text = plan.dominant_format, plan.settings.calibration_text
    return ConversionRecord(
        method=f"{METHOD_PREFIX}{plan.method}",
        dtype=str(plan.source.config.get("dtype") or plan.source.config.get("torch_dtype") or "bfloat16"),
        source=source,
        files=files,
        settings={
            "bits": dominant.bits,
            "group_size": dominant.group_size,
            "overrides": [f"{o.pattern}={o.bits}:{o.group_size or 'same'}" for o in plan.settings.overrides],
            "calibration_sha256": None if text is None else hashlib.sha256(text.encode()).hexdigest(),
            "kept_matrices": len(plan.kept),
            "bits_per_weight": round(8 * file_bytes / plan.num_weights, 4),
            "weight_file": WEIGHT_FILE_NAME,
        },
    )


def _report(tensor_bytes: Mapping[str, int], progress: Progress) -> None:
    """Tells of tensors that were on disk before."""
    for name, num_bytes in tensor_bytes.items():
        progress(name, num_bytes)


def _no_progress(name: str, num_bytes: int) -> None:
    del name, num_bytes
