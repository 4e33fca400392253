"""Decode and prefill of this package beside llama.cpp: the same geometry, the same cores, in turn.

    python -m benchmarks.edge_harness.bench_decode --geometry qwen3-1.7b --work-dir DIR [--llama-bench PROGRAM]
    python -m benchmarks.edge_harness.bench_decode --gguf FILE --work-dir DIR [--llama-bench PROGRAM]

Run it from the root of the repository, with nothing else on the machine. Answers are checked first. Tables come first,
one JSON line last; progress goes to stderr. `benchmarks/README.md` says what each number is and what is not measured.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.edge_harness.command_line import parse_names, positive_int, run_program
from benchmarks.edge_harness.comparison import say
from benchmarks.edge_harness.decode_arms import DecodeArm, LlamaArm, kv_kind_of, native_scores, omni_arms, torch_scores
from benchmarks.edge_harness.decode_models import DecodeModels, make_models
from benchmarks.edge_harness.decode_report import decode_rows, metrics_of, ratio_rows, summarize_decode
from benchmarks.edge_harness.decode_rounds import CEILING, DecodeRounds
from benchmarks.edge_harness.decode_servers import llama_server, omni_server
from benchmarks.edge_harness.decode_work import max_tokens, parse_depths
from benchmarks.edge_harness.geometry import GEOMETRIES
from benchmarks.edge_harness.measurement import Workload
from benchmarks.edge_harness.native_check import check_native
from benchmarks.edge_harness.native_model import cache_bytes, kv_bytes_per_token
from benchmarks.edge_harness.provenance import collect_provenance
from benchmarks.edge_harness.random_gguf import FILE_TYPES
from benchmarks.edge_harness.report import format_facts, format_table
from benchmarks.edge_harness.score_check import require_same_scores
from vllm_omni.errors import ConfigError, OmniError
from vllm_omni.native.spec import KV_KINDS
from vllm_omni.quantization.artifact import read_artifact

MODULE = "benchmarks.edge_harness.bench_decode"
ARMS = ("native", "engine", "native-int8", "engine-int8")
DEFAULT_ARMS = ARMS[:2]


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {MODULE}", description="Decode and prefill of this package and of llama.cpp on this machine."
    )
    add = parser.add_argument
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--geometry", choices=tuple(GEOMETRIES), help="a model of random weights")
    model.add_argument("--gguf", type=resolved_path, metavar="FILE", help="a real model for both, packed without loss")
    add("--work-dir", type=resolved_path, required=True, metavar="DIR", help="keeps made models for the next run")
    add("--llama-bench", type=resolved_path, metavar="PROGRAM", help="of llama.cpp; without it this package runs alone")
    add("--servers", action="store_true", help="through both HTTP servers; llama-server lies beside llama-bench")
    add("--types", type=parse_types, default=",".join(FILE_TYPES), help="of llama.cpp (default %(default)s)")
    add("--arms", type=parse_arms, default=",".join(DEFAULT_ARMS), help="of this package (default %(default)s)")
    add("--depths", type=parse_depths, default=(), metavar="N,N", help="prompts of N tokens and decode after them")
    add("--group-size", type=int, choices=(32, 64, 128), default=64, help="of random weights (default %(default)s)")
    add("--head-bits", type=int, choices=(4, 8), default=4, help="of a random output layer (default %(default)s)")
    add("--threads", type=positive_int, default=2, help="and cores, for every arm (default %(default)s)")
    add("--rounds", type=positive_int, default=5, help="turns of each arm (default %(default)s)")
    add("--trials", type=positive_int, default=3, help="timed repetitions a turn (default %(default)s)")
    add("--seed", type=int, default=0, help="determines the prompts (default %(default)s)")
    add("--out", type=Path, metavar="JSON", help="file for raw samples, rewritten after every measurement")
    return parser


def resolved_path(text: str) -> Path:
    """An absolute path: servers run in another directory."""
    return Path(text).resolve()


def parse_types(text: str) -> list[str]:
    """Mixes of llama.cpp, each once."""
    return parse_names(text, FILE_TYPES, "type")


def parse_arms(text: str) -> list[str]:
    """Arms of this package, each once."""
    return parse_names(text, ARMS, "arm")


def pin_cores(threads: int) -> list[int]:
    """Restricts this process, and all that it starts, to the first `threads` cores that it may use.

    Raises:
        ConfigError: It may use fewer.
    """
    allowed = sorted(os.sched_getaffinity(0))
    if len(allowed) < threads:
        raise ConfigError(f"--threads {threads}, but this process may use {len(allowed)} cores; give at most that")
    os.sched_setaffinity(0, allowed[:threads])
    return allowed[:threads]


def require_program(path: Path | None) -> None:
    """Raises ConfigError when a program was named that is not there."""
    if path is not None and not os.access(path, os.X_OK):
        raise ConfigError(
            f"{path} is no program; build llama.cpp with benchmarks/edge_harness/build_llama_cpp.sh and give its "
            "bin/llama-bench"
        )


def make_arms(args: argparse.Namespace, models: DecodeModels) -> list[DecodeArm]:
    """The arms that the command line asks for, ours first."""
    if not args.servers:
        ours = omni_arms(models.artifact, args.threads, models.artifact_bytes, args.arms)
        return [*ours, *_llama_arms(args, models)]
    length = max_tokens(workload_of(args, models))
    kv_bytes = cache_bytes(models.artifact, length, KV_KINDS[0]) if args.depths else 0
    servers: list[DecodeArm] = [omni_server(models.artifact, args.threads, models.artifact_bytes, length, kv_bytes)]
    if args.llama_bench is not None:
        program = args.llama_bench.with_name("llama-server")
        require_program(program)
        for name, gguf in models.ggufs.items():
            size = models.gguf_bytes[name]
            servers.append(llama_server(f"llama {name}", program, gguf, args.threads, size, length))
    return servers


def _llama_arms(args: argparse.Namespace, models: DecodeModels) -> list[DecodeArm]:
    if args.llama_bench is None:
        return []
    return [LlamaArm(f"llama {name}", args.llama_bench, gguf, args.threads) for name, gguf in models.ggufs.items()]


def check_answers(args: argparse.Namespace, models: DecodeModels, scratch: Path) -> dict[str, Any]:
    """What was compared before timing.

    Raises:
        EngineError: An answer is wrong.
    """
    say("checking the native core against its reference")
    checks: dict[str, Any] = {"difference_to_reference": check_native(models.artifact, args.threads)}
    if models.is_real and (args.servers or any(name.startswith("engine") for name in args.arms)):
        say("checking the engine's log-probabilities against the path without the native core")
        native = native_scores(models.artifact, args.threads, scratch)
        torch = torch_scores(models.artifact, args.threads, scratch, native.token_ids)
        checks["logprob_difference_to_torch"] = require_same_scores(native, torch)
    return checks


def workload_of(args: argparse.Namespace, models: DecodeModels) -> Workload:
    """What every arm does in a round."""
    return Workload(args.seed, args.trials, 1, models.vocab_size, args.depths)


def kv_bytes_of(arms: Sequence[DecodeArm], models: DecodeModels) -> dict[str, int]:
    """Arm to the bytes of keys and values that a token adds; llama.cpp's cache of float16 is as large as bfloat16."""
    artifact = read_artifact(models.artifact)
    return {arm.name: kv_bytes_per_token(artifact, kv_kind_of(arm.name)) for arm in arms}


