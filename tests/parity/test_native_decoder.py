"""Whole decoder steps on tiny random models: every arm against the reference, over several steps on one cache."""

from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pytest

from tests.native.arms import Arm
from tests.native.cases import (
    UNWRITTEN,
    Cache,
    CacheShape,
    Family,
    Sequences,
    Weights,
    empty_cache,
    random_rows,
    unpacked_weights,
    written_bytes,
)
from vllm_omni.native.reference import stored_kv_ref
from vllm_omni.native.reference_decoder import decoder_ref
from vllm_omni.native.spec import DecoderSpec, StepRows

BLOCK_SIZE = 16


def spec_of(**changes: object) -> DecoderSpec:
    numbers: dict[str, object] = {
        "hidden_size": 64, "intermediate_size": 160, "num_heads": 4, "num_kv_heads": 2, "head_dim": 32,
        "max_position": 700, "norm_eps": 1e-5, "attention_scale": 32**-0.5,
    }  # fmt: skip
    return DecoderSpec(**{**numbers, **changes})  # type: ignore[arg-type]


FAMILIES = {
    "llama": Family(spec_of(), rotary_dim=32),
    "qwen2": Family(spec_of(num_heads=3, num_kv_heads=1), rotary_dim=32, has_qkv_bias=True, formats=((4, 64),)),
    "qwen3": Family(
        spec_of(num_heads=8, head_dim=16, attention_scale=0.25), rotary_dim=16, has_qk_norm=True, formats=((4, 128),)
    ),
    "windows": Family(spec_of(num_kv_groups=2), rotary_dim=32, windows=(5, 0, 20), kv_groups=(1, 0, 1)),
    "gated": Family(spec_of(activation="gelu", rope_style="pairs"), rotary_dim=8, has_head_gate=True, vocabulary=None),
    "everything": Family(
        spec_of(
            hidden_size=96, intermediate_size=200, num_heads=6, num_kv_heads=2, head_dim=40, attention_scale=0.1,
            activation="gelu", rope_style="pairs", num_kv_groups=2, norm_eps=1e-3,
        ),
        rotary_dim=20, windows=(0, 7), kv_groups=(0, 1), has_qk_norm=True, has_qkv_bias=True, has_o_bias=True,
        has_head_gate=True, formats=((4, 32), (4, 64), (8, 64), (8, 128)),
    ),
    "8-bit": Family(spec_of(), rotary_dim=32, formats=((8, 32),)),
    "odd": Family(
        spec_of(hidden_size=72, intermediate_size=100, num_heads=3, num_kv_heads=3, head_dim=8, attention_scale=0.35),
        rotary_dim=4, formats=((4, 32), (8, 64)),
    ),
}  # fmt: skip
# Rows that sequences grow by in each step: prompts, one token each, several rows of one sequence to verify, one row.
STEPS = ({0: 5, 1: 1, 2: 17}, {0: 1, 1: 1, 2: 1}, {2: 4, 0: 1}, {1: 1}, {0: 9, 1: 7, 2: 17})


@dataclass(frozen=True)
class Scenario:
    """Steps of a model, and what the reference makes of them."""

    spec: DecoderSpec
    weights: Weights
    empty: tuple[Cache, ...]
    steps: tuple[StepRows, ...]
    expected: tuple[np.ndarray, ...]
    caches: tuple[Cache, ...]


@cache
def scenario(
    family: Family, kind: str, growth: tuple[tuple[tuple[int, int], ...], ...], max_tokens: int = 64
) -> Scenario:
    spec, weights = family.spec, family.weights()
    rng = np.random.default_rng(1)
    num_seqs = 1 + max(seq for step in growth for seq, _ in step)
    sequences = Sequences(num_seqs, BLOCK_SIZE, max_tokens, spec.num_kv_groups)
    steps = tuple(sequences.step(dict(step), **inputs_of(rng, family, dict(step))) for step in growth)
    shape = CacheShape(sequences.num_blocks, spec.num_kv_heads, BLOCK_SIZE, spec.head_dim, kind)
    empty = tuple(empty_cache(shape) for _ in weights.layers)
    caches = tuple(layer.copy() for layer in empty)
    expected = tuple(decoder_ref(spec, unpacked_weights(weights), caches, rows) for rows in steps)
    return Scenario(spec, weights, empty, steps, expected, caches)


def inputs_of(rng: np.random.Generator, family: Family, growth: dict[int, int]) -> dict[str, np.ndarray]:
    count = sum(growth.values())
    if family.vocabulary is None:
        return {"inputs": random_rows(rng, count, family.spec.hidden_size)}
    return {"token_ids": rng.integers(0, family.vocabulary, count).astype(np.int32)}


