"""What is measured on one server that has become ready; the answer is checked before anything is timed.

Token ids are drawn at random but the same in both arms, and no prompt is sent twice in a run, so that the prefix cache
of neither server has anything to offer.
"""

import random
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any

from benchmarks.edge_harness.process_tree import busy_percent, clock_ticks_per_s, rss_anon_bytes
from benchmarks.edge_harness.server_process import ServerProcess
from benchmarks.edge_harness.streaming_client import chat, combined_decode_rate, complete
from vllm_omni.errors import EngineError

DECODE_PROMPT_TOKENS = 32
DECODE_NEW_TOKENS = 128
PREFILL_PROMPT_TOKENS = 512
CHAT_NEW_TOKENS = 32
# tests/margins.py measures that SmolLM2-135M-Instruct leads clearly at every token of the answer.
FIRST_QUESTION = "What is the capital of South Korea?"
EXPECTED_ANSWER = "Seoul"
SECOND_QUESTION = "What is the capital of South Africa?"
IDLE_SETTLE_S = 1.0
IDLE_WINDOW_S = 5.0
MIB = 1 << 20


@dataclass(frozen=True)
class Workload:
    """The requests of one round.

    Attributes:
        seed: Together with the round it determines every prompt.
        trials: Timed requests of each kind; one more of each kind is sent before, untimed.
        concurrency: Requests sent together in the concurrent trial.
        vocab_size: Of the model; prompts take ids from its middle, away from special tokens.
        depths: Lengths of context at which `bench_decode` times; empty: its usual short prompts, and decode from none.
    """

    seed: int
    trials: int
    concurrency: int
    vocab_size: int
    depths: tuple[int, ...] = ()

    def prompt(self, round_number: int, label: str, num_tokens: int) -> list[int]:
        """Token ids that depend on the arguments and the seed alone."""
        source = random.Random(f"{self.seed}/{round_number}/{label}")
        return [source.randrange(self.vocab_size // 10, self.vocab_size * 3 // 4) for _ in range(num_tokens)]


@dataclass
class Measurement:
    """One arm in one round.

    Attributes:
        values: One number for each metric; medians where there are several samples.
        samples: Every sample behind a median, in the order taken.
        notes: What ran: processes, the answer, what the server says of itself.
    """

    values: dict[str, float] = field(default_factory=dict)
    samples: dict[str, list[float]] = field(default_factory=dict)
    notes: dict[str, Any] = field(default_factory=dict)

    def add_samples(self, name: str, samples: list[float]) -> None:
        self.samples[name] = samples
        self.values[name] = statistics.median(samples)


def measure(server: ServerProcess, workload: Workload, round_number: int) -> Measurement:
    """Measures a server that has just become ready and has answered nothing yet.

    Raises:
        EngineError: The answer check failed, or a request did.
    """
    result = Measurement()
    _record_processes(server, result)
    result.values["rss_anon_ready_mib"] = rss_anon_bytes(server.tree()) / MIB
    _first_requests(server.port, result)
    _decode(server.port, workload, round_number, result)
    _prefill(server.port, workload, round_number, result)
    _concurrent_decode(server.port, workload, round_number, result)
    result.values["rss_anon_end_mib"] = rss_anon_bytes(server.tree()) / MIB
    result.values["idle_cpu_percent"] = _idle_percent(server)
    return result


def _record_processes(server: ServerProcess, result: Measurement) -> None:
    names = [process.name for process in server.tree()]
    result.values["num_processes"] = len(names)
    result.notes["processes"] = names


def _first_requests(port: int, result: Measurement) -> None:
    """The first request of all is also the answer check; the second has the same shape and another text."""
    answer, first_s = chat(port, FIRST_QUESTION, CHAT_NEW_TOKENS)
    result.notes["answer"] = answer
    if EXPECTED_ANSWER not in answer:
        raise EngineError(
            f"{FIRST_QUESTION!r} was answered {answer!r}, without {EXPECTED_ANSWER!r}; the speed of a wrong answer is "
            f"not reported. Give a model that was tuned for chat and answers within {CHAT_NEW_TOKENS} tokens"
        )
    _, second_s = chat(port, SECOND_QUESTION, CHAT_NEW_TOKENS)
    result.values |= {"first_request_s": first_s, "second_request_s": second_s, "first_over_second": first_s / second_s}


def _decode(port: int, workload: Workload, round_number: int, result: Measurement) -> None:
    streams = []
    for trial in range(workload.trials + 1):
        prompt = workload.prompt(round_number, f"decode/{trial}", DECODE_PROMPT_TOKENS)
        streams.append(complete(port, prompt, DECODE_NEW_TOKENS))
    timed = streams[1:]
    result.add_samples("ttft32_ms", [1000 * stream.ttft_s for stream in timed])
    result.add_samples("decode_tok_s", [stream.decode_tokens_per_s for stream in timed])


def _prefill(port: int, workload: Workload, round_number: int, result: Measurement) -> None:
    rates = []
    for trial in range(workload.trials + 1):
        prompt = workload.prompt(round_number, f"prefill/{trial}", PREFILL_PROMPT_TOKENS)
        rates.append(PREFILL_PROMPT_TOKENS / complete(port, prompt, 1).ttft_s)
    result.add_samples("pp512_tok_s", rates[1:])


def _concurrent_decode(port: int, workload: Workload, round_number: int, result: Measurement) -> None:
    rates = []
    with ThreadPoolExecutor(workload.concurrency) as clients:
        for trial in range(workload.trials + 1):
            prompts = [
                workload.prompt(round_number, f"concurrent/{trial}/{client}", DECODE_PROMPT_TOKENS)
                for client in range(workload.concurrency)
            ]
            streams = clients.map(complete, repeat(port), prompts, repeat(DECODE_NEW_TOKENS))
            rates.append(combined_decode_rate(list(streams)))
    result.add_samples("concurrent_decode_tok_s", rates[1:])


def _idle_percent(server: ServerProcess) -> float:
    time.sleep(IDLE_SETTLE_S)
    before, start = server.tree(), time.monotonic()
    time.sleep(IDLE_WINDOW_S)
    after, elapsed_s = server.tree(), time.monotonic() - start
    return busy_percent(before, after, elapsed_s, clock_ticks_per_s())
