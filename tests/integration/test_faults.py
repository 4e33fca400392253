"""More clients than room, and clients that vanish."""

import http.client
import json
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from typing import Any

import pytest

from tests.integration.test_metrics import read
from tests.server import POLL_S, REQUEST_TIMEOUT_S, RunningServer

pytestmark = pytest.mark.engine

NUM_CLIENTS = 100
CAPACITY = 10
LONG_PROMPT = "word " * 4000


@pytest.fixture(autouse=True)
def still_serves(server: RunningServer) -> Iterator[None]:
    yield
    server.wait_idle()
    wait_engine_empty(server)
    server.assert_serves()


def wait_engine_empty(server: RunningServer, timeout_s: float = 10.0) -> None:
    """Waits until vLLM's own scheduler runs nothing, queues nothing and holds no cache block for a request."""
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
    deadline = time.monotonic() + timeout_s
    # The scheduler reports with each step; one short request makes it take the last one.
    server.complete(max_tokens=1)
    while any((metrics := read(server))[name] for name in names):
        assert time.monotonic() < deadline, {name: metrics[name] for name in names}
        server.complete(max_tokens=1)


def send(server: RunningServer, **fields: Any) -> http.client.HTTPConnection:
    """Sends a streaming completion and reads nothing; closing the connection is a client that vanishes."""
    body = {"model": server.model, "prompt": "Once upon a time", "stream": True, "max_tokens": 2000, "ignore_eos": True}
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=REQUEST_TIMEOUT_S)
    headers = {"content-type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps(body | fields), headers)
    return connection


def wait_for_requests(server: RunningServer, count: int) -> None:
    deadline = time.monotonic() + 30
    while server.num_requests() != count:
        assert time.monotonic() < deadline, f"{server.num_requests()} in flight, expected {count}"
        time.sleep(POLL_S)


def test_each_of_100_concurrent_requests_is_served_or_refused(server: RunningServer) -> None:
    refused_before = read(server)["vllm_omni:requests_refused_total"]
    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        answers = list(pool.map(lambda number: server.complete(f"Count: {number}", max_tokens=2), range(NUM_CLIENTS)))
    statuses = Counter(answer.status for answer in answers)
    assert set(statuses) <= {200, 429}, statuses
    assert statuses[200] >= CAPACITY
    for answer in answers:
        if answer.status == 429:
            assert int(answer.headers["retry-after"]) >= 1
            assert "at most 10 are accepted" in answer.error["message"]
        else:
            assert answer.json()["usage"]["completion_tokens"] <= 2
    assert read(server)["vllm_omni:requests_refused_total"] - refused_before == statuses[429]


def test_a_full_queue_refuses_and_then_recovers(server: RunningServer) -> None:
    with ExitStack() as stack:
        for _ in range(CAPACITY):
            stack.enter_context(closing(send(server)))
        wait_for_requests(server, CAPACITY)
        answer = server.complete(max_tokens=1)
        assert answer.status == 429
        assert answer.error["type"] == "RateLimitError"
        assert answer.headers["retry-after"] == "2"
        assert server.get("/health/ready").status == 200
        assert server.get("/v1/models").status == 200
    server.wait_idle()


def test_clients_that_vanish_running_and_queued_leave_nothing(server: RunningServer) -> None:
    connections = [send(server) for _ in range(6)]
    wait_for_requests(server, 6)
    # Two run: their first text has arrived. Four wait.
    for connection in connections[:2]:
        assert connection.getresponse().readline().startswith(b"data: ")
    for connection in connections:
        connection.close()
    server.wait_idle()


def test_clients_that_vanish_while_queued_do_not_disturb_the_running(server: RunningServer) -> None:
    # Long enough to be running still when the others have come.
    with closing(send(server, max_tokens=400)) as first, closing(send(server, max_tokens=400)) as second:
        wait_for_requests(server, 2)
        with ExitStack() as queued:
            for _ in range(4):
                queued.enter_context(closing(send(server)))
            wait_for_requests(server, 6)
        for connection in (first, second):
            assert connection.getresponse().read().rstrip().endswith(b"data: [DONE]")


def test_a_client_that_vanishes_during_a_long_prefill(server: RunningServer) -> None:
    connection = send(server, prompt=LONG_PROMPT)
    wait_for_requests(server, 1)
    connection.close()
    server.wait_idle()


def test_a_client_that_vanishes_without_a_stream(server: RunningServer) -> None:
    connection = send(server, stream=False)
    wait_for_requests(server, 1)
    connection.close()
    server.wait_idle()


def test_a_body_that_never_ends_keeps_no_engine_room(server: RunningServer) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=REQUEST_TIMEOUT_S)
    connection.putrequest("POST", "/v1/completions")
    connection.putheader("content-type", "application/json")
    connection.putheader("content-length", "1000")
    connection.endheaders(b'{"model": ')
    assert server.num_requests() == 0
    server.assert_serves()
    connection.close()
