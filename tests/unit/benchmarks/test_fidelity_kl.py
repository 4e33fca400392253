import argparse
import json
from pathlib import Path

import pytest

from benchmarks.edge_harness import fidelity_kl
from benchmarks.edge_harness.corpus import Corpus, make_corpus
from benchmarks.edge_harness.fidelity_judges import Judged
from benchmarks.edge_harness.fidelity_kl import FidelityRun, base_file, build_parser, main, table_rows
from benchmarks.edge_harness.kl_statistics import Fidelity
from tests.unit.benchmarks.tiny_models import write_checkpoint
from vllm_omni.errors import WeightError
from vllm_omni.quantization.source_tensors import HfSource

FOUND = Fidelity(1000, 20.5, 0.21, 19.25, 0.0625, 0.00075, 0.5, 87.5, 0.125)
JUDGED = Judged("small", 4.5, FOUND, "/models/small on native avx2")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "model")


def parse(tmp_path: Path, *words: str) -> argparse.Namespace:
    return build_parser().parse_args(
        ["--model", str(tmp_path / "model"), "--work-dir", str(tmp_path), "--ctx", "8", "--max-tokens", "32", *words]
    )


def corpus_of(model: Path, args: argparse.Namespace) -> Corpus:
    return make_corpus(None, HfSource(model).tokenizer(), args.ctx, args.max_tokens)


def test_a_row_holds_bits_divergence_agreement_and_perplexity() -> None:
    row = ["small", "4.500", "0.06250 ± 0.00075", "0.5000", "87.50 ± 0.12", "20.5000", "19.2500"]
    assert table_rows([JUDGED])[1] == row


def test_base_predictions_are_made_once_for_a_model_and_its_tokens(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Path] = []
    monkeypatch.setattr(fidelity_kl, "base_logits", lambda directory, threads: None)
    monkeypatch.setattr(fidelity_kl, "write_base", lambda path, *_: (made.append(path), path.touch()))
    args, source = parse(tmp_path), HfSource(model)
    first = base_file(source, corpus_of(model, args), args)
    assert base_file(source, corpus_of(model, args), args) == first
    assert made == [first]
    shorter = parse(tmp_path, "--max-tokens", "24")
    assert base_file(source, corpus_of(model, shorter), shorter) != first


def test_what_was_found_before_a_failure_is_kept(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def judge(directory: Path, base: Path, threads: int, kv_kind: str) -> Judged:
        if directory.name == "broken":
            raise WeightError("damaged")
        return JUDGED

    monkeypatch.setattr(fidelity_kl, "base_file", lambda *_: tmp_path / "base")
    monkeypatch.setattr(fidelity_kl, "judge_artifact", judge)
    args = parse(tmp_path, "--artifact", "small", "--artifact", "broken", "--out", str(tmp_path / "out.json"))
    with pytest.raises(WeightError):
        FidelityRun(args, {}).run(HfSource(model), corpus_of(model, args))
    saved = json.loads((tmp_path / "out.json").read_text())
    assert saved["is_complete"] is False
    assert saved["models"]["small"]["fidelity"]["mean_kl"] == 0.0625


def test_nothing_to_judge_is_an_error(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", str(model), "--work-dir", str(tmp_path / "work")]) == 2
    assert "give --artifact" in capsys.readouterr().err
