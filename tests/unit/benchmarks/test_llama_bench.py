import json
from pathlib import Path

import pytest

from benchmarks.edge_harness.llama_bench import load_command, parse_report, timing_commands
from benchmarks.edge_harness.measurement import Workload
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


def test_samples_at_a_depth_have_names_of_their_own() -> None:
    report = parse_report(json.dumps([entry(0, 64, [8.0]) | {"n_depth": 4096}, entry(0, 64, [16.0])]))
    assert report.samples == {"tg64_d4096_tok_s": [8.0], "tg64_tok_s": [16.0]}


@pytest.mark.parametrize("text", ["", "[]", "error: no model", '[{"n_prompt": 1}]'])
def test_anything_else_is_an_error(text: str) -> None:
    with pytest.raises(EngineError, match="llama-bench reported"):
        parse_report(text)


def test_commands_state_threads_tests_and_repetitions() -> None:
    program, model = Path("/bin/llama-bench"), Path("m.gguf")
    (timing,) = timing_commands(program, model, 2, Workload(0, 3, 1, 100))
    assert " ".join(timing) == "/bin/llama-bench -m m.gguf -t 2 -p 128,512 -n 64 -r 3 -o json"
    prefill, decode = timing_commands(program, model, 2, Workload(0, 3, 1, 100, (512, 4096)))
    assert " ".join(prefill) == "/bin/llama-bench -m m.gguf -t 2 -p 512,4096 -n 0 -r 3 -o json"
    assert " ".join(decode) == "/bin/llama-bench -m m.gguf -t 2 -p 0 -n 64 -d 512,4096 -r 3 -o json"
    assert "--no-warmup" in load_command(Path("/bin/llama-bench"), Path("m.gguf"), 2)
