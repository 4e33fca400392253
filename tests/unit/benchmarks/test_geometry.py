import pytest

from benchmarks.edge_harness.geometry import GEOMETRIES, gguf_name
from tests.unit.benchmarks.tiny_models import TINY
from vllm_omni.errors import ConfigError
from vllm_omni.model_executor.models.decoder.spec_mapping import shape_of
from vllm_omni.quantization.artifact import SOURCE_ARCHITECTURE_KEY


def weights(name: str) -> int:
    return sum(shape[0] * shape[1] for shape in GEOMETRIES[name].tensors().values() if len(shape) == 2)


def test_sizes_are_those_of_the_published_models() -> None:
    assert weights("qwen3-0.6b") == 596_049_920 - 28 * 2 * (1024 + 128) - 1024
    # The published count of Spark-X2.5-1.7B holds 28 gates of 8 x 2048 and 57 norms of 2048 besides.
    assert weights("spark-1.7b") == 1_707_657_216 - 28 * 8 * 2048 - 57 * 2048


def test_every_geometry_is_one_that_the_decoder_computes() -> None:
    for geometry in GEOMETRIES.values():
        config = geometry.config()
        shape = shape_of(config | {SOURCE_ARCHITECTURE_KEY: config["architectures"][0]})
        assert (shape.num_layers, shape.head_dim, shape.vocab_size) == (28, geometry.head_dim, geometry.vocab_size)
        assert shape.ties_embeddings


@pytest.mark.parametrize(
    ("hf", "gguf"),
    [
        ("model.embed_tokens.weight", "token_embd.weight"),
        ("lm_head.weight", "output.weight"),
        ("model.layers.12.self_attn.q_norm.weight", "blk.12.attn_q_norm.weight"),
        ("model.layers.0.mlp.down_proj.weight", "blk.0.ffn_down.weight"),
    ],
)
def test_names_have_their_counterpart(hf: str, gguf: str) -> None:
    assert gguf_name(hf) == gguf


def test_all_names_of_a_model_have_one() -> None:
    assert len({gguf_name(name) for name in TINY.tensors()}) == len(TINY.tensors())


@pytest.mark.parametrize("name", ["model.layers.0.mlp.experts.weight", "visual.weight"])
def test_a_name_without_counterpart_is_an_error(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        gguf_name(name)
