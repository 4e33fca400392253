"""API key, body size, keep-alive, and the orderly end of a server. The last test ends the server of this file."""

import json
import signal
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from tests.integration.conftest import MAX_REQUEST_BYTES, StrictServer, shared_memory_names
from tests.server import Answer

pytestmark = pytest.mark.engine

GUARDED = ("/v1/models", "/v1/chat/completions", "/v1/completions", "/v1/responses", "/tokenize", "/metrics", "/nope")
EXIT_TIMEOUT_S = 10.0


def complete(strict: StrictServer, prompt: str = "Hi", **fields: Any) -> Answer:
    body = {"model": strict.server.model, "prompt": prompt, "max_tokens": 1, "temperature": 0, **fields}
    return strict.server.post("/v1/completions", body, strict.authorization)


@pytest.mark.parametrize("path", GUARDED)
@pytest.mark.parametrize("key", [None, "Bearer wrong", "Bearer ", "key-of-the-test", "Basic key-of-the-test"])
def test_401_without_the_key(strict: StrictServer, path: str, key: str | None) -> None:
    headers = {} if key is None else {"authorization": key}
    for method in ("GET", "POST"):
        answer = strict.server.request(method, path, b"{}", headers)
        assert answer.status == 401
        assert answer.error["type"] == "AuthenticationError"
        assert answer.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("key", ["another-key", "key-of-the-test"])
def test_each_key_opens_the_server(strict: StrictServer, key: str) -> None:
    for path in ("/v1/models", "/metrics"):
        answer = strict.server.request("GET", path, headers={"authorization": f"Bearer {key}"})
        assert answer.status == 200


def test_health_needs_no_key(strict: StrictServer) -> None:
    assert strict.server.get("/health").status == 200
    assert strict.server.get("/health/ready").status == 200


def test_it_serves_without_a_cache_directory(strict: StrictServer) -> None:
    answer = complete(strict)
    assert answer.status == 200
    assert answer.json()["choices"][0]["text"]


def test_413_by_content_length(strict: StrictServer) -> None:
    answer = complete(strict, "word " * MAX_REQUEST_BYTES)
    assert answer.status == 413
    assert answer.error["type"] == "RequestTooLargeError"
    assert f"larger than {MAX_REQUEST_BYTES} bytes" in answer.error["message"]


def test_413_by_the_bytes_of_a_chunked_body(strict: StrictServer) -> None:
    """`http.client` sends a body of unknown length in chunks."""

    def pieces() -> Iterator[bytes]:
        yield b'{"model": "smollm2", "prompt": "'
        for _ in range(80):
            yield b"a" * 1024

    headers = {"content-type": "application/json", **strict.authorization}
    answer = strict.server.request("POST", "/v1/completions", pieces(), headers)  # type: ignore[arg-type]
    assert answer.status == 413
    assert f"larger than {MAX_REQUEST_BYTES} bytes" in answer.error["message"]


def test_a_chunked_body_within_the_limit_is_served(strict: StrictServer) -> None:
    body = {"model": strict.server.model, "prompt": "Hi", "max_tokens": 1}
    headers = {"content-type": "application/json", **strict.authorization}
    pieces = iter([json.dumps(body).encode()])
    answer = strict.server.request("POST", "/v1/completions", pieces, headers)  # type: ignore[arg-type]
    assert answer.status == 200


def test_keep_alive_comments_arrive_during_a_long_prefill(strict: StrictServer) -> None:
    body = {"model": strict.server.model, "prompt": "word " * 1800, "max_tokens": 1, "stream": True}
    headers = {"content-type": "application/json", **strict.authorization}
    with strict.server.open("POST", "/v1/completions", json.dumps(body).encode(), headers) as response:
        lines = [line.strip() for line in response if line.strip()]
    first_data = next(index for index, line in enumerate(lines) if line.startswith(b"data: "))
    assert first_data > 0, "no comment came before the first text"
    assert set(lines[:first_data]) == {b": keep-alive"}
    assert lines[-1] == b"data: [DONE]"


def test_sigterm_ends_streams_cleanly_and_the_process_within_10_s(strict: StrictServer) -> None:
    server = strict.server
    body = {"model": server.model, "prompt": "Once", "max_tokens": 4000, "stream": True, "ignore_eos": True}
    headers = {"content-type": "application/json", **strict.authorization}
    process = psutil.Process(server.process.pid)
    assert process.children(recursive=True) == []
    with server.open("POST", "/v1/completions", json.dumps(body).encode(), headers) as response:
        events = (line.strip() for line in response if line.startswith(b"data: "))
        next(events)
        sent_at = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        lines = list(events)
    assert lines[-1] == b"data: [DONE]"
    last = json.loads(lines[-2].removeprefix(b"data: "))
    assert last["choices"][0]["finish_reason"] == "abort"
    assert server.process.wait(EXIT_TIMEOUT_S) == 0, server.tail()
    assert time.monotonic() - sent_at < EXIT_TIMEOUT_S
    assert shared_memory_names() <= strict.shared_memory
    assert [path.name for path in strict.temporary.iterdir() if path.name.startswith("vllm")] == []
    assert "Traceback" not in server.log.read_text(errors="replace")
