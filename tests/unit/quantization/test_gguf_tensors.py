from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vllm_omni.errors import WeightError
from vllm_omni.quantization import gguf_tensors
from vllm_omni.quantization.gguf_file import open_gguf
from vllm_omni.quantization.gguf_tensors import decode_tensor, encoded_pieces, hf_name, paired_row_order


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("token_embd.weight", "model.embed_tokens.weight"),
        ("output.weight", "lm_head.weight"),
        ("blk.12.attn_k.bias", "model.layers.12.self_attn.k_proj.bias"),
        ("blk.0.attn_q_norm.weight", "model.layers.0.self_attn.q_norm.weight"),
        ("blk.0.ffn_gate_exps.weight", "blk.0.ffn_gate_exps.weight"),
        ("something.else", "something.else"),
    ],
)
def test_hf_name(name: str, expected: str) -> None:
    assert hf_name(name) == expected


def test_paired_rows_become_halves() -> None:
    assert paired_row_order(12, 2).tolist() == [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("elements_per_piece", [1, 33, 1 << 20])
def test_pieces_join_to_the_tensor(
    sample: Any, monkeypatch: pytest.MonkeyPatch, kind: str, elements_per_piece: int
) -> None:
    monkeypatch.setattr(gguf_tensors, "ELEMENTS_PER_PIECE", elements_per_piece)
    name = "blk.0.ffn_up.weight"
    # Small whole numbers are exact in every type.
    sample.tensors[name] = np.round(sample.tensors[name] * 8)
    sample.types[name] = kind
    source = open_gguf(sample.write())
    joined = b"".join(encoded_pieces(source, source.tensors[name], "float32"))
    np.testing.assert_array_equal(np.frombuffer(joined, np.float32).reshape(64, 32), sample.tensors[name])
    half = b"".join(encoded_pieces(source, source.tensors[name], "float16"))
    np.testing.assert_array_equal(np.frombuffer(half, np.float16).reshape(64, 32), sample.tensors[name])


def test_bfloat16_rounds_to_nearest_even(sample: Any) -> None:
    values = np.array([1.0, 1.00390625, 1.01171875, -3.0e38], np.float32)
    sample.tensors["v"] = values
    source = open_gguf(sample.write())
    bits = np.frombuffer(b"".join(encoded_pieces(source, source.tensors["v"], "bfloat16")), np.uint16)
    assert [hex(value) for value in bits] == ["0x3f80", "0x3f80", "0x3f82", "0xff62"]


def test_a_vector_of_blocks_and_a_permuted_bias(sample: Any) -> None:
    # 127 steps of 1/64, which is what the block's scale comes to.
    sample.tensors |= {"q": np.full(64, 127 / 64, np.float32), "bias": np.arange(8, dtype=np.float32)}
    sample.types["q"] = "Q8_0"
    source = open_gguf(sample.write())
    np.testing.assert_array_equal(decode_tensor(source, source.tensors["q"]), np.full(64, 127 / 64))
    assert decode_tensor(source, source.tensors["bias"], num_heads=2).tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_values_that_are_not_finite_are_refused(sample: Any, value: float) -> None:
    sample.tensors["output_norm.weight"][3] = value
    source = open_gguf(sample.write())
    with pytest.raises(WeightError, match=r"output_norm\.weight holds values that are not finite"):
        list(encoded_pieces(source, source.tensors["output_norm.weight"], "float32"))


def test_values_beyond_the_output_type_are_refused(sample: Any, tmp_path: Path) -> None:
    sample.tensors["output_norm.weight"][3] = -70000.0
    source = open_gguf(sample.write())
    tensor = source.tensors["output_norm.weight"]
    with pytest.raises(WeightError, match=r"holds magnitude 70000, float16 ends at 65504; pass --dtype bfloat16"):
        list(encoded_pieces(source, tensor, "float16"))
    assert len(b"".join(encoded_pieces(source, tensor, "bfloat16"))) == 64
