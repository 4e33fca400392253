"""What a run allocates: some pieces of a matrix, however large the matrix is."""

import tracemalloc
from pathlib import Path

import pytest

from tests.checkpoints import SHAPES, Checkpoint
from vllm_omni.quantization import panels
from vllm_omni.quantization.quantize import open_source, plan_quantize, quantize
from vllm_omni.quantization.quantize_settings import QuantizeSettings

HIDDEN = 64


def peak_bytes(directory: Path, num_panels: int) -> int:
    """Of packing a model whose embedding has so many panels of weights."""
    vocab = num_panels * panels.ELEMENTS_PER_PANEL // HIDDEN
    sizes = {4: HIDDEN, 2: HIDDEN // 2, 6: 2 * HIDDEN, 5: vocab}
    checkpoint = Checkpoint(directory / "source")
    checkpoint.shapes = {name: [sizes[size] for size in shape] for name, shape in SHAPES.items()}
    checkpoint.config |= {"hidden_size": HIDDEN, "intermediate_size": 2 * HIDDEN, "vocab_size": vocab}
    plan = plan_quantize(open_source(checkpoint.write()), QuantizeSettings())
    tracemalloc.start()
    try:
        quantize(plan, directory / "out")
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_a_larger_matrix_takes_no_more_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(panels, "ELEMENTS_PER_PANEL", 1 << 19)
    (tmp_path / "small").mkdir()
    (tmp_path / "large").mkdir()
    assert peak_bytes(tmp_path / "large", 5) < 1.2 * peak_bytes(tmp_path / "small", 1)
