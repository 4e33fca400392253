"""Wrong requests: each is refused with 4xx and an error in OpenAI's shape, and the server goes on as before."""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.server import Answer, RunningServer

pytestmark = pytest.mark.engine

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
GENERATION = (CHAT, COMPLETIONS, RESPONSES)
USER: list[Any] = [{"role": "user", "content": "Hi"}]
INPUTS: dict[str, dict[str, Any]] = {
    CHAT: {"messages": USER, "max_tokens": 1},
    COMPLETIONS: {"prompt": "Hi", "max_tokens": 1},
    RESPONSES: {"input": "Hi", "max_output_tokens": 1},
}
UNKNOWN_PATHS = ("/", "/nope", "/v1", "/v1/nope", "/v1/embeddings", "/v1/models/nope", "//v1/models", "/%00")
MAX_REQUEST_BYTES = 4 << 20


@pytest.fixture(autouse=True)
def unharmed(server: RunningServer) -> Iterator[None]:
    """After each test: alive, ready, nothing left in the engine, and a normal request answers."""
    yield
    assert server.process.poll() is None, server.tail()
    health = server.get("/health/ready")
    assert health.status == 200
    assert health.json()["num_requests"] == 0
    assert server.complete("The capital of France is", max_tokens=1).json()["usage"]["completion_tokens"] == 1


@pytest.fixture(autouse=True, scope="module")
def still_serves(server: RunningServer) -> Iterator[None]:
    yield
    server.assert_serves()


def assert_refused(answer: Answer, status: int = 400) -> str:
    """The answer has that status and an OpenAI error body, whose message is returned."""
    assert answer.status == status, answer.body
    assert answer.headers["content-type"].startswith("application/json")
    error = answer.error
    assert error["message"]
    assert error["type"]
    assert error["code"] == status
    return str(error["message"])


def post(server: RunningServer, path: str, **fields: Any) -> Answer:
    """A request that is good but for `fields`."""
    return server.post(path, {"model": server.model, "temperature": 0, **INPUTS[path], **fields})


@pytest.mark.parametrize("path", [*GENERATION, "/tokenize", "/detokenize"])
@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b'{"model": "smollm2", ',
        b"null", b"[]", b'"text"', b"3", b"{}", b"\x00", b"\xff\xfe", b"model=smollm2",
        b'{"model": "smollm2", "prompt": "\xff", "input": "\xff", "messages": "\xff", "tokens": "\xff"}',
        b"[" * 100_000 + b"]" * 100_000,
        b'{"model": "smollm2", "x": ' + b'{"a":' * 50_000 + b"1" + b"}" * 50_000 + b"}",
        b'{"model": ' + b"9" * 5000 + b"}",
        b'{"model": 3, "prompt": "Hi", "input": "Hi", "messages": [], "tokens": [1]}',
    ],
    ids=[
        "empty", "brace", "cut off", "null", "list", "string", "number", "no fields", "nul", "utf-16", "form",
        "invalid utf-8", "nested lists", "nested objects", "huge number", "model of wrong type",
    ],
)  # fmt: skip
def test_bodies_that_are_no_request(server: RunningServer, path: str, body: bytes) -> None:
    assert_refused(server.post(path, body))


@pytest.mark.parametrize("path", [*GENERATION, "/tokenize"])
@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""])
def test_wrong_content_type(server: RunningServer, path: str, content_type: str) -> None:
    body = json.dumps({"model": server.model, **INPUTS.get(path, {"prompt": "Hi"})}).encode()
    assert_refused(server.request("POST", path, body, {"content-type": content_type}))


@pytest.mark.parametrize("path", GENERATION)
def test_huge_body_by_its_declared_length(server: RunningServer, path: str) -> None:
    message = assert_refused(server.post(path, b" " * (MAX_REQUEST_BYTES + 1)), 413)
    assert f"larger than {MAX_REQUEST_BYTES} bytes" in message


@pytest.mark.parametrize("path", [*GENERATION, "/tokenize"])
def test_huge_body_in_chunks(server: RunningServer, path: str) -> None:
    # One piece over the limit: a client that is still sending when the answer comes may find its connection closed.
    pieces = iter([b" " * (1 << 20)] * 4 + [b" "])
    headers = {"content-type": "application/json"}
    assert_refused(server.request("POST", path, pieces, headers), 413)  # type: ignore[arg-type]


@pytest.mark.parametrize("path", [*GENERATION, "/tokenize", "/detokenize"])
def test_unknown_model(server: RunningServer, path: str) -> None:
    body = INPUTS.get(path, {"prompt": "Hi", "tokens": [1]})
    message = assert_refused(server.post(path, {"model": "gpt-5", **body}), 404)
    assert "gpt-5" in message
    assert server.model in message


