"""Starts and stops `vllm-omni serve` for tests. Only processes started here are ever signalled, by handle."""

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.margins import COMPLETION, QUESTION

READY_TIMEOUT_S = 240.0
REQUEST_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 15.0
POLL_S = 0.1


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@dataclass(frozen=True)
class Answer:
    """Status, headers (lower-case names) and body of a response."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The `error` object of an OpenAI error body."""
        return dict(self.json()["error"])


class RunningServer:
    """One server process.

    Attributes:
        process: Its handle.
        port: Where it listens, on loopback.
        log: File with its stderr and stdout.
    """

    model = "smollm2"

    def __init__(self, process: subprocess.Popen[bytes], port: int, log: Path):
        self.process = process
        self.port = port
        self.log = log

    @classmethod
    def launch(
        cls, arguments: Sequence[str], log: Path, environment: Mapping[str, str] | None = None
    ) -> "RunningServer":
        """Starts the command line without waiting for it to be ready."""
        port = free_port()
        command = [sys.executable, "-m", "vllm_omni.entrypoints.cli.main", "serve", *arguments, "--port", str(port)]
        with log.open("wb") as output:
            process = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, **(environment or {})}
            )
        return cls(process, port, log)

    @classmethod
    def start(
        cls, arguments: Sequence[str], log: Path, environment: Mapping[str, str] | None = None
    ) -> "RunningServer":
        """Starts the command line and waits until it is ready."""
        server = cls.launch(arguments, log, environment)
        server.wait_ready()
        return server

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def wait_ready(self) -> None:
        deadline = time.monotonic() + READY_TIMEOUT_S
        while time.monotonic() < deadline:
            assert self.process.poll() is None, f"the server exited with {self.process.returncode}:\n{self.tail()}"
            if self.is_ready():
                return
            time.sleep(POLL_S)
        self.stop()
        raise AssertionError(f"not ready after {READY_TIMEOUT_S} s:\n{self.tail()}")

    def is_ready(self) -> bool:
        try:
            return self.get("/health/ready").status == 200
        except OSError:
            return False

    def tail(self, num_lines: int = 60) -> str:
        """The end of the log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-num_lines:])

    def stop(self) -> int:
        """Ends the process by SIGTERM, by SIGKILL when that does not help, and returns its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()

    @contextmanager
    def open(
        self, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> Iterator[http.client.HTTPResponse]:
        """One request; the response is left to be read, and the connection is closed with the block."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=REQUEST_TIMEOUT_S)
        try:
            connection.request(method, path, body, dict(headers or {}))
            yield connection.getresponse()
        finally:
            connection.close()

    def request(
        self, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> Answer:
        with self.open(method, path, body, headers) as response:
            fields = {name.lower(): value for name, value in response.getheaders()}
            return Answer(response.status, fields, response.read())

    def get(self, path: str) -> Answer:
        return self.request("GET", path)

    def post(self, path: str, body: Any, headers: Mapping[str, str] | None = None) -> Answer:
        """POSTs `body` as JSON; bytes are sent as they are."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.request("POST", path, content, {"content-type": "application/json", **(headers or {})})

    def complete(self, prompt: str = COMPLETION.text, **fields: Any) -> Answer:
        """A short completion."""
        body = {"model": self.model, "prompt": prompt, "max_tokens": 4, "temperature": 0, **fields}
        return self.post("/v1/completions", body)

    def chat(self, text: str = QUESTION.text, **fields: Any) -> Answer:
        """A short chat completion."""
        message = {"role": "user", "content": text}
        body = {"model": self.model, "messages": [message], "max_tokens": 16, "temperature": 0, **fields}
        return self.post("/v1/chat/completions", body)

    @contextmanager
    def stream(self, path: str = "/v1/completions", **fields: Any) -> Iterator[http.client.HTTPResponse]:
        """An open stream; leaving the block early is a client that vanishes."""
        body = {"model": self.model, "prompt": "Once upon a time", "stream": True, "temperature": 0, **fields}
        headers = {"content-type": "application/json"}
        with self.open("POST", path, json.dumps(body).encode(), headers) as response:
            yield response

    def num_requests(self) -> int:
        """Requests in flight, as `/health` reports them."""
        return int(self.get("/health").json()["num_requests"])

    def wait_idle(self, timeout_s: float = 10.0) -> None:
        """Waits until the engine has no request; fails when that takes longer."""
        deadline = time.monotonic() + timeout_s
        while self.num_requests():
            assert time.monotonic() < deadline, f"requests are still in flight:\n{self.tail()}"
            time.sleep(POLL_S)

    def assert_serves(self) -> None:
        """The server is ready and answers a question on which every numeric path agrees."""
        assert self.get("/health/ready").status == 200
        answer = self.chat()
        assert answer.status == 200, answer.body
        assert QUESTION.answer in answer.json()["choices"][0]["message"]["content"]


def read_events(response: http.client.HTTPResponse) -> Iterator[Any]:
    """Decoded `data:` lines of a stream, without the final `[DONE]`."""
    for line in response:
        if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
            yield json.loads(line.removeprefix(b"data: "))
