import json
from pathlib import Path

import pytest

from benchmarks.edge_harness.llama_bench import load_command, parse_report, timing_command
from vllm_omni.errors import EngineError


def entry(num_prompt: int, num_new: int, rates: list[float]) -> dict[str, object]:
    return {
        "n_prompt": num_prompt,
        "n_gen": num_new,
        "samples_ts": rates,
        "samples_ns": [1e9 * max(num_prompt, num_new) / rate for rate in rates],
        "model_size": 1000,
        "build_number": 11434,
        "build_commit": "pypi",
        "backends": "CPU",
        "type_k": "f16",
        "type_v": "f16",
    }


def test_samples_are_found_by_the_names_of_the_tests() -> None:
    report = parse_report(json.dumps([entry(128, 0, [64.0]), entry(512, 0, [128.0]), entry(0, 64, [8.0, 16.0])]))
    assert report.samples == {"pp128_tok_s": [64.0], "pp512_tok_s": [128.0], "tg64_tok_s": [8.0, 16.0]}
    assert report.seconds == pytest.approx(2 + 4 + 8 + 4)
    assert report.weight_bytes == 1000
    assert report.build["build_number"] == 11434


@pytest.mark.parametrize("text", ["", "[]", "error: no model", '[{"n_prompt": 1}]'])
def test_anything_else_is_an_error(text: str) -> None:
    with pytest.raises(EngineError, match="llama-bench reported"):
        parse_report(text)


def test_commands_state_threads_tests_and_repetitions() -> None:
    timing = " ".join(timing_command(Path("/bin/llama-bench"), Path("m.gguf"), 2, 3))
    assert timing == "/bin/llama-bench -m m.gguf -t 2 -p 128,512 -n 64 -r 3 -o json"
    assert "--no-warmup" in load_command(Path("/bin/llama-bench"), Path("m.gguf"), 2)
