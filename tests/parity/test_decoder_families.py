"""Each family through the decoder stack against `transformers`, on tiny random models.

The reference computes in float32 with the weights that the artifact's codes stand for. What differs are activations of
8 bits, a cache of 8 or 16 bits, and the order of sums.
"""

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from tests.parity.decoder_harness import (
    Sequences,
    dequantized_twin,
    make_artifact,
    make_checkpoint,
    open_path,
    runnable_paths,
)
from vllm_omni.model_executor.models.decoder.step import DecoderPath
from vllm_omni.quantization.artifact import Artifact

SIZES: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 96,
    "intermediate_size": 144,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 256}
WINDOW = {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}
CONFIGS: dict[str, PretrainedConfig] = {
    "llama_tied": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "llama_bias": LlamaConfig(**SIZES, attention_bias=True),
    "llama_gelu_llama3_rope": LlamaConfig(**SIZES, hidden_act="gelu", rope_parameters=LLAMA3),
    "mistral_window": MistralConfig(**SIZES, sliding_window=24),
    "mistral_head_dim": MistralConfig(**SIZES, sliding_window=None, head_dim=32),
    "qwen2_bias": Qwen2Config(**SIZES, rope_parameters=YARN),
    "qwen2_half_windowed": Qwen2Config(**SIZES, **WINDOW),
    "qwen3_qk_norm": Qwen3Config(**SIZES, head_dim=32, tie_word_embeddings=True),
}
# Differences of the logits as shares of their standard deviation: what rounding activations to 8 bits and the cache
# makes of it in two layers. Measured: root mean square up to 0.014, largest up to 0.07.
RMS_TOLERANCE = 0.02
MAX_TOLERANCE = 0.1
# A lead above this, as a share of the same, cannot be lost by the largest difference on both sides.
CLEAR_LEAD = 2 * MAX_TOLERANCE
PATHS = runnable_paths()


@pytest.fixture(scope="module", params=list(CONFIGS))
def family(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Artifact, PreTrainedModel]:
    """A family's artifact and the reference for it."""
    directory: Path = tmp_path_factory.mktemp(request.param)
    checkpoint = make_checkpoint(CONFIGS[request.param], directory / "checkpoint")
    artifact = make_artifact(checkpoint, directory / "artifact")
    return artifact, dequantized_twin(checkpoint, artifact)


@pytest.fixture(params=PATHS)
def sequences(
    request: pytest.FixtureRequest, family: tuple[Artifact, PreTrainedModel]
) -> Iterator[Callable[..., Sequences]]:
    """Makes sequences on one path over the family's artifact."""
    artifact, _ = family
    made: list[DecoderPath] = []

    def make(**options: Any) -> Sequences:
        path, shape = open_path(request.param, artifact)
        made.append(path)
        return Sequences(path, shape, dict(artifact.config), **options)

    yield make
    for path in made:
        path.close()


def tokens(count: int, seed: int) -> list[int]:
    return torch.randint(0, SIZES["vocab_size"], (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@torch.inference_mode()
def reference_logits(model: PreTrainedModel, token_ids: list[int]) -> torch.Tensor:
    return model(torch.tensor([token_ids])).logits[0]


def assert_close(logits: torch.Tensor, reference: torch.Tensor) -> None:
    """Within the tolerances, and the same first choice in every row in which it leads clearly, which are most."""
    difference, scale = (logits - reference).abs(), reference.std()
    assert difference.max() < MAX_TOLERANCE * scale
    assert difference.square().mean().sqrt() < RMS_TOLERANCE * scale
    first, second = reference.topk(2, dim=1).values.T
    is_clear = first - second > CLEAR_LEAD * scale
    assert is_clear.float().mean() > 0.8
    assert torch.equal(logits.argmax(dim=1)[is_clear], reference.argmax(dim=1)[is_clear])


@pytest.mark.parametrize("kind", ["bfloat16", "int8"])
def test_logits_of_a_prompt(
    family: tuple[Artifact, PreTrainedModel], sequences: Callable[..., Sequences], kind: str
) -> None:
    prompt = tokens(70, 1)
    logits = sequences(kind=kind).step({0: prompt})
    assert_close(logits, reference_logits(family[1], prompt))


def test_a_prompt_in_chunks_and_single_tokens(
    family: tuple[Artifact, PreTrainedModel], sequences: Callable[..., Sequences]
) -> None:
    prompt, running = tokens(70, 2), sequences()
    ends = [0, 33, 34, 50, *range(51, 71)]
    parts = [running.step({0: prompt[begin:end]}) for begin, end in itertools.pairwise(ends)]
    assert_close(torch.cat(parts), reference_logits(family[1], prompt))


def test_rows_of_several_sequences_do_not_mix(
    family: tuple[Artifact, PreTrainedModel], sequences: Callable[..., Sequences]
) -> None:
    """A long and a short prompt, a decode step beside a prefill, and several rows of one sequence at its end."""
    running, first, second = sequences(num_seqs=2), tokens(50, 3), tokens(45, 4)
    parts = [
        running.step({0: first[:40]}),
        running.step({0: first[40:41], 1: second[:30]}),
        running.step({0: first[41:45], 1: second[30:33]}),
        running.step({0: first[45:], 1: second[33:]}),
    ]
    rows_of_first = torch.cat([parts[0], parts[1][:1], parts[2][:4], parts[3][:5]])
    rows_of_second = torch.cat([parts[1][1:], parts[2][4:], parts[3][5:]])
    assert_close(rows_of_first, reference_logits(family[1], first))
    assert_close(rows_of_second, reference_logits(family[1], second))


@pytest.mark.parametrize("kind", PATHS)
@pytest.mark.parametrize("name", CONFIGS)
def test_four_bits_are_off_by_what_quantizing_takes(tmp_path: Path, name: str, kind: str) -> None:
    """Computing with the packed weights adds little to the difference that the weights themselves make."""
    checkpoint = make_checkpoint(CONFIGS[name], tmp_path / "checkpoint")
    artifact = make_artifact(checkpoint, tmp_path / "artifact", bits=4, group_size=64)
    original = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    path, shape = open_path(kind, artifact)
    prompt = tokens(70, 5)
    try:
        logits = Sequences(path, shape, dict(artifact.config)).step({0: prompt})
    finally:
        path.close()
    exact, twin = reference_logits(original, prompt), reference_logits(dequantized_twin(checkpoint, artifact), prompt)
    own_error = (twin - exact).square().mean().sqrt()
    assert (logits - exact).square().mean().sqrt() < 1.05 * own_error
    assert (logits - twin).square().mean().sqrt() < own_error / 3
