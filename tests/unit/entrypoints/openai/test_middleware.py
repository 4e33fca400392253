import asyncio
from typing import Any

import pytest

from vllm_omni.entrypoints.openai.errors import send_json
from vllm_omni.entrypoints.openai.middleware import (
    GENERATION_PATHS,
    HEALTH_PATHS,
    AdmissionMiddleware,
    ApiKeyMiddleware,
    BodyLimitMiddleware,
)

LIMIT_S = 10.0


async def app(scope: Any, receive: Any, send: Any) -> None:
    await send_json(send, 200, {"app saw": scope["path"]})


async def reading_app(scope: Any, receive: Any, send: Any) -> None:
    """Answers with the size of the body, once it has read all of it."""
    num_bytes = 0
    more = True
    while more:
        message = await receive()
        num_bytes += len(message.get("body", b""))
        more = message.get("more_body", False)
    await send_json(send, 200, {"num_bytes": num_bytes})


def bearer(key: str) -> list[tuple[str, str]]:
    return [("authorization", f"Bearer {key}")]


# Keys.


@pytest.mark.parametrize("headers", [[], bearer("wrong"), bearer(""), [("authorization", "secret")]])
async def test_a_missing_or_wrong_key_is_401(call: Any, headers: list[tuple[str, str]]) -> None:
    answer = await call(ApiKeyMiddleware(app, ["secret"]), headers=headers)
    assert answer.status == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    assert answer.json["error"]["type"] == "AuthenticationError"
    assert answer.json["error"]["code"] == 401
    assert "Authorization: Bearer KEY" in answer.json["error"]["message"]
    assert "secret" not in answer.body.decode()


@pytest.mark.parametrize("key", ["first", "second"])
async def test_each_of_several_keys_opens(call: Any, key: str) -> None:
    middleware = ApiKeyMiddleware(app, ["first", "second"])
    assert (await call(middleware, headers=bearer(key))).status == 200
    assert (await call(middleware, headers=bearer("first second"))).status == 401


async def test_without_keys_everybody_may_ask(call: Any) -> None:
    assert (await call(ApiKeyMiddleware(app, []))).status == 200


@pytest.mark.parametrize("path", sorted(HEALTH_PATHS))
async def test_health_needs_no_key(call: Any, path: str) -> None:
    assert (await call(ApiKeyMiddleware(app, ["secret"]), path)).status == 200


@pytest.mark.parametrize("path", ["/metrics", "/health/", "/healthy", "/v1/models"])
async def test_every_other_path_needs_one(call: Any, path: str) -> None:
    assert (await call(ApiKeyMiddleware(app, ["secret"]), path)).status == 401


# Body size.


async def test_a_body_of_exactly_the_limit_passes(call: Any) -> None:
    answer = await call(BodyLimitMiddleware(reading_app, 6), headers=[("content-length", "6")], chunks=[b"abc", b"def"])
    assert (answer.status, answer.json) == (200, {"num_bytes": 6})


def assert_refused(answer: Any) -> None:
    assert answer.status == 413
    assert answer.headers["connection"] == "close"
    assert answer.json["error"]["type"] == "RequestTooLargeError"
    assert "larger than 6 bytes (orchestrator.max_request_bytes)" in answer.json["error"]["message"]


async def test_a_declared_length_over_the_limit_is_refused_unread(call: Any) -> None:
    async def untouched(scope: Any, receive: Any, send: Any) -> None:
        raise AssertionError("the application was called")

    assert_refused(
        await call(BodyLimitMiddleware(untouched, 6), headers=[("content-length", "7")], chunks=[b"1234567"])
    )


@pytest.mark.parametrize("headers", [[], [("content-length", "1")], [("content-length", "garbage")]])
async def test_arriving_bytes_over_the_limit_are_refused(call: Any, headers: list[tuple[str, str]]) -> None:
    chunks = [b"123", b"456", b"7", b"89"]
    assert_refused(await call(BodyLimitMiddleware(reading_app, 6), headers=headers, chunks=chunks))


async def test_the_application_s_own_answer_to_a_cut_body_is_replaced(call: Any) -> None:
    async def catching(scope: Any, receive: Any, send: Any) -> None:
        try:
            await reading_app(scope, receive, send)
        except Exception:
            await send_json(send, 400, {"error": "could not parse the body"})

    assert_refused(await call(BodyLimitMiddleware(catching, 6), chunks=[b"1234567"]))


async def test_a_response_that_has_begun_is_cut_and_not_followed_by_another(call: Any) -> None:
    async def eager(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"begun", "more_body": True})
        await reading_app(scope, receive, send)

    answer = await call(BodyLimitMiddleware(eager, 6), chunks=[b"123", b"4567"])
    assert answer.status == 200
    assert answer.body == b"begun"
    assert answer.messages[-1]["more_body"] is True


