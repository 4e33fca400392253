"""`/metrics` in Prometheus' text format."""

import pytest

from tests.server import RunningServer

pytestmark = pytest.mark.engine


def read(server: RunningServer) -> dict[str, float]:
    """Sum of each metric over its labels."""
    answer = server.get("/metrics")
    assert answer.status == 200
    assert answer.headers["content-type"].startswith("text/plain")
    totals: dict[str, float] = {}
    for line in answer.body.decode().splitlines():
        if not line.startswith("#"):
            name, value = line.split("{")[0].split(" ")[0], line.rsplit(" ", 1)[1]
            totals[name] = totals.get(name, 0.0) + float(value)
    return totals


def test_counters_follow_requests(server: RunningServer) -> None:
    before = read(server)
    answer = server.complete(max_tokens=3, ignore_eos=True)
    usage = answer.json()["usage"]
    server.wait_idle()
    after = read(server)
    for name, growth in (
        ("vllm:prompt_tokens_total", usage["prompt_tokens"]),
        ("vllm:generation_tokens_total", 3),
        ("vllm:request_success_total", 1),
        ("vllm:time_to_first_token_seconds_count", 1),
    ):
        assert after[name] - before[name] == growth, name


def test_gauges_of_an_idle_server_are_zero(server: RunningServer) -> None:
    server.wait_idle()
    values = read(server)
    assert values["vllm:num_requests_running"] == 0
    assert values["vllm:num_requests_waiting"] == 0


def test_refused_requests_are_exported(server: RunningServer) -> None:
    assert read(server)["vllm_omni:requests_refused_total"] >= 0


def test_repeated_prompts_hit_the_prefix_cache(server: RunningServer) -> None:
    prompt = "The quick brown fox jumps over the lazy dog. " * 40
    assert server.complete(prompt, max_tokens=1).status == 200
    before = read(server)["vllm:prefix_cache_hits_total"]
    assert server.complete(prompt, max_tokens=1).status == 200
    assert read(server)["vllm:prefix_cache_hits_total"] > before
