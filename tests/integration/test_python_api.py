"""`AsyncOmni` and `Omni` on the real engine, each in a fresh process that runs this file as a program.

The child collects facts, one function after another on one engine, and prints them as JSON; the tests look at them.
"""

import asyncio
import itertools
import json
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.margins import COMPLETION, COUNTING, Margins

pytestmark = pytest.mark.engine

ROOT = Path(__file__).parents[2]
PROMPT = COMPLETION.text
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}
SMALL = {"deploy_profile": "edge", "max_num_seqs": 2, "kv_cache_memory_bytes": "256MiB"}
Facts = dict[str, Any]


def run_child(mode: str, model: Path) -> Facts:
    command = [sys.executable, "-m", "tests.integration.test_python_api", mode, str(model)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert run.returncode == 0, run.stderr[-5000:]
    return dict(json.loads(run.stdout.strip().splitlines()[-1]))


@pytest.fixture(scope="module")
def facts(smollm2_artifact: Path) -> Facts:
    """What a process saw that used `AsyncOmni`."""
    return run_child("async", smollm2_artifact)


@pytest.fixture(scope="module")
def batch_facts(smollm2_artifact: Path) -> Facts:
    """What a process saw that used `Omni`."""
    return run_child("sync", smollm2_artifact)


def test_deltas_add_up_to_the_whole_text(facts: Facts, margins: Margins) -> None:
    assert len(facts["deltas"]) > 2
    assert "".join(facts["deltas"]) == facts["whole"]
    assert facts["whole"].startswith(margins.require(COMPLETION).text)
    assert facts["num_final_outputs"] == 1


def test_cumulative_outputs_grow_to_the_whole_text(facts: Facts) -> None:
    texts = facts["cumulative"]
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))
    assert texts[-1] == facts["whole"]


def test_abort_from_another_task_ends_with_that_reason(facts: Facts) -> None:
    assert facts["abort"] == "abort"
    assert facts["num_requests_after_abort"] == 0


def test_leaving_the_iterator_aborts(facts: Facts) -> None:
    assert facts["idle_after_break"] is True


def test_two_sequences(facts: Facts) -> None:
    assert sorted(facts["n"]) == [0, 1]


def test_logprobs(facts: Facts) -> None:
    assert facts["logprobs"] == [2, 2, 2]


def test_stop_string(facts: Facts, margins: Margins) -> None:
    text, finish_reason, stop_reason = facts["stop"]
    assert text == margins.require(COUNTING).text.partition(" 7")[0]
    assert (finish_reason, stop_reason) == ("stop", " 7")


def test_structured_output(facts: Facts) -> None:
    assert isinstance(json.loads(facts["structured"])["ok"], bool)


def test_two_concurrent_requests_get_their_own_answers(facts: Facts) -> None:
    assert facts["concurrent"] == [facts["whole"], facts["whole"]]
    assert facts["ids"] == ["first", "second"]


def test_token_ids_as_a_prompt(facts: Facts) -> None:
    assert facts["from_token_ids"] == facts["whole"]


@pytest.mark.parametrize(
    "name", ["lora", "too_long", "params_of_another_type", "bad_params", "modalities", "out_of_vocabulary"]
)
def test_a_wrong_request_raises_and_the_next_one_works(facts: Facts, name: str) -> None:
    raised, message, after = facts[name]
    assert raised == "RequestError"
    assert message
    assert after == facts["whole"]


def test_lora_is_refused_with_a_reason(facts: Facts) -> None:
    assert "merge the adapter" in facts["lora"][1]


def test_wrong_keywords_are_found_before_torch_is_imported(facts: Facts) -> None:
    for raised, message, torch_loaded in facts["wrong_keywords"]:
        assert raised in {"ConfigError", "ProfileNotFoundError", "WeightError"}
        assert message
        assert torch_loaded is False


def test_generate_after_shutdown_is_an_error(facts: Facts) -> None:
    assert facts["after_shutdown"][0] == "StageError"


def test_closing_ends_a_reader_in_another_thread(batch_facts: Facts) -> None:
    assert batch_facts["reader_at_close"] == "StageError"


def test_omni_after_close_is_an_error(batch_facts: Facts) -> None:
    assert batch_facts["after_close"] == "StageError"


@pytest.mark.parametrize("name", ["facts", "batch_facts"])
def test_nothing_is_left_after_shutdown(name: str, request: pytest.FixtureRequest) -> None:
    collected = request.getfixturevalue(name)
    assert collected["threads"] == []
    assert collected["children"] == 0


def test_omni_answers_in_the_order_of_prompts(batch_facts: Facts, margins: Margins) -> None:
    assert batch_facts["is_list"] is True
    assert [int(request_id.partition("_")[0]) for request_id in batch_facts["ids"]] == [0, 1, 2]
    assert batch_facts["texts"][0].startswith(margins.require(COMPLETION).text)
    assert batch_facts["texts"][0] == batch_facts["texts"][2]
    assert all(batch_facts["finished"])


