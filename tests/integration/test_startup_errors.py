"""What the user can have got wrong at start: exit code 2 within seconds, a precise message, and no torch."""

import json
import os
import shutil
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import pytest

LIMIT_S = 2.0
# Runs the command line, then says which heavy packages it loaded and how much processor time it took, which other work
# on the machine does not stretch.
SCRIPT = """
import sys, time
from vllm_omni.entrypoints.cli.main import main
code = main(sys.argv[1:])
print("loaded:", sorted({"torch", "vllm", "transformers"} & sys.modules.keys()))
print(time.process_time())
sys.exit(code)
"""
Header = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Outcome:
    code: int
    message: str


def serve(*arguments: str) -> Outcome:
    """Runs `serve` in a fresh process that is expected to refuse its input, on any free port unless one is given."""
    command = [sys.executable, "-c", SCRIPT, "serve", "--port", "0", *arguments]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert "Traceback" not in run.stderr
    loaded, processor_s = run.stdout.strip().splitlines()[-2:]
    assert loaded == "loaded: []"
    assert float(processor_s) < LIMIT_S
    last = run.stderr.strip().splitlines()[-1]
    assert last.startswith("vllm-omni serve: error: "), run.stderr
    return Outcome(run.returncode, last)


def expect_error(arguments: Sequence[str], *parts: str) -> None:
    outcome = serve(*arguments, "--deploy-profile", "edge")
    assert outcome.code == 2
    for part in parts:
        assert part in outcome.message


def copy_of(model: Path, directory: Path, *, without: Sequence[str]) -> Path:
    """The model's directory by links, less the named files."""
    directory.mkdir()
    for path in model.iterdir():
        if path.name not in without:
            (directory / path.name).symlink_to(path)
    return directory


def read_header(path: Path) -> Header:
    with path.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        header = json.loads(stream.read(length))
    header.pop("__metadata__", None)
    return dict(sorted(header.items(), key=lambda item: item[1]["data_offsets"]))


def write_shard(path: Path, header: Header) -> None:
    """A shard of these tensors whose data is a hole in the file."""
    position = 0
    for entry in header.values():
        num_bytes = prod(entry["shape"]) * {"BF16": 2, "F16": 2, "F32": 4}[entry["dtype"]]
        entry["data_offsets"] = [position, position + num_bytes]
        position += num_bytes
    content = json.dumps(header).encode()
    with path.open("wb") as stream:
        stream.write(struct.pack("<Q", len(content)) + content)
        stream.truncate(8 + len(content) + position)


def changed_model(model: Path, directory: Path, change: Callable[[Header], None]) -> Path:
    """The model with changed tensors and without its conversion record."""
    copy_of(model, directory, without=("model.safetensors", "conversion.json"))
    header = read_header(model / "model.safetensors")
    change(header)
    write_shard(directory / "model.safetensors", header)
    return directory


def test_a_flipped_byte(smollm2: Path, tmp_path: Path) -> None:
    model = copy_of(smollm2, tmp_path / "flipped", without=("model.safetensors",))
    shard = model / "model.safetensors"
    shutil.copyfile(smollm2 / "model.safetensors", shard)
    with shard.open("r+b") as stream:
        stream.seek(-1000, os.SEEK_END)
        (value,) = stream.read(1)
        stream.seek(-1000, os.SEEK_END)
        stream.write(bytes([value ^ 1]))
    expect_error([str(model)], str(model), "model.safetensors has sha256 ", ", recorded ", "Convert the source again")


def test_a_truncated_shard(smollm2: Path, tmp_path: Path) -> None:
    model = changed_model(smollm2, tmp_path / "truncated", lambda header: None)
    shard = model / "model.safetensors"
    complete_bytes = shard.stat().st_size
    with shard.open("r+b") as stream:
        stream.truncate(complete_bytes - 4096)
    expect_error([str(model)], str(shard), str(complete_bytes - 4096))


def test_a_missing_tensor(smollm2: Path, tmp_path: Path) -> None:
    name = "model.layers.3.mlp.up_proj.weight"
    model = changed_model(smollm2, tmp_path / "missing", lambda header: header.pop(name) and None)
    expect_error([str(model)], str(model), "missing", name)


def test_an_unexpected_tensor(smollm2: Path, tmp_path: Path) -> None:
    extra = {"dtype": "BF16", "shape": [4, 4], "data_offsets": [0, 0]}
    name = "model.layers.3.mlp.side_proj.weight"
    model = changed_model(smollm2, tmp_path / "unexpected", lambda header: header.update({name: extra}))
    expect_error([str(model)], str(model), "unexpected", name)


def test_a_wrong_shape(smollm2: Path, tmp_path: Path) -> None:
    name = "model.layers.3.mlp.up_proj.weight"

    def narrow(header: Header) -> None:
        header[name]["shape"] = [1535, 576]

    model = changed_model(smollm2, tmp_path / "shape", narrow)
    expect_error([str(model)], str(model), name, "1535", "1536")


def test_a_missing_directory(tmp_path: Path) -> None:
    missing = tmp_path / "nowhere"
    expect_error([str(missing)], str(missing))


def test_a_directory_without_a_model(tmp_path: Path) -> None:
    expect_error([str(tmp_path)], str(tmp_path), "config.json")


def test_a_gguf_file_names_the_command_that_converts_it(smollm2_gguf: Path) -> None:
    expect_error([str(smollm2_gguf)], smollm2_gguf.name, "vllm-omni convert")


def test_an_unknown_profile_lists_what_exists(smollm2: Path) -> None:
    outcome = serve(str(smollm2), "--deploy-profile", "cloud")
    assert outcome.code == 2
    assert "'cloud'" in outcome.message
    assert "edge" in outcome.message


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (["--max-nun-seqs", "2"], ["--max-nun-seqs", "max_num_seqs"]),
        (["--max-num-seqs", "0"], ["max_num_seqs", "0"]),
        (["--max-num-seqs", "many"], ["max_num_seqs", "many"]),
        (["--kv-cache-memory-bytes", "5 parsecs"], ["kv_cache_memory_bytes", "GiB"]),
        (["--enable-lora"], ["enable_lora", "merge the adapter"]),
    ],
)
def test_wrong_flags(smollm2: Path, flags: list[str], parts: list[str]) -> None:
    expect_error([str(smollm2), *flags], *parts)


def test_a_port_in_use_is_found_before_a_checkpoint_is_packed(
    smollm2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_OMNI_CACHE_DIR", str(tmp_path))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        expect_error([str(smollm2), "--port", port], f"127.0.0.1:{port}", "in use", "--port")
    assert list(tmp_path.iterdir()) == []


def test_an_address_of_another_machine(smollm2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_OMNI_CACHE_DIR", str(tmp_path))
    expect_error([str(smollm2), "--host", "192.0.2.1"], "192.0.2.1", "--host")
