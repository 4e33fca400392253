"""How much of a model quantization leaves: artifacts of this package and llama.cpp's types against the float model.

    python -m benchmarks.edge_harness.fidelity_kl --model DIR --work-dir DIR --artifact DIR [--artifact DIR ...]
        [--llama-bin DIR] [--types Q4_0,Q4_1,Q4_K_M] [--text FILE] [--max-tokens 65536]

Both engines are judged on the same tokens against one base: `transformers` in float32. Definitions are those of
`llama-perplexity --kl-divergence` (`kl_statistics.py`). A table comes first, one JSON line last; progress to stderr.
"""

import argparse
import hashlib
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.edge_harness.command_line import parse_names, positive_int, run_program
from benchmarks.edge_harness.comparison import say
from benchmarks.edge_harness.corpus import Corpus, make_corpus
from benchmarks.edge_harness.fidelity_judges import FLOAT_TYPE, Judged, LlamaJudge, base_logits, judge_artifact
from benchmarks.edge_harness.kl_base_file import write_base
from benchmarks.edge_harness.kl_statistics import scored_positions
from benchmarks.edge_harness.provenance import collect_provenance
from benchmarks.edge_harness.report import format_facts, format_table
from vllm_omni.errors import ConfigError
from vllm_omni.native.spec import KV_KINDS
from vllm_omni.quantization.source_tensors import HfSource

MODULE = "benchmarks.edge_harness.fidelity_kl"
DEFAULT_TYPES = "Q4_0,Q4_1,Q4_K_M"
COLUMNS = ("model", "bits/weight", "mean KL", "99% KL", "same top, %", "perplexity", "of the base")


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {MODULE}", description="Compare quantized models with the original."
    )
    add = parser.add_argument
    add("--model", type=Path, required=True, metavar="DIR", help="checkpoint directory of the float model")
    add("--work-dir", type=Path, required=True, metavar="DIR", help="base predictions and GGUF files are kept here")
    add("--artifact", type=Path, action="append", default=[], metavar="DIR", help="of `vllm-omni quantize`; repeatable")
    add("--kv", type=parse_kinds, default=KV_KINDS[0], metavar="KIND,KIND", help="caches (default %(default)s)")
    add("--llama-bin", type=Path, metavar="DIR", help="of llama.cpp; without it only artifacts are judged")
    add("--types", default=DEFAULT_TYPES, help="of llama-quantize, by commas (default %(default)s)")
    add("--text", type=Path, metavar="FILE", help="UTF-8 (default: Python's language reference)")
    add("--ctx", type=positive_int, default=512, help="tokens of a chunk (default %(default)s)")
    add("--max-tokens", type=positive_int, default=65536, help="of the text (default %(default)s)")
    add("--threads", type=positive_int, default=2, help="of everything (default %(default)s)")
    add("--out", type=Path, metavar="JSON", help="file for the results, rewritten after every model")
    return parser


def parse_kinds(text: str) -> list[str]:
    """Kinds of caches, each once."""
    return parse_names(text, KV_KINDS, "kind of cache")


def base_file(source: HfSource, corpus: Corpus, args: argparse.Namespace) -> Path:
    """The file of base predictions, made once for a model and its tokens."""
    weights = {name: entry.sha256 for name, entry in source.hashes().items()}
    key = json.dumps([weights, corpus.tokens_sha256, args.ctx], sort_keys=True)
    path: Path = args.work_dir / f"base-{hashlib.sha256(key.encode()).hexdigest()[:16]}.logits"
    if not path.is_file():
        say(f"computing base predictions of {len(corpus.chunks)} chunks")
        write_base(path, corpus.chunks, source.config["vocab_size"], base_logits(source.path, args.threads))
    return path