def test_omni_takes_a_single_prompt(batch_facts: Facts) -> None:
    assert batch_facts["single"] == [batch_facts["texts"][0]]


def test_omni_yields_as_it_completes(batch_facts: Facts) -> None:
    assert batch_facts["is_generator"] is True
    assert sorted(batch_facts["generated"]) == sorted(batch_facts["texts"][:2])


def test_leaving_the_generator_aborts(batch_facts: Facts) -> None:
    assert batch_facts["after_break"] == batch_facts["texts"][0]


@pytest.mark.parametrize("name", ["bad_type", "too_long"])
def test_a_bad_prompt_in_a_batch_raises_and_the_engine_lives_on(batch_facts: Facts, name: str) -> None:
    raised, message, after = batch_facts[name]
    assert raised == "RequestError"
    assert message
    assert after == batch_facts["texts"][0]


def test_a_bad_type_names_its_position(batch_facts: Facts) -> None:
    assert "prompts[1] is int" in batch_facts["bad_type"][1]


# What runs in the child.


def params(**values: Any) -> Any:
    from vllm.sampling_params import SamplingParams

    return SamplingParams(**{"temperature": 0.0, "max_tokens": 8} | values)


def kind(name: str) -> Any:
    from vllm.sampling_params import RequestOutputKind

    return RequestOutputKind[name]


def leftovers() -> Facts:
    """Threads of this package and child processes that exist now."""
    import psutil

    threads = [thread.name for thread in threading.enumerate() if thread.name.startswith("omni-")]
    return {"threads": threads, "children": len(psutil.Process().children(recursive=True))}


def wrong_keywords(model: str) -> list[tuple[str, str, bool]]:
    from vllm_omni.entrypoints.async_omni import AsyncOmni

    found = []
    for keywords in (
        {"max_nun_seqs": 2},
        {"deploy_profile": "cloud"},
        {"deploy_profile": "edge", "deploy_config": "text.yaml"},
        {"max_num_seqs": "many"},
        {"enable_lora": True},
        {"stage_configs_path": "x.yaml"},
        {"model": model + "-nowhere"},
    ):
        try:
            AsyncOmni(**{"model": model, "deploy_profile": "edge"} | keywords)  # type: ignore[arg-type]
        except Exception as error:
            found.append((type(error).__name__, str(error), "torch" in sys.modules))
        else:
            raise AssertionError(f"{keywords} was accepted")
    return found


async def collect(omni: Any, prompt: Any = PROMPT, sampling_params: Any = None, **options: Any) -> list[Any]:
    sampling_params = sampling_params or params(output_kind=kind("FINAL_ONLY"))
    return [output async for output in omni.generate(prompt, sampling_params, **options)]


async def whole_text(omni: Any) -> str:
    (output,) = await collect(omni)
    return str(output.text)


async def refused(omni: Any, request: Callable[[], Awaitable[Any]]) -> tuple[str, str, str]:
    """Class and message of the request's error, and the answer to the next request."""
    try:
        await request()
    except Exception as error:
        return type(error).__name__, str(error), await whole_text(omni)
    raise AssertionError("the request was accepted")


async def text_facts(omni: Any) -> Facts:
    deltas = await collect(omni, sampling_params=params(output_kind=kind("DELTA")))
    cumulative = await collect(omni, sampling_params=params(output_kind=kind("CUMULATIVE")))
    first, second = await asyncio.gather(collect(omni, request_id="first"), collect(omni, request_id="second"))
    token_ids = omni.get_tokenizer().encode(PROMPT)
    (from_ids,) = await collect(omni, {"prompt_token_ids": token_ids})
    return {
        "whole": await whole_text(omni),
        "deltas": [output.text for output in deltas],
        "num_final_outputs": sum(output.finished for output in deltas),
        "cumulative": [output.text for output in cumulative],
        "concurrent": [first[-1].text, second[-1].text],
        "ids": [first[-1].request_id, second[-1].request_id],
        "from_token_ids": from_ids.text,
    }


async def option_facts(omni: Any) -> Facts:
    final = kind("FINAL_ONLY")
    (two,) = await collect(omni, sampling_params=params(n=2, temperature=1.0, seed=1, output_kind=final))
    (scored,) = await collect(omni, sampling_params=params(logprobs=2, max_tokens=3, output_kind=final))
    (stopped,) = await collect(omni, COUNTING.text, params(stop=[" 7"], max_tokens=24, output_kind=final))
    from vllm.sampling_params import StructuredOutputsParams

    constraint = StructuredOutputsParams(json=SCHEMA)
    (structured,) = await collect(
        omni, "JSON:", params(structured_outputs=constraint, max_tokens=32, output_kind=final)
    )
    choice = stopped.outputs[0]
    return {
        "n": [output.index for output in two.outputs],
        "logprobs": [len(entry) for entry in scored.outputs[0].logprobs],
        "stop": [choice.text, choice.finish_reason, choice.stop_reason],
        "structured": structured.text,
    }


