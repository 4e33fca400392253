"""`vllm-omni serve` and `llama-server` as arms of `bench_decode`: the same prompts, streamed over HTTP.

llama-server states no token count with each chunk, but sends one chunk a token; the counts that it states at the end
must agree. Vocabularies of made models are ASCII, so that no token waits for the rest of a character.
"""

import json
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.edge_harness.arms import HOST, SERVED_MODEL_NAME, console_script, free_port
from benchmarks.edge_harness.decode_work import (
    DECODE_NAME,
    NEW_TOKENS,
    PROMPT_LENGTHS,
    add_depth,
    add_weight_rate,
    depth_prompts,
    medians,
    prefill_name,
    warm_up_prompt,
)
from benchmarks.edge_harness.measurement import MIB, Measurement, Workload
from benchmarks.edge_harness.process_tree import rss_anon_bytes
from benchmarks.edge_harness.server_process import ServerProcess
from benchmarks.edge_harness.streaming_client import (
    TimedLine,
    TokenStream,
    answered,
    complete,
    completion_body,
    parse_events,
)
from vllm_omni.errors import EngineError

DECODE_PROMPT_TOKENS = 32
READY_TIMEOUT_S = 600.0
Complete = Callable[[int, Sequence[int], int], TokenStream]


@dataclass(frozen=True)
class ServerArm:
    """One server.

    Attributes:
        name: Of the arm.
        words: Its command without the port.
        ready_path: Answers 200 when requests are served, and not before.
        environment: Variables set for it.
        complete: Sends one request and gives the arrivals of its tokens.
        weight_bytes: Bytes of weights that a decoded token reads.
    """

    name: str
    words: tuple[str, ...]
    ready_path: str
    environment: dict[str, str]
    complete: Complete
    weight_bytes: int

    def commands(self, work: Workload) -> list[list[str]]:
        return [[*self.words, "--port", "PORT"]]

    def measure(self, work: Workload, directory: Path) -> Measurement:
        port = free_port()
        home = directory / self.name.replace(" ", "-")
        home.mkdir()
        with ServerProcess([*self.words, "--port", str(port)], self.environment, port, home / "log.txt") as server:
            found = Measurement(notes={"weight_bytes_per_token": self.weight_bytes})
            found.values["ready_s"] = server.wait_ready(self.ready_path, READY_TIMEOUT_S)
            found.values["rss_anon_ready_mib"] = rss_anon_bytes(server.tree()) / MIB
            found.samples = self._samples(port, work)
            found.values |= medians(found.samples)
            found.values["rss_anon_end_mib"] = rss_anon_bytes(server.tree()) / MIB
        add_weight_rate(found, self.weight_bytes)
        return found

    def _samples(self, port: int, work: Workload) -> dict[str, list[float]]:
        """Tokens a second of each trial; one trial of each kind before is not timed."""
        if work.depths:
            return self._samples_at_depths(port, work)
        samples: dict[str, list[float]] = {}
        for length in PROMPT_LENGTHS:
            prompts = [work.prompt(0, f"prefill/{length}/{trial}", length) for trial in range(work.trials + 1)]
            samples[prefill_name(length)] = [length / self.complete(port, prompt, 1).ttft_s for prompt in prompts][1:]
        prompts = [work.prompt(0, f"decode/{trial}", DECODE_PROMPT_TOKENS) for trial in range(work.trials + 1)]
        streams = [self.complete(port, prompt, NEW_TOKENS + 1) for prompt in prompts]
        samples[DECODE_NAME] = [each.decode_tokens_per_s for each in streams][1:]
        return samples

    def _samples_at_depths(self, port: int, work: Workload) -> dict[str, list[float]]:
        """The same of prompts of each depth and the tokens that follow them; one short prompt before is not timed."""
        samples: dict[str, list[float]] = {}
        self.complete(port, warm_up_prompt(work), 1)
        for depth, prompt in depth_prompts(work):
            stream = self.complete(port, prompt, NEW_TOKENS + 1)
            add_depth(samples, depth, depth / stream.ttft_s, stream.decode_tokens_per_s)
        return samples


def omni_server(model: Path, threads: int, weight_bytes: int, length: int, kv_bytes: int) -> ServerArm:
    """`vllm-omni serve` of this environment under the edge profile."""
    words: tuple[str, ...] = (
        str(console_script(Path(sys.executable))),
        "serve",
        str(model),
        "--deploy-profile",
        "edge",
    )
    words += ("--served-model-name", SERVED_MODEL_NAME, "--host", HOST, "--max-model-len", str(length))
    words += ("--kv-cache-memory-bytes", str(kv_bytes)) if kv_bytes else ()
    return ServerArm("serve", words, "/health/ready", {"VLLM_OMNI_NUM_THREADS": str(threads)}, complete, weight_bytes)


def llama_server(name: str, program: Path, gguf: Path, threads: int, weight_bytes: int, length: int) -> ServerArm:
    """`llama-server` with one slot of the same length."""
    words = (str(program), "-m", str(gguf), "-t", str(threads), "--host", HOST, "-c", str(length), "-np", "1")
    return ServerArm(name, words, "/health", {}, complete_counted, weight_bytes)


def complete_counted(port: int, prompt_ids: Sequence[int], max_tokens: int) -> TokenStream:
    """Streams one completion of a server that sends one chunk a token, and checks its own counts.

    Raises:
        EngineError: The server refused, failed, or counted other tokens than were asked for.
    """
    body = completion_body(prompt_ids, max_tokens) | {"cache_prompt": False}
    sent_ns = time.monotonic_ns()
    with answered(port, "POST", "/v1/completions", json.dumps(body)) as response:
        lines = [(time.monotonic_ns(), line) for line in response]
    stream, counted = read_counted_stream(sent_ns, lines)
    asked = (len(prompt_ids), max_tokens)
    if (stream.prompt_tokens, counted) != asked or stream.num_tokens != max_tokens:
        raise EngineError(
            f"(prompt, new) tokens were {(stream.prompt_tokens, counted)} in {stream.num_tokens} chunks, asked for "
            f"were {asked}; such a time compares nothing"
        )
    return stream


def read_counted_stream(sent_ns: int, lines: Iterable[TimedLine]) -> tuple[TokenStream, int]:
    """The arrivals of a stream of one token a chunk, and the number of tokens that the server states at its end.

    Raises:
        EngineError: As `parse_events`; no chunk brought text, or no count was stated.
    """
    arrivals: list[tuple[int, int]] = []
    usage: dict[str, int] | None = None
    for arrived_ns, event in parse_events(lines):
        usage = event.get("usage") or usage
        if event.get("choices") and event["choices"][0].get("text"):
            arrivals.append((arrived_ns, len(arrivals) + 1))
    if not arrivals or usage is None:
        raise EngineError(f"the stream brought {len(arrivals)} chunks of text and the usage {usage}; both are needed")
    return TokenStream(sent_ns, tuple(arrivals), usage["prompt_tokens"]), usage["completion_tokens"]
