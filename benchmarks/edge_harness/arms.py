"""The two servers that are compared, as commands: the same flags, ports chosen by the system, separate environments."""

import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

HOST = "127.0.0.1"
SERVED_MODEL_NAME = "bench"
# Where a first start leaves compiled code and converted weights for the next one.
CACHE_VARIABLES = ("VLLM_CACHE_ROOT", "XDG_CACHE_HOME", "TORCHINDUCTOR_CACHE_DIR", "VLLM_OMNI_CACHE_DIR")


@dataclass(frozen=True)
class Settings:
    """What both servers are told.

    Attributes:
        model: Checkpoint directory, absolute.
        dtype: Value of `--dtype`.
        kv_bytes: Key/value cache of either server in bytes.
        max_num_seqs: Requests computed together; the concurrent trial sends as many.
        max_num_batched_tokens: Most tokens of one step.
        max_model_len: Longest sequence in tokens; None leaves it to each server.
    """

    model: Path
    dtype: str
    kv_bytes: int
    max_num_seqs: int = 4
    max_num_batched_tokens: int = 2048
    max_model_len: int | None = None

    def flags(self) -> list[str]:
        """The flags that both servers share."""
        flags = {
            "--served-model-name": SERVED_MODEL_NAME,
            "--host": HOST,
            "--dtype": self.dtype,
            "--kv-cache-memory-bytes": self.kv_bytes,
            "--max-num-seqs": self.max_num_seqs,
            "--max-num-batched-tokens": self.max_num_batched_tokens,
        }
        if self.max_model_len is not None:
            flags["--max-model-len"] = self.max_model_len
        return [str(word) for pair in flags.items() for word in pair]


@dataclass(frozen=True)
class Arm:
    """One server.

    Attributes:
        name: As typed after `--arms`, and the column of the table.
        ready_path: Answers 200 when requests are served, and not before.
        environment: Variables set for this server only.
    """

    name: str
    ready_path: str
    environment: Mapping[str, str]


EDGE = Arm("edge", "/health/ready", MappingProxyType({}))
# An empty list of plugins keeps this package's platform and models out of the stock server.
STOCK = Arm("stock", "/health", MappingProxyType({"VLLM_PLUGINS": ""}))
ARMS: Mapping[str, Arm] = MappingProxyType({arm.name: arm for arm in (EDGE, STOCK)})


def console_script(python: Path) -> Path:
    """The `vllm-omni` command of the environment of `python`; links are not followed, so a venv keeps its own."""
    return python.parent / "vllm-omni"


def server_command(arm: Arm, settings: Settings, port: int, python: Path) -> list[str]:
    """The command that starts `arm` on `port` with the interpreter `python`."""
    if arm is EDGE:
        # Both servers compute with the same weights.
        start = [str(console_script(python)), "serve", str(settings.model), "--deploy-profile", "edge"]
        start += ["--quantization", "none"]
    else:
        # The `vllm serve` script of the CPU build cannot start; its server module can.
        start = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(settings.model)]
    return [*start, "--port", str(port), *settings.flags()]


def cache_environment(directory: Path) -> dict[str, str]:
    """Variables that move every cache of either server below `directory`."""
    return {name: str(directory / name.lower()) for name in CACHE_VARIABLES}


def free_port() -> int:
    """A port that nobody listened on a moment ago."""
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        return listener.getsockname()[1]