async def abort_facts(omni: Any) -> Facts:
    endless = params(max_tokens=4000, ignore_eos=True, output_kind=kind("DELTA"))
    started = asyncio.Event()

    async def read() -> str:
        reasons = []
        async for output in omni.generate(PROMPT, endless, "to-abort"):
            reasons.append(output.outputs[0].finish_reason)
            started.set()
        return str(reasons[-1])

    reader = asyncio.create_task(read())
    await asyncio.wait_for(started.wait(), 60)
    await omni.abort("to-abort")
    reason = await asyncio.wait_for(reader, 60)
    num_requests = omni.num_requests
    stream = omni.generate(PROMPT, endless)
    await anext(stream)
    await stream.aclose()
    idle = await omni.wait_idle(10)
    return {"abort": reason, "num_requests_after_abort": num_requests, "idle_after_break": idle}


async def error_facts(omni: Any) -> Facts:
    return {
        "lora": await refused(omni, lambda: collect(omni, lora_request=object())),
        "too_long": await refused(omni, lambda: collect(omni, "word " * 9000)),
        "params_of_another_type": await refused(omni, lambda: collect(omni, sampling_params={"temperature": 0})),
        "bad_params": await refused(omni, lambda: collect(omni, sampling_params=params(logprobs=10**6))),
        "modalities": await refused(omni, lambda: collect(omni, output_modalities=["audio"])),
        "out_of_vocabulary": await refused(omni, lambda: collect(omni, {"prompt_token_ids": [10**6]})),
    }


async def async_facts(model: str) -> Facts:
    facts: Facts = {"wrong_keywords": wrong_keywords(model)}
    from vllm_omni.entrypoints.async_omni import AsyncOmni

    omni = AsyncOmni(model=model, **SMALL)  # type: ignore[arg-type]
    for part in (text_facts, option_facts, abort_facts, error_facts):
        facts |= await part(omni)
    omni.shutdown()
    omni.close()
    try:
        await collect(omni)
    except Exception as error:
        facts["after_shutdown"] = (type(error).__name__, str(error))
    return facts | leftovers()


def raised_by(omni: Any, prompts: list[Any]) -> tuple[str, str, str]:
    try:
        omni.generate(prompts, params(), use_tqdm=False)
    except Exception as error:
        return type(error).__name__, str(error), omni.generate(PROMPT, params(), use_tqdm=False)[0].text
    raise AssertionError("the batch was accepted")


def sync_facts(model: str) -> Facts:
    from vllm_omni.entrypoints.omni import Omni

    prompts = [PROMPT, "Once upon a time", PROMPT]
    with Omni(model, **SMALL) as omni:
        outputs = omni.generate(prompts, params())
        assert isinstance(outputs, list)
        generator: Any = omni.generate(prompts[:2], params(), py_generator=True)
        generated = [output.text for output in generator]
        endless = params(max_tokens=4000, ignore_eos=True, output_kind=kind("DELTA"))
        left: Any = omni.generate(prompts, endless, py_generator=True)
        next(left)
        left.close()
        single: Any = omni.generate(PROMPT, params(), use_tqdm=False)
        facts = {
            "is_list": True,
            "ids": [output.request_id for output in outputs],
            "texts": [output.text for output in outputs],
            "finished": [output.finished for output in outputs],
            "is_generator": iter(generator) is generator,
            "generated": generated,
            "single": [output.text for output in single],
            "after_break": single[0].text,
            "bad_type": raised_by(omni, [PROMPT, 3]),
            "too_long": raised_by(omni, [PROMPT, "word " * 9000]),
        }
        reader = ReaderThread(omni, endless)
        reader.started.wait(60)
    omni.close()
    reader.join(30)
    facts["reader_at_close"] = reader.raised
    try:
        omni.generate(PROMPT, params(), use_tqdm=False)
    except Exception as error:
        facts["after_close"] = type(error).__name__
    return facts | leftovers()


class ReaderThread(threading.Thread):
    """Reads an endless answer until something ends it."""

    def __init__(self, omni: Any, endless: Any):
        super().__init__(daemon=True)
        self.outputs = omni.generate(PROMPT, endless, py_generator=True)
        self.started = threading.Event()
        self.raised = "still running"
        self.start()

    def run(self) -> None:
        try:
            for _ in self.outputs:
                self.started.set()
        except Exception as error:
            self.raised = type(error).__name__


if __name__ == "__main__":
    mode, model_path = sys.argv[1:]
    collected = asyncio.run(async_facts(model_path)) if mode == "async" else sync_facts(model_path)
    print(json.dumps(collected))