def settings_facts(args: argparse.Namespace, models: DecodeModels, cores: Sequence[int]) -> dict[str, Any]:
    """What was asked for and what ran, for the report."""
    return {
        "model": args.geometry or str(args.gguf),
        "mode": "servers" if args.servers else "offline",
        "cores": list(cores),
        "threads": args.threads,
        "rounds": args.rounds,
        "trials": args.trials,
        "depths": list(args.depths),
        "seed": args.seed,
        "artifact": str(models.artifact),
        "artifact_bytes_per_token": models.artifact_bytes,
        "ggufs": {name: str(path) for name, path in models.ggufs.items()},
        "gguf_bytes": models.gguf_bytes,
    }


def print_report(rounds: DecodeRounds) -> None:
    """Tables, facts, and the same as one JSON line."""
    values, metrics = rounds.rounds(), metrics_of(rounds.work)
    print(format_table(decode_rows(values, metrics)), end="\n\n")
    ratios = ratio_rows(values, metrics)
    if len(ratios) > 1:
        print(format_table(ratios), end="\n\n")
    print("commands of a round:", *rounds.commands(), sep="\n  ", end="\n\n")
    for facts in rounds.facts.values():
        print(format_facts(facts), end="\n\n")
    print(json.dumps({**rounds.facts, CEILING: rounds.ceilings, "summary": summarize_decode(values, metrics)}))


def run(args: argparse.Namespace, words: Sequence[str]) -> None:
    """Makes the models, checks the answers, measures and prints the report.

    Raises:
        OmniError: The input is wrong, an answer is, or an arm failed.
    """
    require_program(args.llama_bench)
    provenance = collect_provenance([sys.executable, "-m", MODULE, *words])
    cores = pin_cores(args.threads)
    models = make_models(args)
    scratch = Path(tempfile.mkdtemp(prefix="bench-decode-"))
    try:
        facts = {"provenance": provenance, "settings": settings_facts(args, models, cores)}
        facts["checks"] = check_answers(args, models, scratch)
        arms, work = make_arms(args, models), workload_of(args, models)
        rounds = DecodeRounds(arms, work, args.threads, facts, scratch, args.out, kv_bytes_of(arms, models))
        rounds.run(args.rounds)
    except OmniError:
        print(f"bench_decode: the output of the arms is kept in {scratch}", file=sys.stderr)
        raise
    shutil.rmtree(scratch)
    print_report(rounds)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit code of `run_program`."""
    return run_program("bench_decode", build_parser(), run, argv)


if __name__ == "__main__":
    sys.exit(main())
