"""Compares `vllm-omni serve --deploy-profile edge` with the stock vLLM server on this machine.

    python -m benchmarks.edge_harness.serve_compare --model DIR [--rounds 3] [--trials 5] [--cold] [--out results.json]

Run it from the root of the repository, with nothing else on the machine. A table comes first, one JSON line last;
progress goes to stderr. `benchmarks/README.md` says what each number is and what is not measured.
"""

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.edge_harness.arms import ARMS, CACHE_VARIABLES, EDGE, Arm, Settings, console_script
from benchmarks.edge_harness.command_line import parse_names, positive_int, run_program
from benchmarks.edge_harness.comparison import Comparison, Plan
from benchmarks.edge_harness.measurement import Workload
from benchmarks.edge_harness.provenance import collect_provenance
from benchmarks.edge_harness.report import format_facts, format_table, summarize, table_rows
from vllm_omni.errors import ConfigError, OmniError

MODULE = "benchmarks.edge_harness.serve_compare"
COLD_NOTE = (
    f"before each measured start, one with new and empty {', '.join(CACHE_VARIABLES)}; "
    "the system's page cache and Python's byte code stay"
)


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {MODULE}", description="Compare the edge profile with the stock vLLM server on this machine."
    )
    add = parser.add_argument
    add("--model", type=Path, required=True, metavar="DIR", help="checkpoint directory of a chat model")
    add("--arms", type=parse_arms, default=",".join(ARMS), help="servers to run, in turn (default %(default)s)")
    add("--rounds", type=positive_int, default=3, help="measured starts of each server (default %(default)s)")
    add("--trials", type=positive_int, default=5, help="timed requests of each kind a round (default %(default)s)")
    add("--dtype", default="float32", help="of both servers (default %(default)s)")
    add("--kv-bytes", type=positive_int, default=512 << 20, help="key/value cache of either (default %(default)s)")
    add("--max-model-len", type=positive_int, help="of both servers (default: what each chooses)")
    add("--cold", action="store_true", help=COLD_NOTE)
    add("--seed", type=int, default=0, help="determines the prompts (default %(default)s)")
    add("--ready-timeout", type=positive_int, default=900, metavar="S", help="bound on one start (default %(default)s)")
    add("--out", type=Path, metavar="JSON", help="file for raw samples, rewritten after every measurement")
    return parser


def parse_arms(text: str) -> list[Arm]:
    """The servers named in `text`, in that order, each once."""
    return [ARMS[name] for name in parse_names(text, ARMS, "server")]


def vocab_size(model: Path) -> int:
    """Number of token ids of the checkpoint.

    Raises:
        ConfigError: The directory has no `config.json`, or that states no size.
    """
    path = model / "config.json"
    if not path.is_file():
        raise ConfigError(f"--model {model} has no config.json; give a checkpoint directory")
    config = json.loads(path.read_text())
    size = config.get("vocab_size") or config.get("text_config", {}).get("vocab_size")
    if not size:
        raise ConfigError(f"{path} states no vocab_size, and the random prompts are drawn from it; add it to the file")
    return int(size)


def make_plan(args: argparse.Namespace, python: Path) -> Plan:
    """What the command line asks for.

    Raises:
        ConfigError: The model or the `vllm-omni` command is missing.
    """
    if EDGE in args.arms and not console_script(python).is_file():
        raise ConfigError(f"{console_script(python)} does not exist; use the Python of the environment with vllm-omni")
    settings = Settings(args.model.resolve(), args.dtype, args.kv_bytes, max_model_len=args.max_model_len)
    workload = Workload(args.seed, args.trials, settings.max_num_seqs, vocab_size(args.model))
    return Plan(args.arms, settings, workload, args.rounds, args.cold, args.ready_timeout, python)


def settings_facts(plan: Plan) -> dict[str, Any]:
    """What both servers were told and what was sent, for the report."""
    given = asdict(plan.settings) | {"model": str(plan.settings.model)}
    given["max_model_len"] = plan.settings.max_model_len or "what each server chooses"
    facts = {"rounds": plan.rounds, **given, **asdict(plan.workload)}
    return facts | ({"cold_start": COLD_NOTE} if plan.is_cold else {})


def print_report(comparison: Comparison) -> None:
    """Table, facts, and the same as one JSON line."""
    rounds = comparison.rounds()
    print(format_table(table_rows(rounds)), end="\n\n")
    for facts in comparison.facts.values():
        print(format_facts(facts), end="\n\n")
    print(json.dumps({**comparison.facts, "summary": summarize(rounds)}))


def run(args: argparse.Namespace, words: Sequence[str]) -> None:
    """Measures and prints the report.

    Raises:
        OmniError: The input is wrong, or a server failed.
    """
    python = Path(sys.executable)
    plan = make_plan(args, python)
    facts = {
        "provenance": collect_provenance([str(python), "-m", MODULE, *words]),
        "settings": settings_facts(plan),
    }
    scratch = Path(tempfile.mkdtemp(prefix="serve-compare-"))
    comparison = Comparison(plan, facts, scratch, args.out)
    try:
        comparison.run()
    except OmniError:
        print(f"serve_compare: the output of the servers is kept in {scratch}", file=sys.stderr)
        raise
    shutil.rmtree(scratch)
    print_report(comparison)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit code of `run_program`."""
    return run_program("serve_compare", build_parser(), run, argv)


if __name__ == "__main__":
    sys.exit(main())
