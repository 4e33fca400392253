"""An artifact directory of random weights, made in packed form: no weight exists as a number of its own.

Codes are random bytes; scales make the weights of a row as large as those of a trained model, so that activations stay
finite through all layers.
"""

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from benchmarks.edge_harness.geometry import MAX_POSITIONS, Geometry
from benchmarks.edge_harness.toy_tokenizer import toy_vocabulary, write_tokenizer
from vllm_omni.errors import ConfigError
from vllm_omni.quantization.artifact import ARCHITECTURE, SOURCE_ARCHITECTURE_KEY
from vllm_omni.quantization.artifact_writer import ArtifactFile
from vllm_omni.quantization.conversion_record import ConversionRecord, hash_directory, write_record
from vllm_omni.quantization.json_file import write_json
from vllm_omni.quantization.output_directory import staged_directory
from vllm_omni.quantization.packed_format import (
    BLOCK_ROWS,
    CELL_HEAD_BYTES,
    FORMAT_VERSION,
    MAX_CODES,
    QUANT_METHOD,
    MatrixFormat,
)
from vllm_omni.quantization.quantize_settings import EMBEDDING_NAME
from vllm_omni.quantization.safetensors_format import TensorEntry

METHOD = "random"
SEED = 20260101
BYTES_PER_PIECE = 16 << 20


def random_artifact(geometry: Geometry, group_size: int, head_bits: int, work_dir: Path) -> Path:
    """The directory of a random artifact; made once and kept in `work_dir`.

    Args:
        geometry: The model's numbers.
        group_size: Of every matrix.
        head_bits: Bits of the embedding, which is the output layer too; other matrices have 4.
        work_dir: Directory for made models.

    Raises:
        ConfigError: A width is no multiple of the group size, or the directory cannot be written.
    """
    out = work_dir / f"{geometry.name}-omni{FORMAT_VERSION}-g{group_size}-h{head_bits}"
    if out.is_dir():
        return out
    formats, plain = _layout(geometry, group_size, head_bits)
    num_bytes = sum(each.num_bytes for each in formats.values())
    with staged_directory(out, False, num_bytes) as directory:
        _write(directory, geometry, formats, plain)
    return out


def _layout(
    geometry: Geometry, group_size: int, head_bits: int
) -> tuple[dict[str, MatrixFormat], dict[str, TensorEntry]]:
    formats: dict[str, MatrixFormat] = {}
    plain: dict[str, TensorEntry] = {}
    for name, shape in geometry.tensors().items():
        if len(shape) == 1:
            plain[name] = TensorEntry("F32", shape)
            continue
        rows, columns = shape
        if rows % BLOCK_ROWS or columns % group_size:
            raise ConfigError(
                f"{geometry.name}: {name} is {rows} x {columns}; accepted for random weights: rows in multiples of "
                f"{BLOCK_ROWS}, columns in multiples of the group size {group_size}; give another --group-size"
            )
        formats[name] = MatrixFormat(rows, columns, head_bits if name == EMBEDDING_NAME else 4, group_size)
    return formats, plain


def _write(
    directory: Path, geometry: Geometry, formats: dict[str, MatrixFormat], plain: dict[str, TensorEntry]
) -> None:
    rng = np.random.Generator(np.random.SFC64(SEED))
    file = ArtifactFile(directory, formats, plain)
    file.prepare()
    for name, each in formats.items():
        file.write(name, random_cells(rng, each))
    for name, entry in plain.items():
        file.write(name, [rng.uniform(0.7, 1.3, entry.num_elements).astype("<f4")])
    write_json(directory / "config.json", _config(geometry, formats))
    write_tokenizer(directory, toy_vocabulary(geometry.vocab_size), MAX_POSITIONS)
    write_record(directory, ConversionRecord(METHOD, "float32", {}, hash_directory(directory), {"seed": SEED}))


def random_cells(rng: np.random.Generator, form: MatrixFormat) -> Iterator[np.ndarray]:
    """The bytes of a random matrix in pieces of [row blocks, groups, bytes of a cell]."""
    blocks, groups, size = form.packed_shape
    blocks_per_piece = max(1, BYTES_PER_PIECE // (groups * size))
    for begin in range(0, blocks, blocks_per_piece):
        yield _cells(rng, (min(blocks_per_piece, blocks - begin), groups, size), form)


def _cells(rng: np.random.Generator, shape: tuple[int, int, int], form: MatrixFormat) -> np.ndarray:
    codes = MAX_CODES[form.bits]
    cells = np.frombuffer(bytearray(rng.bytes(math.prod(shape))), np.uint8).reshape(shape)
    if form.bits == 8:
        np.minimum(cells, codes, out=cells)
    # The variance of n evenly distributed codes is (n^2 - 1) / 12.
    typical = math.sqrt(12 / ((codes + 1) ** 2 - 1) / form.columns)
    scale = rng.uniform(0.5 * typical, 1.5 * typical, (*shape[:2], BLOCK_ROWS)).astype(np.float16)
    minimum = (scale.astype(np.float32) * np.float32(-codes / 2)).astype(np.float16)
    cells[..., : CELL_HEAD_BYTES // 2] = scale.view(np.uint8)
    cells[..., CELL_HEAD_BYTES // 2 : CELL_HEAD_BYTES] = minimum.view(np.uint8)
    return cells


def _config(geometry: Geometry, formats: dict[str, MatrixFormat]) -> dict[str, object]:
    config = geometry.config()
    num_bytes = sum(each.num_bytes for each in formats.values())
    num_weights = sum(each.rows * each.columns for each in formats.values())
    return config | {
        "architectures": [ARCHITECTURE],
        SOURCE_ARCHITECTURE_KEY: config["architectures"][0],
        "eos_token_id": geometry.vocab_size - 1,
        "quantization_config": {
            "quant_method": QUANT_METHOD,
            "version": FORMAT_VERSION,
            "bits": 4,
            "group_size": next(iter(formats.values())).group_size,
            "method": METHOD,
            "bits_per_weight": round(8 * num_bytes / num_weights, 4),
        },
    }
