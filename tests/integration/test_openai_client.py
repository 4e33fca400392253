"""The ordinary OpenAI Python client, unchanged, against the server."""

import json
from typing import Any

import jsonschema
import openai
import pytest

from tests.margins import COMPLETION, COUNTING, QUESTION, ClearPrompt, Margins
from tests.server import RunningServer

pytestmark = pytest.mark.engine

MODEL = RunningServer.model
MESSAGES: list[Any] = [{"role": "user", "content": QUESTION.text}]
# Longer than a step, so that it is computed in chunks.
SUNRISES = ClearPrompt(
    "".join(f"{number}: the sun rises in the east. " for number in range(330)) + "The sun rises in the", " east", 1
)
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"capital": {"enum": ["Paris", "Rome"]}, "large": {"type": "boolean"}},
    "required": ["capital", "large"],
    "additionalProperties": False,
}
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
NAMED: Any = {"type": "function", "function": {"name": "weather"}}
JSON_SCHEMA: Any = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}}


def chat(client: openai.OpenAI, **fields: Any) -> Any:
    defaults: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "max_tokens": 16, "temperature": 0}
    return client.chat.completions.create(**defaults | fields)


def complete(client: openai.OpenAI, **fields: Any) -> Any:
    defaults: dict[str, Any] = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}
    return client.completions.create(**defaults | fields)


def text_of(chunks: list[Any]) -> str:
    """The concatenated content of a chat stream."""
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


def test_chat(client: openai.OpenAI, margins: Margins) -> None:
    answer = chat(client)
    assert answer.choices[0].message.content == margins.require(QUESTION).text
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.model == MODEL
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert 0 < answer.usage.completion_tokens <= 16


def test_streamed_chat_is_the_same_text_with_usage_last(client: openai.OpenAI, margins: Margins) -> None:
    whole = chat(client)
    assert whole.choices[0].message.content == margins.require(QUESTION).text
    chunks = list(chat(client, stream=True, stream_options={"include_usage": True}))
    assert text_of(chunks) == whole.choices[0].message.content
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert len(chunks) > 4


def test_a_system_message_and_earlier_turns(client: openai.OpenAI) -> None:
    messages = [
        {"role": "system", "content": "Answer briefly."},
        *MESSAGES,
        {"role": "assistant", "content": "Seoul."},
        {"role": "user", "content": [{"type": "text", "text": "And of Italy?"}]},
    ]
    answer = chat(client, messages=messages)
    assert answer.choices[0].message.content
    shorter = chat(client, messages=messages[:2], max_tokens=1)
    assert answer.usage.prompt_tokens > shorter.usage.prompt_tokens + 10


@pytest.mark.parametrize("tool_choice", ["required", NAMED], ids=["required", "named"])
def test_forced_tool_calls_follow_the_schema(client: openai.OpenAI, tool_choice: Any) -> None:
    answer = chat(client, tools=[TOOL], tool_choice=tool_choice, parallel_tool_calls=False, max_tokens=64)
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name == "weather"
    assert call.id
    jsonschema.validate(json.loads(call.function.arguments), TOOL["function"]["parameters"])


def test_a_streamed_tool_call_has_the_same_arguments(client: openai.OpenAI) -> None:
    fields = {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 64}
    chunks = [chunk for chunk in chat(client, stream=True, **fields) if chunk.choices]
    calls = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
    assert [call.function.name for call in calls if call.function.name] == ["weather"]
    arguments = "".join(call.function.arguments or "" for call in calls)
    jsonschema.validate(json.loads(arguments), TOOL["function"]["parameters"])


