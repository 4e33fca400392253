from typing import Any

import pytest

from vllm_omni.entrypoints.openai.errors import send_json
from vllm_omni.entrypoints.openai.gateway import Gateway
from vllm_omni.errors import StageError


async def app(scope: Any, receive: Any, send: Any) -> None:
    await send_json(send, 200, {"app saw": scope["path"]})


async def report() -> dict[str, Any]:
    return {"num_requests": 1, "dtype": "bfloat16"}


@pytest.fixture
def ready() -> Gateway:
    gateway = Gateway()
    gateway.install(app, report)
    return gateway


@pytest.fixture
def draining(ready: Gateway) -> Gateway:
    ready.begin_shutdown()
    return ready


# Health.


async def test_it_is_healthy_but_not_ready_while_starting(call: Any) -> None:
    gateway = Gateway()
    health, readiness = await call(gateway, "/health"), await call(gateway, "/health/ready")
    assert (health.status, health.json) == (200, {"status": "starting"})
    assert (readiness.status, readiness.json) == (503, {"status": "starting"})


async def test_health_reports_facts_when_ready(call: Any, ready: Gateway) -> None:
    for path in ("/health", "/health/ready"):
        answer = await call(ready, path)
        assert answer.status == 200
        assert answer.json == {"status": "ready", "num_requests": 1, "dtype": "bfloat16"}
        assert answer.headers["content-type"] == "application/json"
        assert int(answer.headers["content-length"]) == len(answer.body)


async def test_it_is_healthy_but_not_ready_while_draining(call: Any, draining: Gateway) -> None:
    health, readiness = await call(draining, "/health"), await call(draining, "/health/ready")
    assert (health.status, readiness.status) == (200, 503)
    assert health.json["status"] == readiness.json["status"] == "draining"


async def test_a_dead_engine_is_unhealthy_and_said_why(call: Any) -> None:
    async def dead() -> dict[str, Any]:
        raise StageError("stage 0: the engine core has died")

    gateway = Gateway()
    gateway.install(app, dead)
    for path in ("/health", "/health/ready"):
        answer = await call(gateway, path)
        assert answer.status == 503
        assert answer.json == {"status": "failed", "error": "stage 0: the engine core has died"}


# Everything else.


async def test_requests_reach_the_application_when_ready(call: Any, ready: Gateway) -> None:
    answer = await call(ready, "/v1/models")
    assert (answer.status, answer.json) == (200, {"app saw": "/v1/models"})


@pytest.mark.parametrize("state", ["starting", "draining"])
async def test_requests_are_refused_in_other_states(call: Any, draining: Gateway, state: str) -> None:
    gateway = draining if state == "draining" else Gateway()
    answer = await call(gateway, "/v1/chat/completions", method="POST")
    assert answer.status == 503
    assert answer.json["error"] == {
        "message": f"the server is {state}",
        "type": "ServiceUnavailableError",
        "param": None,
        "code": 503,
    }
    assert int(answer.headers["retry-after"]) >= 1


async def test_a_request_under_way_goes_on_when_draining_begins(call: Any) -> None:
    gateway = Gateway()

    async def slow(scope: Any, receive: Any, send: Any) -> None:
        gateway.begin_shutdown()
        await app(scope, receive, send)

    gateway.install(slow, report)
    assert (await call(gateway, "/v1/models")).status == 200
    assert (await call(gateway, "/v1/models")).status == 503


async def test_a_websocket_is_closed_with_try_again_later(call: Any) -> None:
    answer = await call(Gateway(), "/v1/realtime", kind="websocket")
    assert answer.messages == [{"type": "websocket.close", "code": 1013}]


async def test_a_websocket_reaches_the_application_when_ready(call: Any, ready: Gateway) -> None:
    assert (await call(ready, "/v1/realtime", kind="websocket")).json == {"app saw": "/v1/realtime"}


async def test_lifespan_is_answered_without_an_application() -> None:
    arriving = [{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}]
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return arriving.pop(0)

    async def send(message: Any) -> None:
        sent.append(message)

    await Gateway()({"type": "lifespan"}, receive, send)
    assert sent == [{"type": "lifespan.startup.complete"}, {"type": "lifespan.shutdown.complete"}]
