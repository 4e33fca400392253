"""Compares the native core with its reference on an artifact before anything is timed.

Two layers of the stack, a prompt and a decoded token; and rows of the output layer. Everything is computed by
`vllm_omni.native.reference` from the same file.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from benchmarks.edge_harness.native_model import NativeModel, head_of
from vllm_omni.errors import EngineError
from vllm_omni.model_executor.models.decoder.weights import MappedMatrix, decoder_weights, placed_weights
from vllm_omni.native.reference import GroupedWeights, PagedCache, linear_ref
from vllm_omni.native.reference_decoder import decoder_ref
from vllm_omni.native.spec import FloatArray
from vllm_omni.quantization.packed_format import BLOCK_ROWS
from vllm_omni.quantization.packing import unpack

NUM_LAYERS = 2
PROMPT_TOKENS = 3
MAX_TOKENS = 8
NUM_HEAD_BLOCKS = 64
# Token ids of the check come from the first row blocks of the embedding: only these are unpacked.
NUM_EMBEDDING_BLOCKS = 8
# Of the length of a row. Sums in float32 and another order move a result by about 1e-7. Where that tips the rounding of
# an activation, a row with one dominant number moves by 1/127; the reference, disturbed as little, does so too.
TOLERANCE = 2e-2


def check_native(directory: Path, num_threads: int) -> dict[str, float]:
    """How far core and reference are apart, relative to the length of a row, for each thing compared.

    Raises:
        EngineError: A difference exceeds `TOLERANCE`; the speed of a wrong answer is not measured.
    """
    ids = np.random.default_rng(0).integers(0, NUM_EMBEDDING_BLOCKS * BLOCK_ROWS, PROMPT_TOKENS + 1).astype(np.int32)
    with NativeModel(directory, num_threads, MAX_TOKENS, NUM_LAYERS) as model:
        found = np.concatenate([model.prefill(ids[:-1]), model.decode(int(ids[-1]), PROMPT_TOKENS)])
        expected = _reference_stack(model, ids)
        head_found, head_expected = _head_rows(model, expected)
    differences = {
        f"{model.shape.num_layers} layers, {PROMPT_TOKENS} prompt rows": relative_difference(found[:-1], expected[:-1]),
        f"{model.shape.num_layers} layers, 1 decoded row": relative_difference(found[-1:], expected[-1:]),
        f"{head_expected.shape[1]} rows of the output layer": relative_difference(head_found, head_expected),
    }
    require_close(differences)
    return differences


def relative_difference(found: FloatArray, expected: FloatArray) -> float:
    """Largest length of a row's difference over the length of the row; infinite where a number is not finite."""
    if not (np.isfinite(found).all() and np.isfinite(expected).all()):
        return float("inf")
    difference = found.astype(np.float64) - expected
    return float((np.linalg.norm(difference, axis=1) / np.linalg.norm(expected, axis=1)).max())


def require_close(differences: Mapping[str, float]) -> None:
    """Raises EngineError when one exceeds `TOLERANCE`."""
    wrong = [f"{name}: {value:.2g}" for name, value in differences.items() if not value <= TOLERANCE]
    if wrong:
        raise EngineError(
            f"the native core differs from its reference by more than {TOLERANCE:g} of a row's length in "
            f"{'; '.join(wrong)}. The speed of a wrong answer is not reported; run tests/parity"
        )


def _reference_stack(model: NativeModel, ids: np.ndarray) -> FloatArray:
    """What the reference gives for the prompt in one step and the last token in another."""

    def unpacked(mapped: MappedMatrix) -> GroupedWeights:
        form = mapped.format
        rows = form.rows if form.rows != model.shape.vocab_size else NUM_EMBEDDING_BLOCKS * BLOCK_ROWS
        return unpack(mapped.data[: -(-rows // BLOCK_ROWS)], rows, form.columns, form.bits, form.group_size)

    weights = decoder_weights(model.mapped, model.shape, unpacked)
    rope = model.weights.layers[0].rope
    weights = placed_weights(weights, rope, [0] * model.shape.num_layers)
    caches = [PagedCache(model.new_pages(), model.kv_kind, model.shape.head_dim) for _ in weights.layers]
    steps = (model.rows(ids[:-1], 0), model.rows(ids[-1:], len(ids) - 1))
    return np.concatenate([decoder_ref(model.spec, weights, caches, rows) for rows in steps])


def _head_rows(model: NativeModel, hidden: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Logits of core and reference in row blocks spread over the vocabulary, the last block among them."""
    mapped = model.mapped.matrix(*head_of(model.shape))
    form, blocks = mapped.format, len(mapped.data)
    chosen = np.unique(np.linspace(0, blocks - 1, NUM_HEAD_BLOCKS).astype(np.int64))
    rows = (chosen[:, None] * BLOCK_ROWS + np.arange(BLOCK_ROWS)).reshape(-1)
    part = unpack(mapped.data[chosen], len(rows), form.columns, form.bits, form.group_size)
    is_row = rows < form.rows
    return model.logits(hidden)[:, rows[is_row]], linear_ref(hidden, part)[:, is_row]