def test_a_tool_result_is_a_turn_of_the_conversation(client: openai.OpenAI) -> None:
    call = {"id": "call-1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
    messages = [
        {"role": "user", "content": "What is the weather in Paris?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call-1", "content": "sunny, 21 degrees"},
    ]
    answer = chat(client, messages=messages, tools=[TOOL], tool_choice="none")
    assert answer.choices[0].message.content
    assert not answer.choices[0].message.tool_calls


@pytest.mark.parametrize("fields", [{"tool_choice": "auto"}, {}], ids=["auto", "left out"])
def test_the_model_may_choose_not_to_call(client: openai.OpenAI, fields: dict[str, Any]) -> None:
    answer = chat(client, tools=[TOOL], **fields)
    assert answer.choices[0].message.content or answer.choices[0].message.tool_calls


def test_json_schema_output(client: openai.OpenAI) -> None:
    answer = chat(client, response_format=JSON_SCHEMA, max_tokens=48)
    assert answer.choices[0].finish_reason == "stop"
    jsonschema.validate(json.loads(answer.choices[0].message.content), SCHEMA)


def test_streamed_json_schema_output(client: openai.OpenAI) -> None:
    chunks = list(chat(client, response_format=JSON_SCHEMA, max_tokens=48, stream=True))
    jsonschema.validate(json.loads(text_of(chunks)), SCHEMA)


def test_json_object_output(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": 'Reply with exactly {"a": 1}'}]
    answer = chat(client, messages=messages, response_format={"type": "json_object"}, max_tokens=32, stop=["}"])
    text = answer.choices[0].message.content.strip()
    assert text.startswith("{")
    if answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(text if text.endswith("}") else text + "}"), dict)


def test_completions_without_echo(client: openai.OpenAI) -> None:
    answer = complete(client)
    assert answer.object == "text_completion"
    assert answer.choices[0].text
    assert not answer.choices[0].text.startswith("Once upon a time")
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 8


def test_completions_with_echo(client: openai.OpenAI) -> None:
    assert complete(client, echo=True, max_tokens=2).choices[0].text.startswith("Once upon a time")


def test_streamed_completions_are_the_same_text(client: openai.OpenAI) -> None:
    chunks = list(complete(client, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == complete(client).choices[0].text


def test_several_prompts_are_answered_in_order(client: openai.OpenAI, margins: Margins) -> None:
    prompts = [COUNTING.text, COMPLETION.text]
    answer = complete(client, prompt=prompts)
    assert [choice.index for choice in answer.choices] == [0, 1]
    for choice, prompt in zip(answer.choices, (COUNTING, COMPLETION), strict=True):
        wanted = margins.require(prompt).text
        assert choice.text.startswith(wanted) or wanted.startswith(choice.text)


def test_a_prompt_of_token_ids(client: openai.OpenAI, server: RunningServer) -> None:
    tokens = server.post("/tokenize", {"model": MODEL, "prompt": "Once upon a time"}).json()["tokens"]
    assert complete(client, prompt=tokens).choices[0].text == complete(client).choices[0].text


def test_responses(client: openai.OpenAI, margins: Margins) -> None:
    answer = client.responses.create(model=MODEL, input=QUESTION.text, max_output_tokens=16, temperature=0)
    assert answer.output_text == margins.require(QUESTION).text
    assert answer.status == "completed"
    assert answer.usage is not None
    assert answer.usage.output_tokens <= 16


def test_streamed_responses(client: openai.OpenAI, margins: Margins) -> None:
    events = list(
        client.responses.create(model=MODEL, input=QUESTION.text, max_output_tokens=16, temperature=0, stream=True)
    )
    kinds = [event.type for event in events]
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.completed"
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == margins.require(QUESTION).text
    assert events[-1].response.output_text == text  # type: ignore[union-attr]


def test_models(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.id == MODEL
    assert model.object == "model"


def test_an_unknown_adapter_is_an_unknown_model(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as failure:
        chat(client, model="my-lora-adapter")
    assert "`my-lora-adapter` does not exist" in failure.value.message
    assert MODEL in failure.value.message


@pytest.mark.parametrize("text", ["Hello, world!", "naïve Größe 東京 🙂", "  spaces\nand\ttabs "])
def test_tokenize_and_detokenize_are_inverse(server: RunningServer, text: str) -> None:
    tokenized = server.post("/tokenize", {"model": MODEL, "prompt": text}).json()
    assert tokenized["count"] == len(tokenized["tokens"])
    assert tokenized["max_model_len"] == 8192
    assert server.post("/detokenize", {"model": MODEL, "tokens": tokenized["tokens"]}).json()["prompt"] == text


def test_tokenize_a_conversation(server: RunningServer, client: openai.OpenAI) -> None:
    tokenized = server.post("/tokenize", {"model": MODEL, "messages": MESSAGES}).json()
    assert tokenized["count"] == chat(client, max_tokens=1).usage.prompt_tokens


def test_two_choices(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "Tell me a story."}]
    answer = chat(client, messages=messages, n=2, temperature=1.0, seed=7, max_tokens=8)
    assert [choice.index for choice in answer.choices] == [0, 1]
    first, second = (choice.message.content for choice in answer.choices)
    assert first and second
    assert first != second


def test_two_streamed_choices(client: openai.OpenAI) -> None:
    chunks = list(chat(client, n=2, temperature=1.0, seed=7, max_tokens=6, stream=True))
    assert {choice.index for chunk in chunks for choice in chunk.choices} == {0, 1}


def test_logprobs_of_chat(client: openai.OpenAI) -> None:
    answer = chat(client, logprobs=True, top_logprobs=2, max_tokens=3)
    content = answer.choices[0].logprobs.content
    assert len(content) == 3
    for entry in content:
        assert entry.logprob <= 0
        assert len(entry.top_logprobs) == 2
        assert entry.logprob == max(alternative.logprob for alternative in entry.top_logprobs)
    assert "".join(entry.token for entry in content) == answer.choices[0].message.content


def test_logprobs_of_completions(client: openai.OpenAI) -> None:
    logprobs = complete(client, logprobs=2, max_tokens=3).choices[0].logprobs
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.top_logprobs) == 3


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_are_cut_off(client: openai.OpenAI, margins: Margins, stream: bool) -> None:
    fields = {"prompt": COUNTING.text, "stop": [" 7"], "max_tokens": 24}
    if stream:
        chunks = list(complete(client, stream=True, **fields))
        text, reason = "".join(chunk.choices[0].text for chunk in chunks), chunks[-1].choices[0].finish_reason
    else:
        (choice,) = complete(client, **fields).choices
        text, reason = choice.text, choice.finish_reason
    assert text == margins.require(COUNTING).text.partition(" 7")[0]
    assert reason == "stop"


def test_a_seed_makes_sampling_repeatable(client: openai.OpenAI) -> None:
    fields = {"temperature": 1.0, "max_tokens": 8}
    first, again, other = (complete(client, seed=seed, **fields).choices[0].text for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_a_prompt_longer_than_one_step_is_answered_the_same_twice(client: openai.OpenAI, margins: Margins) -> None:
    answers = [complete(client, prompt=SUNRISES.text, max_tokens=4) for _ in range(2)]
    assert answers[0].usage.prompt_tokens > 3000
    assert answers[0].choices[0].text == answers[1].choices[0].text
    assert answers[0].choices[0].text.startswith(margins.require(SUNRISES).text)