class FidelityRun:
    """Judges models one after the other and keeps what was found.

    Args:
        args: The command line.
        facts: Provenance and settings.
    """

    def __init__(self, args: argparse.Namespace, facts: dict[str, Any]):
        self.args = args
        self.facts = facts
        self.judged: list[Judged] = []

    def run(self, source: HfSource, corpus: Corpus) -> None:
        """Judges every model that the command line names.

        Raises:
            OmniError: A model is damaged, or a program failed; what was found before is in `--out`.
        """
        base = base_file(source, corpus, self.args)
        self._save(is_complete=False)
        for directory in self.args.artifact:
            for kind in self.args.kv:
                self._add(judge_artifact(directory, base, self.args.threads, kind))
        if self.args.llama_bin is not None:
            judge = LlamaJudge(self.args.llama_bin, source, base, self.args.work_dir, self.args.threads)
            num_tokens = len(corpus.chunks) * len(scored_positions(self.args.ctx))
            for mix in (FLOAT_TYPE, *self.args.types.split(",")):
                self._add(judge.judge(mix, num_tokens))
        self._save(is_complete=True)

    def results(self) -> dict[str, Any]:
        """Everything as plain data."""
        models = {each.name: asdict(each) for each in self.judged}
        return {**self.facts, "models": models}

    def _add(self, judged: Judged) -> None:
        say(f"{judged.name}: mean KL {judged.fidelity.mean_kl:.6f} at {judged.bits_per_weight:.3f} bits")
        self.judged.append(judged)
        self._save(is_complete=False)

    def _save(self, *, is_complete: bool) -> None:
        if self.args.out is not None:
            self.args.out.write_text(json.dumps({**self.results(), "is_complete": is_complete}, indent=1) + "\n")


def table_rows(judged: Sequence[Judged]) -> list[list[str]]:
    """Header and one row a model; `±` is one standard error."""
    rows = [list(COLUMNS)]
    for each in judged:
        found = each.fidelity
        rows.append(
            [
                each.name,
                f"{each.bits_per_weight:.3f}",
                f"{found.mean_kl:.5f} ± {found.mean_kl_error:.5f}",
                f"{found.p99_kl:.4f}",
                f"{found.same_top_percent:.2f} ± {found.same_top_error:.2f}",
                f"{found.perplexity:.4f}",
                f"{found.base_perplexity:.4f}",
            ]
        )
    return rows


def settings_facts(args: argparse.Namespace, corpus: Corpus) -> dict[str, Any]:
    """What was asked for."""
    return {
        "model": str(args.model),
        "base": "transformers, float32",
        "text": corpus.description,
        "text_sha256": corpus.text_sha256,
        "tokens_sha256": corpus.tokens_sha256,
        "chunks": len(corpus.chunks),
        "chunk_tokens": args.ctx,
        "scored_tokens": len(corpus.chunks) * len(scored_positions(args.ctx)),
        "threads": args.threads,
    }


def run(args: argparse.Namespace, words: Sequence[str]) -> None:
    """Judges and prints the report.

    Raises:
        OmniError: The input is wrong, or a program failed.
    """
    if not args.artifact and args.llama_bin is None:
        raise ConfigError("nothing to judge; give --artifact DIR, --llama-bin DIR or both")
    args.work_dir.mkdir(parents=True, exist_ok=True)
    source = HfSource(args.model)
    corpus = make_corpus(args.text, source.tokenizer(), args.ctx, args.max_tokens)
    provenance = collect_provenance([sys.executable, "-m", MODULE, *words])
    fidelity = FidelityRun(args, {"provenance": provenance, "settings": settings_facts(args, corpus)})
    fidelity.run(source, corpus)
    print(format_table(table_rows(fidelity.judged)), end="\n\n")
    for facts in fidelity.facts.values():
        print(format_facts(facts), end="\n\n")
    print(json.dumps(fidelity.results()))


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit code of `run_program`."""
    return run_program("fidelity_kl", build_parser(), run, argv)


if __name__ == "__main__":
    sys.exit(main())