@pytest.mark.parametrize("method", ["GET", "POST"])
@pytest.mark.parametrize("path", UNKNOWN_PATHS)
def test_unknown_endpoint(server: RunningServer, method: str, path: str) -> None:
    assert_refused(server.request(method, path), 404)


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", CHAT), ("PUT", COMPLETIONS), ("DELETE", "/v1/models"), ("GET", "/tokenize"), ("POST", "/v1/models")],
)
def test_wrong_method(server: RunningServer, method: str, path: str) -> None:
    answer = server.request(method, path)
    assert_refused(answer, 405)
    assert answer.headers["allow"] in ("GET", "POST")


@pytest.mark.parametrize("path", GENERATION)
@pytest.mark.parametrize("number", ["NaN", "1e400", "-1e400", "Infinity", "-1", '"hot"', "[]", "1e300"])
def test_temperature(server: RunningServer, path: str, number: str) -> None:
    text = json.dumps({"model": server.model, **INPUTS[path], "temperature": "PLACE"})
    message = assert_refused(server.post(path, text.replace('"PLACE"', number).encode()))
    assert "temperature" in message


@pytest.mark.parametrize("path", GENERATION)
@pytest.mark.parametrize("value", [-1, 0, 10**9, 2**63, "many", 1.5, [], {}])
def test_max_tokens(server: RunningServer, path: str, value: Any) -> None:
    name = "max_output_tokens" if path == RESPONSES else "max_tokens"
    message = assert_refused(post(server, path, **{name: value}))
    assert "max_tokens" in message or "max_output_tokens" in message


@pytest.mark.parametrize("path", (CHAT, COMPLETIONS))
@pytest.mark.parametrize(
    "fields",
    [
        {"n": -1}, {"n": 0}, {"n": 10**6, "temperature": 1}, {"n": 11, "temperature": 1},
        {"n": "two"}, {"n": 2, "temperature": 0},
        {"stop": 3}, {"stop": {}}, {"stop": [1]}, {"stop": ""}, {"stop": [None]},
        {"top_p": 2}, {"top_p": 0}, {"top_k": -5}, {"min_p": 2}, {"seed": 2**70}, {"seed": "x"},
        {"presence_penalty": 9}, {"frequency_penalty": -9}, {"repetition_penalty": 0},
        {"logit_bias": {"999999": 1}}, {"logit_bias": {"x": 1}}, {"logit_bias": []},
        {"prompt_logprobs": 10**6}, {"stop_token_ids": [10**9]}, {"stop_token_ids": [-5]},
        {"allowed_token_ids": []}, {"allowed_token_ids": [10**9]}, {"bad_words": [1]},
        {"stream": "perhaps"}, {"stream_options": {"include_usage": True}}, {"stream": True, "stream_options": 3},
        {"min_tokens": 100}, {"min_tokens": -1}, {"user": 3}, {"priority": 2**80},
    ],
    ids=str,
)  # fmt: skip
def test_sampling_fields(server: RunningServer, path: str, fields: dict[str, Any]) -> None:
    assert_refused(post(server, path, **fields))


@pytest.mark.parametrize("fields", [{"logprobs": 10**6}, {"logprobs": -5}, {"suffix": "x"}, {"prompt_embeds": "x"}])
def test_completion_fields(server: RunningServer, fields: dict[str, Any]) -> None:
    assert_refused(post(server, COMPLETIONS, **fields))


@pytest.mark.parametrize(
    "prompt",
    [None, "", [], [[]], {}, 3, [1.5], ["a", 1], [[1], "a"], [-1], [49152], [10**6], [2**70], [[1, 10**6]], "\ud800"],
    ids=ascii,
)
def test_prompts(server: RunningServer, prompt: Any) -> None:
    assert_refused(post(server, COMPLETIONS, prompt=prompt))


@pytest.mark.parametrize(
    "messages",
    [
        [], None, "Hi", 3, {}, ["Hi"], [None], [[]], [{}], [{"content": "Hi"}], [{"role": 3, "content": "Hi"}],
        [{"role": "user", "content": None}], [{"role": "user", "content": 3}],
        [{"role": "user", "content": [{"type": "x"}]}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]}],
        [{"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "x", "format": "wav"}}]}],
        [{"role": "user", "content": "\ud800"}], [{"role": "assistant", "content": "", "tool_calls": 3}],
        [{"role": "wizard", "content": "Hi"}],
    ],
    ids=lambda messages: json.dumps(messages)[:40],
)  # fmt: skip
def test_messages(server: RunningServer, messages: Any) -> None:
    assert_refused(post(server, CHAT, messages=messages))


