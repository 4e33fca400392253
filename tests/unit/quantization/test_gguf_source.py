from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize as gguf_dequantize
from gguf.quants import quantize as gguf_quantize

from vllm_omni.errors import WeightError
from vllm_omni.quantization.gguf_source import BLOCK_BYTES, GRID_BITS, GgufSource, grid_matrix
from vllm_omni.quantization.gguf_tensors import decode_tensor
from vllm_omni.quantization.packing import dequantize


def blocks_of(values: np.ndarray, kind: str) -> np.ndarray:
    encoded = gguf_quantize(values, GGMLQuantizationType[kind])
    return encoded.reshape(len(values), -1, BLOCK_BYTES[kind])


def decoded(blocks: np.ndarray, kind: str) -> np.ndarray:
    return gguf_dequantize(blocks.reshape(len(blocks), -1), GGMLQuantizationType[kind])


def q8_block(codes: list[int], scale: float = 0.37) -> np.ndarray:
    x = np.zeros(32, np.int8)
    x[: len(codes)] = codes
    return np.concatenate([np.array([scale], np.float16).view(np.uint8), x.view(np.uint8)]).reshape(1, 1, 34)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1"])
def test_four_bit_blocks_keep_every_value(kind: str) -> None:
    values = np.random.default_rng(0).standard_normal((40, 320)).astype(np.float32)
    values[3, :32] = 0
    values[4] *= 1e-6
    blocks = blocks_of(values, kind)
    matrix = grid_matrix(blocks, kind)
    assert (matrix.bits, matrix.group_size) == (4, 32)
    np.testing.assert_array_equal(dequantize(matrix), decoded(blocks, kind))


@pytest.mark.parametrize(
    "codes", [[127, -126, 5], [-127, 126, -5], [127], [-127], [-128, 3], [126, -126], [0]], ids=str
)
@pytest.mark.parametrize("scale", [0.37, -0.37, 6e-8, 500.0, 0.0])
def test_eight_bit_blocks_keep_every_value(codes: list[int], scale: float) -> None:
    block = q8_block(codes, scale)
    matrix = grid_matrix(block, "Q8_0")
    assert matrix.q.max() <= 254
    np.testing.assert_array_equal(dequantize(matrix), decoded(block, "Q8_0"))


@pytest.mark.parametrize("scale", [0.37, 0.0123, -1.7])
def test_a_block_with_both_extremes_moves_by_less_than_a_sixteenth_of_a_step(scale: float) -> None:
    block = q8_block([127, -127, 64, -1], scale)
    error = np.abs(dequantize(grid_matrix(block, "Q8_0")) - decoded(block, "Q8_0"))
    assert error.max() <= abs(scale) / 16


@pytest.mark.parametrize(
    ("kind", "scale"), [("Q4_0", np.inf), ("Q4_0", 9000.0), ("Q8_0", 600.0), ("Q8_0", np.nan), ("Q4_1", -np.inf)]
)
def test_scales_beyond_float16_are_refused(kind: str, scale: float) -> None:
    block = np.zeros((1, 1, BLOCK_BYTES[kind]), np.uint8)
    block[0, 0, :2] = np.array([scale], np.float16).view(np.uint8)
    with pytest.raises(WeightError, match="beyond float16"):
        grid_matrix(block, kind)


def test_rows_are_those_of_the_import(sample: Any) -> None:
    """Query and key rows in Hugging Face order, in any panel."""
    names = {"blk.0.attn_q.weight": "Q4_0", "blk.0.attn_k.weight": "Q4_1", "blk.0.ffn_up.weight": "Q8_0"}
    sample.types |= names
    source = GgufSource(sample.write())
    heads = {"blk.0.attn_q.weight": 4, "blk.0.attn_k.weight": 2}
    short = {"blk.0.attn_q.weight": "self_attn.q_proj", "blk.0.attn_k.weight": "self_attn.k_proj"}
    for gguf_name, kind in names.items():
        name = f"model.layers.0.{short.get(gguf_name, 'mlp.up_proj')}.weight"
        expected = decode_tensor(source._file, source._file.tensors[gguf_name], heads.get(gguf_name))
        np.testing.assert_array_equal(source.rows(name, 3, 11), expected[3:11])
        assert source.tensors[name].grid == (GRID_BITS[kind], 32)
        np.testing.assert_allclose(dequantize(source.grid_rows(name, 3, 11)), expected[3:11], atol=1e-2)


def test_other_types_lie_on_no_grid(sample: Any) -> None:
    source = GgufSource(sample.write())
    assert {tensor.grid for tensor in source.tensors.values()} == {None}
    assert source.tensors["model.norm.weight"].entry.dtype == "F32"
    assert len(source.plain("model.norm.weight")) == 4 * 32
