"""Starts the server, asks it a question through the `openai` client, prints the answer as it arrives, stops the server.

python examples/demo.py --model models/SmolLM2-135M-Instruct-int4
"""

import argparse
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

from openai import OpenAI

READY_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 15.0


def free_port() -> int:
    """A TCP port on loopback that was free a moment ago."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def wait_ready(server: subprocess.Popen[bytes], url: str) -> float:
    """Seconds until the server is ready; ends the program when it is not."""
    start = time.monotonic()
    while time.monotonic() - start < READY_TIMEOUT_S:
        if server.poll() is not None:
            sys.exit(f"the server ended with exit code {server.returncode}; its messages are above")
        try:
            with urllib.request.urlopen(f"{url}/health/ready"):
                return time.monotonic() - start
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    sys.exit(f"the server was not ready after {READY_TIMEOUT_S:g} s; its messages are above")


def ask(url: str, model: str, question: str) -> str:
    """Streams one answer to stdout and prints its time to first token and rate. Returns the text."""
    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    start = time.monotonic()
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": question}],
        max_tokens=64,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    pieces, arrivals, num_tokens = [], [], 0
    for chunk in stream:
        if chunk.usage is not None:
            num_tokens = chunk.usage.completion_tokens
        if chunk.choices and chunk.choices[0].delta.content:
            arrivals.append(time.monotonic())
            pieces.append(chunk.choices[0].delta.content)
            print(pieces[-1], end="", flush=True)
    print()
    if not pieces:
        sys.exit("the server sent no text")
    decode_s = arrivals[-1] - arrivals[0]
    rate = f"{(num_tokens - 1) / decode_s:.1f} tok/s" if decode_s > 0 and num_tokens > 1 else "too short for a rate"
    print(f"\nTTFT {1000 * (arrivals[0] - start):.0f} ms, decode {rate}, {num_tokens} tokens")
    return "".join(pieces)


def stop(server: subprocess.Popen[bytes]) -> int:
    """Ends the server, in order if it can, and returns its exit code."""
    server.send_signal(signal.SIGTERM)
    try:
        return server.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        server.kill()
        return server.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="checkpoint directory")
    parser.add_argument("--question", default="What is the capital of South Korea?")
    parser.add_argument("--expect", default="Seoul", help="text that the answer must contain")
    args = parser.parse_args()
    port = free_port()
    command = [sys.executable, "-m", "vllm_omni.entrypoints.cli.main", "serve", str(args.model)]
    server = subprocess.Popen([*command, "--deploy-profile", "edge", "--port", str(port)])
    try:
        url = f"http://127.0.0.1:{port}"
        print(f"ready after {wait_ready(server, url):.1f} s\n\n> {args.question}")
        answer = ask(url, args.model.name, args.question)
    finally:
        code = stop(server)
    if args.expect not in answer:
        sys.exit(f"the answer does not contain {args.expect!r}")
    if code != 0:
        sys.exit(f"the server ended with exit code {code}")


if __name__ == "__main__":
    main()