def frozen(growth: tuple[dict[int, int], ...]) -> tuple[tuple[tuple[int, int], ...], ...]:
    return tuple(tuple(step.items()) for step in growth)


def assert_same_steps(arm: Arm, case: Scenario, min_exact_ratio: float) -> None:
    caches = [layer.copy() for layer in case.empty]
    results = arm.decoder_steps(case.spec, case.weights, caches, case.steps)
    assert [len(result) for result in results] == [rows.num_rows for rows in case.steps]
    assert_close(np.concatenate(results), np.concatenate(case.expected), min_exact_ratio)
    for layer, actual, expected in zip(case.weights.layers, caches, case.caches, strict=True):
        slots = np.concatenate([rows.slots[layer.kv_group] for rows in case.steps])
        assert (actual.memory[~written_bytes(actual, slots)] == UNWRITTEN).all()
        for pair in zip(stored_kv_ref(actual, slots), stored_kv_ref(expected, slots), strict=True):
            assert_close(*(numbers.reshape(-1, actual.head_dim) for numbers in pair), 0)


def assert_close(actual: np.ndarray, expected: np.ndarray, min_exact_ratio: float) -> None:
    """Rows of unit size: float32 exact up to the order of sums, but for a few.

    Orders of summation change float32 by 1e-6. Where that takes an activation, a key or a value across the border
    between two of its quantized values, a row and what attends to it change by about 1e-2. One layer does that to about
    one row in a hundred, two layers and long contexts to many.
    """
    assert np.isfinite(actual).all()
    difference = np.abs(actual - expected)
    assert difference.max() < 0.15
    assert np.sqrt(np.mean(difference**2)) < 0.02
    assert np.mean(difference.max(axis=1) < 1e-5) >= min_exact_ratio


def last_layer(name: str) -> Family:
    family = FAMILIES[name]
    return replace(family, windows=family.windows[-1:], kv_groups=family.kv_groups[-1:])


@pytest.mark.parametrize("kind", ["bfloat16", "int8"])
@pytest.mark.parametrize("name", FAMILIES)
def test_one_layer_is_exact(arm: Arm, name: str, kind: str) -> None:
    growth = tuple(dict.fromkeys(range(33), count) for count in (1, 3, 1))
    assert_same_steps(arm, scenario(last_layer(name), kind, frozen(growth)), 0.8)


@pytest.mark.parametrize("kind", ["bfloat16", "int8"])
@pytest.mark.parametrize("name", FAMILIES)
def test_steps_of_several_sequences(arm: Arm, name: str, kind: str) -> None:
    assert_same_steps(arm, scenario(FAMILIES[name], kind, frozen(STEPS)), 0.25)


@pytest.mark.parametrize("name", ["llama", "everything"])
@pytest.mark.parametrize("num_rows", [2, 3, 4, 5, 8, 31, 32])
def test_as_many_sequences_as_rows(arm: Arm, num_rows: int, name: str) -> None:
    growth = (dict.fromkeys(range(num_rows), 1),) * 2
    assert_same_steps(arm, scenario(FAMILIES[name], "bfloat16", frozen(growth)), 0.5)


@pytest.mark.parametrize("name", ["llama", "windows"])
def test_a_prompt_that_takes_more_than_one_pass(arm: Arm, name: str) -> None:
    growth = ({0: 600, 1: 3}, {0: 1, 1: 1})
    assert_same_steps(arm, scenario(last_layer(name), "bfloat16", frozen(growth), max_tokens=640), 0.5)


def test_rows_without_a_slot_are_not_stored(arm: Arm) -> None:
    """Padding rows of a batch: their results are not looked at, and the cache does not change."""
    case = scenario(FAMILIES["llama"], "bfloat16", frozen(({0: 3},)))
    rows = case.steps[0]
    slots = rows.slots[0].copy()
    slots[1] = -1
    caches = [layer.copy() for layer in case.empty]
    for layer in caches:
        layer.memory[:] = 0
    arm.decoder_steps(case.spec, case.weights, caches, [replace(rows, slots=(slots,))])
    block, offset = divmod(int(rows.slots[0][1]), BLOCK_SIZE)
    assert all((layer.values[block, :, offset] == 0).all() for layer in caches)
    assert all((layer.keys[block, :, 0, :, offset] == 0).all() for layer in caches)
    assert all((layer.values[block, :, offset + 1] != 0).any() for layer in caches)
