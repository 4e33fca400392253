"""An artifact in the real engine: what vLLM does around the model keeps working.

Each child process runs this file as a script, collects facts on one engine and prints them as JSON.
"""

import asyncio
import json
import logging
import subprocess
import sys
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import pytest

from vllm_omni.native.library import native_status

pytestmark = pytest.mark.engine

PROMPT = "The capital of France is"
COUNTING = "one two three four five six seven eight nine ten " * 4
TEXT = (
    "The lighthouse keeper climbed the narrow stairs every evening at dusk, carrying a lantern and a small book. From "
    "the gallery he could see the fishing boats returning to the harbour, their sails catching the last light of the "
    "sun. He wrote down the weather, the direction of the wind, and the names of the ships that passed. "
)
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}
# Prompts longer than a step, so that they are split; few blocks, so that sequences are preempted.
SMALL = {"deploy_profile": "edge", "max_num_seqs": 4, "max_num_batched_tokens": 256, "kv_cache_memory_bytes": "128MiB"}
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
PATTERN_LENGTHS = (1, 300, 700, 120)
Facts = dict[str, Any]


def run_child(mode: str, model: Path) -> Facts:
    command = [sys.executable, __file__, mode, str(model)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert run.returncode == 0, run.stderr[-5000:]
    return dict(json.loads(run.stdout.strip().splitlines()[-1])) | {"log": run.stderr}


@pytest.fixture(scope="module")
def native(smollm2_artifact: Path) -> Facts:
    """What a process saw that ran the native core."""
    if native_status().isa is None:
        pytest.skip(f"no native core: {native_status().reason}")
    return run_child("features", smollm2_artifact)


@pytest.fixture(scope="module")
def plain(smollm2_artifact: Path) -> Facts:
    """What a process saw in which there is no native library."""
    return run_child("torch", smollm2_artifact)


def test_the_model_answers(native: Facts) -> None:
    assert "Paris" in native["whole"]


def test_the_paths_are_told(native: Facts, plain: Facts) -> None:
    assert native["described"]["forward_path"] == "native"
    assert native["described"]["weight_path"] == "native-w4a8"
    assert native["described"]["native_isa"] == native_status().isa
    assert plain["described"]["forward_path"] == "torch"
    assert plain["described"]["weight_path"] == "torch-unpacked"
    assert native["described"]["quantization"] == plain["described"]["quantization"] == "omni_int4"


def test_a_missing_library_is_said_once_at_warning(native: Facts, plain: Facts) -> None:
    def warnings(facts: Facts) -> list[str]:
        return [line for line in facts["log"].splitlines() if line.startswith("WARNING event=forward_path_chosen")]

    assert len(warnings(plain)) == 1
    assert warnings(native) == []


def test_both_paths_generate_the_same_tokens(native: Facts, plain: Facts) -> None:
    assert native["together"] == plain["together"]


def test_sequences_do_not_depend_on_their_neighbours(native: Facts) -> None:
    """Alone, then four at a time, then alone again: 1 -> 4 -> 1."""
    assert native["alone"] == native["together"] == native["again"]


def test_vllms_way_of_a_decode_step_gives_the_tokens_of_the_short_way(native: Facts) -> None:
    assert native["short_steps"] >= 3 * 7
    assert native["long_steps"] == 0
    assert native["vllms_way"] == native["alone"]


def test_a_prefix_is_reused_and_changes_nothing(native: Facts) -> None:
    assert native["cached_tokens"] >= 64
    assert native["with_cache"] == native["without_cache"]


@pytest.mark.usefixtures("native")
def test_preempted_sequences_end_as_they_would_alone(smollm2_artifact: Path) -> None:
    facts = run_child("crowd", smollm2_artifact)
    assert facts["preemptions"] > 0
    assert facts["crowded"] == facts["uncrowded"]


def test_two_sequences_of_one_request(native: Facts) -> None:
    assert sorted(native["n"]) == [0, 1]


def test_logprobs(native: Facts) -> None:
    assert native["logprobs"] == [2, 2, 2]
    assert native["prompt_logprobs"] > 3


def test_structured_output(native: Facts) -> None:
    assert isinstance(json.loads(native["structured"])["ok"], bool)


def test_ngram_drafts_change_nothing_but_the_number_of_steps(smollm2_artifact: Path, native: Facts) -> None:
    drafted = run_child("ngram", smollm2_artifact)
    assert drafted["text"] == native["counted"]
    assert drafted["accepted"] > 0


def test_an_8_bit_cache(smollm2_artifact: Path, native: Facts) -> None:
    facts = run_child("int8", smollm2_artifact)
    assert "Paris" in facts["whole"]
    # 2 x 64 numbers and two scales instead of 2 x 64 numbers of two bytes.
    assert facts["num_blocks"] == pytest.approx(native["num_blocks"] * 256 / 136, rel=0.01)


# What the child runs.


def params(**values: Any) -> Any:
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    return SamplingParams(
        **{"temperature": 0.0, "max_tokens": 12, "output_kind": RequestOutputKind.FINAL_ONLY} | values
    )


async def answer(omni: Any, prompt: Any = PROMPT, **values: Any) -> Any:
    (output,) = [output async for output in omni.generate(prompt, params(**values))]
    return output


def make_omni(model: str, **options: Any) -> Any:
    from vllm_omni.entrypoints.async_omni import AsyncOmni

    return AsyncOmni(model=model, **(SMALL | options))


def prompt_of(length: int, omni: Any) -> dict[str, list[int]]:
    """The first tokens of a text that repeats itself, so that its continuation is clear."""
    from transformers import AutoTokenizer

    token_ids = AutoTokenizer.from_pretrained(omni.model)(TEXT * 12)["input_ids"]
    return {"prompt_token_ids": token_ids[:length]}


async def tokens_after(omni: Any, length: int) -> list[int]:
    output = await answer(omni, prompt_of(length, omni), max_tokens=8, ignore_eos=True, skip_reading_prefix_cache=True)
    return list(output.outputs[0].token_ids)


async def together_facts(omni: Any) -> Facts:
    together = await asyncio.gather(*(tokens_after(omni, length) for length in PATTERN_LENGTHS))
    return {"together": together, "described": omni.describe()}


async def alone_facts(omni: Any) -> Facts:
    return {"alone": [await tokens_after(omni, length) for length in PATTERN_LENGTHS]}


async def again_facts(omni: Any) -> Facts:
    return {"again": [await tokens_after(omni, length) for length in PATTERN_LENGTHS]}


async def way_facts(omni: Any) -> Facts:
    """The same prompts by the short way of decode steps and without it, and how many steps took it each time."""
    from vllm_omni.worker.decode_step import DecodeInputs

    steps = 0
    fill = DecodeInputs.fill

    def counting(inputs: DecodeInputs, batch: Any) -> Any:
        nonlocal steps
        steps += 1
        return fill(inputs, batch)

    DecodeInputs.fill = counting  # type: ignore[method-assign]
    await alone_facts(omni)
    short_steps, steps = steps, 0
    runner = omni._llm.engine_core._thread._core.model_executor.driver_worker.worker.model_runner
    inputs, runner.decode_inputs = runner.decode_inputs, None
    vllms_way = (await alone_facts(omni))["alone"]
    runner.decode_inputs, DecodeInputs.fill = inputs, fill  # type: ignore[method-assign]
    return {"short_steps": short_steps, "long_steps": steps, "vllms_way": vllms_way}


async def text_facts(omni: Any) -> Facts:
    from vllm.sampling_params import StructuredOutputsParams

    two = await answer(omni, n=2, temperature=1.0, seed=1)
    scored = await answer(omni, logprobs=2, max_tokens=3, prompt_logprobs=1)
    constraint = StructuredOutputsParams(json=SCHEMA)
    structured = await answer(omni, "JSON:", structured_outputs=constraint, max_tokens=32)
    return {
        "whole": (await answer(omni)).text,
        "counted": (await answer(omni, COUNTING, max_tokens=32)).text,
        "n": [output.index for output in two.outputs],
        "logprobs": [len(entry) for entry in scored.outputs[0].logprobs],
        "prompt_logprobs": len(scored.prompt_logprobs),
        "structured": structured.text,
    }


async def cache_facts(omni: Any) -> Facts:
    prompt = prompt_of(100, omni)
    first = await answer(omni, prompt, ignore_eos=True)
    second = await answer(omni, prompt, ignore_eos=True)
    return {
        "without_cache": list(first.outputs[0].token_ids),
        "with_cache": list(second.outputs[0].token_ids),
        "cached_tokens": second.num_cached_tokens,
        "num_blocks": omni.vllm_config.cache_config.num_gpu_blocks,
    }


async def crowd_facts(omni: Any) -> Facts:
    """Three sequences that fit when they start, and need more blocks than there are before they end."""

    async def one(number: int) -> list[int]:
        prompt = {"prompt_token_ids": prompt_of(300 + 8 * number, omni)["prompt_token_ids"][8 * number :]}
        output = await answer(omni, prompt, max_tokens=56, ignore_eos=True, skip_reading_prefix_cache=True)
        return list(output.outputs[0].token_ids)

    uncrowded = [await one(number) for number in range(3)]
    before = counter("vllm:num_preemptions_total")
    crowded = list(await asyncio.gather(*map(one, range(3))))
    return {"uncrowded": uncrowded, "crowded": crowded, "preemptions": counter("vllm:num_preemptions_total") - before}


def counter(name: str) -> float:
    from prometheus_client import REGISTRY

    return sum(sample.value for metric in REGISTRY.collect() for sample in metric.samples if sample.name == name)


async def features(model: str) -> Facts:
    return await collect(
        make_omni(model), (alone_facts, together_facts, again_facts, way_facts, text_facts, cache_facts)
    )


async def crowd(model: str) -> Facts:
    return await collect(make_omni(model, kv_cache_memory_bytes="24MiB", log_stats=True), (crowd_facts,))


async def torch_only(model: str) -> Facts:
    from vllm_omni.native import library

    library.DEFAULT_PATH = Path("/nonexistent") / library.LIBRARY_NAME
    return await collect(make_omni(model, num_threads=1), (together_facts,))


async def ngram(model: str) -> Facts:
    omni = make_omni(model, speculative_config=NGRAM, log_stats=True)

    async def facts_of(omni: Any) -> Facts:
        text = (await answer(omni, COUNTING, max_tokens=32)).text
        return {"text": text, "accepted": counter("vllm:spec_decode_num_accepted_tokens_total")}

    return await collect(omni, (facts_of,))


async def int8(model: str) -> Facts:
    async def facts_of(omni: Any) -> Facts:
        return {"whole": (await answer(omni)).text, "num_blocks": omni.vllm_config.cache_config.num_gpu_blocks}

    return await collect(make_omni(model, kv_cache_dtype="int8"), (facts_of,))


async def collect(omni: Any, parts: Sequence[Callable[[Any], Coroutine[Any, Any, Facts]]]) -> Facts:
    facts: Facts = {}
    try:
        for part in parts:
            facts |= await part(omni)
    finally:
        omni.shutdown()
    return facts


MODES = {"features": features, "torch": torch_only, "ngram": ngram, "int8": int8, "crowd": crowd}

if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    mode, model_path = sys.argv[1:]
    print(json.dumps(asyncio.run(MODES[mode](model_path))))
