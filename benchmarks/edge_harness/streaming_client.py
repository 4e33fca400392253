"""Requests to an OpenAI-compatible server, timed at the client's socket.

Lines are stamped as they arrive and parsed after the last one, so that parsing takes no time from the server. A chunk
may carry several tokens: rates are computed from the token counts that the server states with each chunk.
"""

import http.client
import json
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from benchmarks.edge_harness.arms import HOST, SERVED_MODEL_NAME
from vllm_omni.errors import EngineError

REQUEST_TIMEOUT_S = 600.0
IGNORED_FIELDS = (b":", b"event:", b"id:", b"retry:")

TimedLine = tuple[int, bytes]


@dataclass(frozen=True)
class TokenStream:
    """Arrival of the tokens of one request.

    Attributes:
        sent_ns: When the request was sent, on the monotonic clock.
        arrivals: (time in ns, tokens so far) for each chunk that brought tokens; never empty.
        prompt_tokens: As the server counted them.
    """

    sent_ns: int
    arrivals: tuple[tuple[int, int], ...]
    prompt_tokens: int

    @property
    def num_tokens(self) -> int:
        return self.arrivals[-1][1]

    @property
    def ttft_s(self) -> float:
        """Seconds from sending to the first token."""
        return (self.arrivals[0][0] - self.sent_ns) / 1e9

    @property
    def decode_tokens_per_s(self) -> float:
        """Tokens after the first chunk over the time they took; prefill is not in it."""
        return combined_decode_rate([self])


def combined_decode_rate(streams: Sequence[TokenStream]) -> float:
    """Tokens a second of all `streams` together, from the first chunk of any to the last chunk of any.

    Raises:
        EngineError: All tokens came at once, so there is no rate.
    """
    first_ns, first_tokens = min(stream.arrivals[0] for stream in streams)
    last_ns = max(stream.arrivals[-1][0] for stream in streams)
    num_tokens = sum(stream.num_tokens for stream in streams) - first_tokens
    if last_ns <= first_ns or num_tokens <= 0:
        raise EngineError("all tokens arrived in one chunk, so no decode rate can be given; ask for more tokens")
    return num_tokens * 1e9 / (last_ns - first_ns)


def parse_events(lines: Iterable[TimedLine]) -> Iterator[tuple[int, dict[str, Any]]]:
    """JSON events of a server-sent stream with the time of their line; comments and keep-alives are skipped.

    Raises:
        EngineError: The stream reports an error, holds a line that is not SSE, or ends without `[DONE]`.
    """
    for arrived_ns, line in lines:
        text = line.strip()
        if not text or text.startswith(IGNORED_FIELDS):
            continue
        if not text.startswith(b"data:"):
            raise EngineError(f"the stream holds a line that is no server-sent event: {text[:200]!r}")
        data = text.removeprefix(b"data:").strip()
        if data == b"[DONE]":
            return
        event = json.loads(data)
        if "error" in event:
            raise EngineError(f"the server reported an error in the stream: {event['error']}")
        yield arrived_ns, event
    raise EngineError("the stream ended without [DONE]; the server's log says why")


def read_stream(sent_ns: int, lines: Iterable[TimedLine]) -> TokenStream:
    """The token arrivals of a completion stream that states usage with each chunk.

    Raises:
        EngineError: As `parse_events`; or no chunk brought a token.
    """
    arrivals: list[tuple[int, int]] = []
    prompt_tokens = 0
    for arrived_ns, event in parse_events(lines):
        usage = event.get("usage")
        if usage is None:
            raise EngineError("a chunk has no usage; the server must support stream_options.continuous_usage_stats")
        prompt_tokens = usage["prompt_tokens"]
        if usage["completion_tokens"] > (arrivals[-1][1] if arrivals else 0):
            arrivals.append((arrived_ns, usage["completion_tokens"]))
    if not arrivals:
        raise EngineError("the stream ended without a token; the server's log says why")
    return TokenStream(sent_ns, tuple(arrivals), prompt_tokens)


def completion_body(prompt_ids: Sequence[int], max_tokens: int) -> dict[str, Any]:
    """A greedy completion of exactly `max_tokens` tokens."""
    return {
        "model": SERVED_MODEL_NAME,
        "prompt": list(prompt_ids),
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }


def chat_body(question: str, max_tokens: int) -> dict[str, Any]:
    """A greedy chat answer of exactly `max_tokens` tokens that shares no cached prefix with other questions."""
    return {
        "model": SERVED_MODEL_NAME,
        "messages": [{"role": "user", "content": question}],
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "cache_salt": question,
    }


def complete(port: int, prompt_ids: Sequence[int], max_tokens: int) -> TokenStream:
    """Streams one completion and checks that the server computed what was asked.

    Raises:
        EngineError: The server refused, failed, or counted other tokens than were asked for.
    """
    body = json.dumps(completion_body(prompt_ids, max_tokens))
    sent_ns = time.monotonic_ns()
    with answered(port, "POST", "/v1/completions", body) as response:
        lines = [(time.monotonic_ns(), line) for line in response]
    stream = read_stream(sent_ns, lines)
    counted, asked = (stream.prompt_tokens, stream.num_tokens), (len(prompt_ids), max_tokens)
    if counted != asked:
        raise EngineError(f"(prompt, new) tokens were {counted}, asked for were {asked}; such a time compares nothing")
    return stream


def chat(port: int, question: str, max_tokens: int) -> tuple[str, float]:
    """Answer and seconds of one chat request that is not streamed.

    Raises:
        EngineError: The server refused, failed, or answered with another number of tokens.
    """
    body = json.dumps(chat_body(question, max_tokens))
    start = time.monotonic()
    with answered(port, "POST", "/v1/chat/completions", body) as response:
        answer = json.loads(response.read())
    elapsed_s = time.monotonic() - start
    num_tokens = answer["usage"]["completion_tokens"]
    if num_tokens != max_tokens:
        raise EngineError(f"the answer has {num_tokens} tokens, not {max_tokens}; such a time compares nothing")
    return answer["choices"][0]["message"]["content"] or "", elapsed_s


def fetch_text(port: int, path: str) -> str:
    """Body of a GET.

    Raises:
        EngineError: As `answered`.
    """
    with answered(port, "GET", path) as response:
        return response.read().decode()


@contextmanager
def answered(port: int, method: str, path: str, body: str | None = None) -> Iterator[http.client.HTTPResponse]:
    """The response to a request on a connection of its own, which is closed in the end.

    Raises:
        EngineError: The server answered with another status than 200, or the connection broke.
    """
    connection = http.client.HTTPConnection(HOST, port, timeout=REQUEST_TIMEOUT_S)
    try:
        connection.request(method, path, body, {"content-type": "application/json"})
        response = connection.getresponse()
        if response.status != http.HTTPStatus.OK:
            text = response.read(2000).decode(errors="replace")
            raise EngineError(f"{path} answered {response.status}: {text}")
        yield response
    except (OSError, http.client.HTTPException) as error:
        raise EngineError(f"{path} on port {port} was not answered to the end: {error!r}") from error
    finally:
        connection.close()
