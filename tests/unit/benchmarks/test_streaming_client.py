import json
from typing import Any

import pytest

from benchmarks.edge_harness.streaming_client import (
    TokenStream,
    chat_body,
    combined_decode_rate,
    completion_body,
    parse_events,
    read_stream,
)
from vllm_omni.errors import EngineError

SECOND_NS = 1_000_000_000
DONE = b"data: [DONE]\n"


def chunk(tokens: int, prompt_tokens: int = 32) -> bytes:
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": tokens}
    return b"data: " + json.dumps({"choices": [{"text": "a"}], "usage": usage}).encode() + b"\n"


def timed(*lines: bytes) -> list[tuple[int, bytes]]:
    """Lines that arrive one second apart, the first after one second."""
    return [(number * SECOND_NS, line) for number, line in enumerate(lines, start=1)]


def events(*lines: bytes) -> list[tuple[int, dict[str, Any]]]:
    return list(parse_events(timed(*lines)))


# Server-sent events.


def test_events_carry_the_time_of_their_line() -> None:
    assert events(b'data: {"a": 1}\r\n', b"\r\n", b'data:{"a": 2}\n', DONE) == [
        (SECOND_NS, {"a": 1}),
        (3 * SECOND_NS, {"a": 2}),
    ]


def test_keep_alives_and_other_fields_are_skipped() -> None:
    assert events(b": keep-alive\n", b"event: x\n", b"id: 3\n", b"retry: 9\n", b"\n", DONE) == []


def test_nothing_after_done_is_read() -> None:
    assert events(DONE, b"garbage\n") == []


def test_a_stream_without_done_is_an_error() -> None:
    with pytest.raises(EngineError, match=r"without \[DONE\]"):
        events(chunk(1))


def test_an_error_event_is_raised_with_its_text() -> None:
    with pytest.raises(EngineError, match="out of blocks"):
        events(b'data: {"error": {"message": "out of blocks"}}\n', DONE)


def test_a_line_that_is_no_event_is_an_error() -> None:
    with pytest.raises(EngineError, match="<html>"):
        events(b"<html>\n", DONE)


# Token times.


def test_time_to_first_token_and_rate() -> None:
    stream = read_stream(SECOND_NS // 2, timed(chunk(1), chunk(2), chunk(3), chunk(3), DONE))
    assert stream.ttft_s == pytest.approx(0.5)
    assert stream.decode_tokens_per_s == pytest.approx(1.0)
    assert (stream.num_tokens, stream.prompt_tokens) == (3, 32)


def test_a_chunk_of_several_tokens_counts_them_all() -> None:
    stream = read_stream(0, timed(chunk(1), chunk(4), chunk(7), DONE))
    assert stream.decode_tokens_per_s == pytest.approx(3.0)


def test_tokens_of_the_first_chunk_are_not_in_the_rate() -> None:
    assert read_stream(0, timed(chunk(5), chunk(7), DONE)).decode_tokens_per_s == pytest.approx(2.0)


def test_a_chunk_without_tokens_is_no_first_token() -> None:
    assert read_stream(0, timed(chunk(0), chunk(1), DONE)).ttft_s == pytest.approx(2.0)


def test_a_stream_without_tokens_is_an_error() -> None:
    with pytest.raises(EngineError, match="without a token"):
        read_stream(0, timed(chunk(0), DONE))


def test_a_chunk_without_usage_is_an_error() -> None:
    with pytest.raises(EngineError, match="continuous_usage_stats"):
        read_stream(0, timed(b'data: {"choices": []}\n', DONE))


def test_one_chunk_gives_no_rate() -> None:
    with pytest.raises(EngineError, match="one chunk"):
        _ = read_stream(0, timed(chunk(4), DONE)).decode_tokens_per_s


def test_the_combined_rate_spans_the_first_to_the_last_chunk_of_all() -> None:
    early = TokenStream(0, ((1 * SECOND_NS, 1), (4 * SECOND_NS, 5)), 32)
    late = TokenStream(0, ((2 * SECOND_NS, 1), (6 * SECOND_NS, 5)), 32)
    assert combined_decode_rate([early, late]) == pytest.approx(9 / 5)


# Bodies.


def test_a_completion_asks_for_exact_length_and_counts() -> None:
    body = completion_body([5, 6], 128)
    assert (body["prompt"], body["max_tokens"], body["ignore_eos"], body["temperature"]) == ([5, 6], 128, True, 0)
    assert body["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}


def test_chats_with_other_questions_share_no_cache() -> None:
    first, second = chat_body("a?", 8), chat_body("b?", 8)
    assert first["cache_salt"] != second["cache_salt"]
    assert first["max_tokens"] == second["max_tokens"] == 8
