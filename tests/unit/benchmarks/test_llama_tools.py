from pathlib import Path

import pytest

from benchmarks.edge_harness.llama_tools import fidelity_command, parse_fidelity, quantize_command, tool
from vllm_omni.errors import ConfigError, EngineError

# The form of b11434; the numbers are made up.
PRINTED = """
====== Perplexity statistics ======
Mean PPL(Q)                   :  20.500000 ±   0.210000
Mean PPL(base)                :  19.250000 ±   0.200000
Mean PPL(Q)/PPL(base)         :   1.064935 ±   0.001000

====== KL divergence statistics ======
Mean    KLD:   0.062500 ±   0.000750
Maximum KLD:   4.500000
99.9%   KLD:   1.250000
99.0%   KLD:   0.500000
Median  KLD:   0.030000

====== Token probability statistics ======
Same top p: 87.500 ± 0.125 %
"""


def test_the_numbers_are_found_by_their_lines() -> None:
    found = parse_fidelity(PRINTED, 1000)
    assert found.as_dict() == {
        "num_tokens": 1000,
        "perplexity": 20.5,
        "perplexity_error": 0.21,
        "base_perplexity": 19.25,
        "mean_kl": 0.0625,
        "mean_kl_error": 0.00075,
        "p99_kl": 0.5,
        "same_top_percent": 87.5,
        "same_top_error": 0.125,
    }


def test_a_negative_mean_of_a_model_close_to_its_base_is_read() -> None:
    assert parse_fidelity(PRINTED.replace("0.062500", "-0.000002"), 1).mean_kl == -0.000002


def test_a_missing_line_is_an_error() -> None:
    with pytest.raises(EngineError, match="Same top p"):
        parse_fidelity(PRINTED.partition("Same")[0], 1000)


def test_commands_hold_what_was_asked() -> None:
    quantize = quantize_command(Path("q"), Path("in"), Path("out"), "Q4_0", 2)
    assert quantize == ["q", "in", "out", "Q4_0", "2"]
    judge = " ".join(fidelity_command(Path("p"), Path("m"), Path("base"), 512, 2))
    assert judge == "p --kl-divergence -m m --kl-divergence-base base -c 512 -b 512 -t 2"


def test_a_missing_program_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="llama-quantize does not exist"):
        tool(tmp_path, "llama-quantize")
