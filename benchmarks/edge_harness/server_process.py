"""One server under test: starts it, waits until it is ready, and leaves none of its processes behind."""

import contextlib
import http.client
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from benchmarks.edge_harness.arms import HOST
from benchmarks.edge_harness.process_tree import Process, process_tree, read_process
from vllm_omni import envs
from vllm_omni.errors import EngineError

POLL_S = 0.05
LOOK_INTERVAL_S = 2.0
PROBE_TIMEOUT_S = 5.0
TERMINATE_TIMEOUT_S = 60.0
ORPHAN_TIMEOUT_S = 10.0
LOG_TAIL_LINES = 30


class ServerProcess:
    """A server and every process that was seen below it. Use as a context manager: leaving it stops them all.

    Args:
        command: Program and arguments.
        environment: Variables set in addition to the inherited ones.
        port: Where the server will listen.
        log_path: Takes its output. The directory is the server's working directory, so that it imports nothing from
            the caller's.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], port: int, log_path: Path):
        self.port = port
        self.log_path = log_path
        self.killed: list[str] = []
        self._seen: dict[tuple[int, int], Process] = {}
        self.started_at = time.monotonic()
        with log_path.open("wb") as log, envs.kept(environment):
            envs.export(environment)
            # A session of its own: Ctrl-C reaches this program alone, which then stops the server in order.
            self._popen = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, cwd=log_path.parent, start_new_session=True
            )

    def __enter__(self) -> "ServerProcess":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def tree(self) -> list[Process]:
        """The server's processes now. Those seen in any call are stopped in the end, even when their parent is gone."""
        if self._popen.poll() is not None:
            return []  # its number may belong to another program by now
        processes = process_tree(self._popen.pid)
        self._seen.update({process.identity: process for process in processes})
        return processes

    def wait_ready(self, path: str, timeout_s: float) -> float:
        """Seconds from the start of the process to the first 200 of `path`.

        Raises:
            EngineError: The server ended, or was not ready in `timeout_s`; the message holds the end of its log.
        """
        next_look_s = 0.0
        while not self._answers(path):
            elapsed_s = time.monotonic() - self.started_at
            if elapsed_s >= next_look_s:
                self.tree()  # should the server die now, its children are known
                next_look_s = elapsed_s + LOOK_INTERVAL_S
            code = self._popen.poll()
            if code is not None:
                raise EngineError(f"the server ended with code {code} before it was ready{self._tail()}")
            if elapsed_s > timeout_s:
                raise EngineError(f"the server was not ready in {timeout_s:.0f} s; raise --ready-timeout{self._tail()}")
            time.sleep(POLL_S)
        return time.monotonic() - self.started_at

    def _answers(self, path: str) -> bool:
        connection = http.client.HTTPConnection(HOST, self.port, timeout=PROBE_TIMEOUT_S)
        try:
            connection.request("GET", path)
            return connection.getresponse().status == http.HTTPStatus.OK
        except (OSError, http.client.HTTPException):
            return False  # not listening yet, or busy: what wait_ready waits for
        finally:
            connection.close()

    def log_text(self) -> str:
        """What the server has written so far."""
        return self.log_path.read_text(errors="replace")

    def _tail(self) -> str:
        return "; the end of its output:\n" + "\n".join(self.log_text().splitlines()[-LOG_TAIL_LINES:])

    def stop(self) -> None:
        """Ends the server with SIGTERM, and with SIGKILL what is left of it, whose names are then in `killed`."""
        self.tree()
        if self._popen.poll() is None:
            self._popen.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):  # what outlives the wait is killed below
            self._popen.wait(TERMINATE_TIMEOUT_S)
        deadline = time.monotonic() + ORPHAN_TIMEOUT_S
        while self._alive() and time.monotonic() < deadline:
            time.sleep(POLL_S)
        for process in self._alive():
            self.killed.append(process.name)
            with contextlib.suppress(ProcessLookupError):  # ended by itself meanwhile
                os.kill(process.pid, signal.SIGKILL)
        self._popen.wait()

    def _alive(self) -> list[Process]:
        current = ((process, read_process(process.pid)) for process in self._seen.values())
        return [process for process, now in current if now is not None and now.identity == process.identity]
