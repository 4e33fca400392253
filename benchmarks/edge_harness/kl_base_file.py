"""The file in which `llama-perplexity --kl-divergence-base` keeps a base model's predictions, written and read here.

So that both engines are judged against one base, which need not be llama.cpp's.

    "_logits_" | int32 tokens of a chunk, vocabulary, chunks | int32 token ids [chunks, tokens]
    per chunk and scored position: float32 scale, lowest | uint16 codes [vocabulary, rounded up to even]

Everything is little-endian. `kl_statistics.py` says what the numbers mean.
"""

import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np

from benchmarks.edge_harness.kl_statistics import StoredLogProbs, scored_positions, store_log_probs
from vllm_omni.errors import WeightError
from vllm_omni.native.spec import FloatArray

MAGIC = b"_logits_"
HEAD = struct.Struct("<8s3i")
# The two floats before the codes, in their units.
PREFIX = 4


def write_base(path: Path, chunks: np.ndarray, vocab_size: int, logits_of: Callable[[np.ndarray], FloatArray]) -> None:
    """Writes `path`, which appears when it is complete.

    Args:
        path: File to make; a chunk of 512 tokens and 49152 words takes 25 MB.
        chunks: [chunks, tokens of a chunk] int32.
        vocab_size: Numbers of a row of logits.
        logits_of: Gives a chunk's [scored positions, vocabulary] float32.
    """
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as stream:
        stream.write(HEAD.pack(MAGIC, chunks.shape[1], vocab_size, len(chunks)))
        stream.write(chunks.astype("<i4").tobytes())
        for chunk in chunks:
            stream.write(_encode(store_log_probs(logits_of(chunk))).tobytes())
    partial.rename(path)


def read_base(path: Path) -> Iterator[tuple[np.ndarray, StoredLogProbs]]:
    """Token ids and base predictions of each chunk, read one by one.

    Raises:
        WeightError: The file is not one of these, or is truncated.
    """
    with path.open("rb") as stream:
        head = stream.read(HEAD.size)
        magic, tokens, vocab_size, num_chunks = HEAD.unpack(head) if len(head) == HEAD.size else (b"", 0, 0, 0)
        if magic != MAGIC:
            raise WeightError(f"{path} is no file of base predictions; remove it, it is then made again")
        chunks = np.fromfile(stream, "<i4", num_chunks * tokens).reshape(num_chunks, tokens)
        for chunk in chunks:
            yield chunk, _read_rows(path, stream, len(scored_positions(tokens)), vocab_size)


def _row_units(vocab_size: int) -> int:
    return PREFIX + vocab_size + vocab_size % 2


def _encode(stored: StoredLogProbs) -> np.ndarray:
    """[rows, units of a row] uint16."""
    rows, vocab_size = stored.codes.shape
    units = np.zeros((rows, _row_units(vocab_size)), "<u2")
    units[:, :PREFIX] = np.stack([stored.scale, stored.lowest], axis=1).astype("<f4").view("<u2")
    units[:, PREFIX : PREFIX + vocab_size] = stored.codes
    return units


def _read_rows(path: Path, stream: BinaryIO, rows: int, vocab_size: int) -> StoredLogProbs:
    size = _row_units(vocab_size)
    units = np.fromfile(stream, "<u2", rows * size)
    if len(units) != rows * size:
        raise WeightError(f"{path} is truncated; remove it, it is then made again")
    units = units.reshape(rows, size)
    floats = np.ascontiguousarray(units[:, :PREFIX]).view("<f4")
    return StoredLogProbs(floats[:, 0], floats[:, 1], units[:, PREFIX : PREFIX + vocab_size])
