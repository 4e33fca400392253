import json

import pytest

from benchmarks.edge_harness.decode_servers import read_counted_stream
from vllm_omni.errors import EngineError


def lines(*events: dict[str, object]) -> list[tuple[int, bytes]]:
    texts = [*(json.dumps(event) for event in events), "[DONE]"]
    return [(1_000_000_000 * number, f"data: {text}\n".encode()) for number, text in enumerate(texts, start=1)]


def chunk(text: str) -> dict[str, object]:
    return {"choices": [{"text": text}]}


USAGE: dict[str, object] = {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 3}}


def test_each_chunk_of_text_is_a_token() -> None:
    stream, counted = read_counted_stream(0, lines(chunk("a"), chunk("b"), chunk("c"), chunk(""), USAGE))
    assert counted == stream.num_tokens == 3
    assert stream.prompt_tokens == 5
    assert stream.ttft_s == 1.0
    assert stream.decode_tokens_per_s == 1.0


@pytest.mark.parametrize("events", [(chunk("a"),), (USAGE,)])
def test_text_and_counts_are_both_needed(events: tuple[dict[str, object], ...]) -> None:
    with pytest.raises(EngineError, match="both are needed"):
        read_counted_stream(0, lines(*events))