@pytest.mark.parametrize(
    "item", [3, [], [{}], [{"role": "wizard", "content": "Hi"}], [{"type": "x"}], None, "\ud800"], ids=ascii
)
def test_response_inputs(server: RunningServer, item: Any) -> None:
    assert_refused(post(server, RESPONSES, input=item))


def test_an_unknown_earlier_response(server: RunningServer) -> None:
    assert_refused(post(server, RESPONSES, previous_response_id="resp_nope"), 404)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "word " * 9000}]}),
        (COMPLETIONS, {"prompt": "word " * 9000}),
        (RESPONSES, {"input": "word " * 9000}),
        (RESPONSES, {"input": "word " * 9000, "truncation": "disabled"}),
    ],
)
def test_9000_words_are_refused_and_never_cut(server: RunningServer, path: str, fields: dict[str, Any]) -> None:
    message = assert_refused(post(server, path, **fields))
    assert "8192" in message
    stated = [int(number) for number in re.findall(r"(\d+) input tokens", message)]
    assert stated, message
    assert stated[0] > 8192


@pytest.mark.parametrize("path", (CHAT, COMPLETIONS))
@pytest.mark.parametrize(
    "response_format",
    [
        "json", 3, {}, {"type": "yaml"}, {"type": "json_schema"}, {"type": "json_schema", "json_schema": {}},
        *({"type": "json_schema", "json_schema": {"name": "a", "schema": schema}} for schema in (
            3, [], "x", {"type": "nonsense"}, {"type": "object", "properties": 3}, {"$ref": "#/nope"},
            {"type": "string", "pattern": "("}, {"type": "array", "items": {"type": 3}}, {"enum": 3},
        )),
    ],
    ids=str,
)  # fmt: skip
def test_invalid_json_schemas(server: RunningServer, path: str, response_format: Any) -> None:
    assert_refused(post(server, path, response_format=response_format))


@pytest.mark.parametrize("path", (CHAT, COMPLETIONS))
@pytest.mark.parametrize(
    "constraint",
    [3, {}, {"regex": "("}, {"grammar": "::"}, {"choice": []}, {"json": "{"}, {"structural_tag": "{}"},
     {"choice": ["a"], "regex": "a"}],
    ids=str,
)  # fmt: skip
def test_invalid_structured_outputs(server: RunningServer, path: str, constraint: Any) -> None:
    assert_refused(post(server, path, structured_outputs=constraint))


def tool(**function: Any) -> dict[str, Any]:
    return {"type": "function", "function": function}


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": "x"}, {"tools": 3}, {"tools": [3]}, {"tools": [{}]}, {"tools": [{"type": "function"}]},
        {"tools": [tool()]}, {"tools": [tool(name=3)]}, {"tools": [tool(name="f", parameters=3)]},
        {"tools": [tool(name="f", parameters={"type": "nonsense"})]},
        {"tools": [tool(name="f", parameters={"type": "nonsense"})], "tool_choice": "required"},
        {"tools": [], "tool_choice": "required"}, {"tool_choice": "required"}, {"tool_choice": "auto"},
        {"tools": [tool(name="f")], "tool_choice": "sometimes"}, {"tools": [tool(name="f")], "tool_choice": 3},
        {"tools": [tool(name="f")], "tool_choice": tool(name="g")},
        {"chat_template": "{{ 1 / 0 }}"}, {"chat_template_kwargs": 3}, {"documents": 3},
        {"add_generation_prompt": True, "continue_final_message": True},
    ],
    ids=lambda fields: json.dumps(fields)[:60],
)  # fmt: skip
def test_invalid_tools_and_templates(server: RunningServer, fields: dict[str, Any]) -> None:
    assert_refused(post(server, CHAT, **fields))


@pytest.mark.parametrize("tokens", ["x", None, [-1], [2**70], [1, "a"], [1.5], {}], ids=ascii)
def test_detokenize(server: RunningServer, tokens: Any) -> None:
    assert_refused(server.post("/detokenize", {"model": server.model, "tokens": tokens}))


@pytest.mark.parametrize(
    "fields", [{}, {"prompt": 3}, {"messages": 3}, {"messages": []}, {"prompt": "\ud800"}], ids=ascii
)
def test_tokenize(server: RunningServer, fields: dict[str, Any]) -> None:
    assert_refused(server.post("/tokenize", {"model": server.model, **fields}))


def test_a_wrong_request_that_wants_a_stream_gets_a_plain_error(server: RunningServer) -> None:
    for path in GENERATION:
        assert_refused(post(server, path, stream=True, temperature=-1))


def test_more_prompts_than_can_ever_wait_are_refused(server: RunningServer) -> None:
    for stream in (False, True):
        message = assert_refused(post(server, COMPLETIONS, prompt=["Hi"] * 11, stream=stream))
        assert "11 sequences" in message
        assert "at most 10 are accepted" in message