async def test_errors_of_the_application_pass_through_the_body_limit(call: Any) -> None:
    async def failing(scope: Any, receive: Any, send: Any) -> None:
        raise KeyError("bug")

    with pytest.raises(KeyError, match="bug"):
        await call(BodyLimitMiddleware(failing, 6))


@pytest.mark.parametrize("answers_itself", [False, True])
async def test_a_body_that_never_ends_is_408(answers_itself: bool) -> None:
    """Whether or not the framework turns the failed reading into an answer of its own."""
    sent: list[Any] = []

    async def stalled() -> Any:
        await asyncio.Event().wait()

    async def application(scope: Any, receive: Any, send: Any) -> None:
        try:
            await reading_app(scope, receive, send)
        except Exception:
            if not answers_itself:
                raise
            await send_json(send, 400, {"error": "could not parse the body"})

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
    await BodyLimitMiddleware(application, 6, limit_s=0.01)(scope, stalled, send)
    assert [message.get("status") for message in sent] == [408, None]
    assert b"not complete within 0.01 s" in sent[1]["body"]


async def test_a_complete_body_has_no_deadline_for_the_answer(call: Any) -> None:
    async def slow(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.sleep(0.03)
        await reading_app(scope, receive, send)

    limited = BodyLimitMiddleware(slow, 6, limit_s=10)
    assert (await call(limited, chunks=[b"abc"])).status == 200


async def test_other_protocols_have_no_body_limit(call: Any) -> None:
    answer = await call(BodyLimitMiddleware(reading_app, 1), kind="websocket", chunks=[b"123"])
    assert answer.json == {"num_bytes": 3}


# Admission.


class Gate:
    """An application whose requests wait until the test lets them go."""

    def __init__(self) -> None:
        self.entered: asyncio.Queue[str] = asyncio.Queue()
        self.open = asyncio.Event()
        self.error: Exception | None = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.entered.put_nowait(scope["path"])
        await self.open.wait()
        if self.error is not None:
            raise self.error
        await app(scope, receive, send)


@pytest.fixture
def gate() -> Gate:
    return Gate()


@pytest.fixture
def refused() -> list[int]:
    return []


@pytest.fixture
def admission(gate: Gate, refused: list[int]) -> AdmissionMiddleware:
    return AdmissionMiddleware(gate, 1, 7, lambda: refused.append(1))


async def enter(call: Any, admission: AdmissionMiddleware, gate: Gate, path: str) -> "asyncio.Task[Any]":
    """A request that is inside the application."""
    task = asyncio.create_task(call(admission, path, method="POST"))
    await asyncio.wait_for(gate.entered.get(), LIMIT_S)
    return task


@pytest.mark.parametrize("path", sorted(GENERATION_PATHS))
async def test_requests_over_the_bound_are_429(
    call: Any, admission: AdmissionMiddleware, gate: Gate, refused: list[int], path: str
) -> None:
    task = await enter(call, admission, gate, path)
    answer = await call(admission, path, method="POST")
    assert answer.status == 429
    assert answer.headers["retry-after"] == "7"
    assert answer.json["error"]["type"] == "RateLimitError"
    assert "1 requests are in flight and at most 1 are accepted" in answer.json["error"]["message"]
    assert refused == [1]
    gate.open.set()
    assert (await task).status == 200
    assert (await call(admission, path, method="POST")).status == 200
    assert refused == [1]


@pytest.mark.parametrize(
    ("path", "method", "kind"),
    [
        ("/v1/models", "GET", "http"),
        ("/health", "GET", "http"),
        ("/tokenize", "POST", "http"),
        ("/v1/chat/completions", "OPTIONS", "http"),
        ("/v1/chat/completions", "POST", "websocket"),
    ],
)
async def test_only_generation_is_counted(
    call: Any, admission: AdmissionMiddleware, gate: Gate, path: str, method: str, kind: str
) -> None:
    task = await enter(call, admission, gate, "/v1/completions")
    other = asyncio.create_task(call(admission, path, method=method, kind=kind))
    assert await asyncio.wait_for(gate.entered.get(), LIMIT_S) == path
    assert admission.num_requests == 1
    gate.open.set()
    assert (await task).status == (await other).status == 200


async def test_an_error_frees_the_place(call: Any, admission: AdmissionMiddleware, gate: Gate) -> None:
    gate.error = KeyError("bug")
    gate.open.set()
    with pytest.raises(KeyError, match="bug"):
        await call(admission, "/v1/completions", method="POST")
    assert admission.num_requests == 0
    gate.error = None
    assert (await call(admission, "/v1/completions", method="POST")).status == 200


async def test_a_cancelled_request_frees_its_place(call: Any, admission: AdmissionMiddleware, gate: Gate) -> None:
    task = await enter(call, admission, gate, "/v1/completions")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert admission.num_requests == 0
