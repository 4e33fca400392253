from pathlib import Path

import pytest
from tokenizers import Tokenizer

from benchmarks.edge_harness.corpus import default_text, make_corpus
from benchmarks.edge_harness.toy_tokenizer import END_OF_TEXT, toy_vocabulary, write_tokenizer
from vllm_omni.errors import ConfigError


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    write_tokenizer(tmp_path, toy_vocabulary(300), 64)
    return Tokenizer.from_file(str(tmp_path / "tokenizer.json"))


def test_the_default_text_is_large_and_the_same_each_time() -> None:
    assert len(default_text()) > 400_000
    assert default_text() == default_text()


def test_a_text_is_cut_without_gaps_and_its_rest_is_left_out(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = tmp_path / "text"
    path.write_text("".join(chr(ord("b") + number % 20) for number in range(35)))
    corpus = make_corpus(path, tokenizer, 8, 1000)
    assert corpus.chunks.shape == (4, 8)
    assert tokenizer.decode(corpus.chunks.reshape(-1).tolist()) == path.read_text()[:32]
    assert make_corpus(path, tokenizer, 8, 17).chunks.tolist() == corpus.chunks[:2].tolist()


def test_the_name_of_a_special_token_in_a_text_is_text(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = tmp_path / "text"
    path.write_text(END_OF_TEXT * 2)
    assert 299 not in make_corpus(path, tokenizer, 4, 1000).chunks


def test_a_short_text_is_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = tmp_path / "text"
    path.write_text("bcdefgh")
    with pytest.raises(ConfigError, match="7 tokens make 1 chunks of 4"):
        make_corpus(path, tokenizer, 4, 1000)


def test_a_text_that_cannot_be_read_is_named(tmp_path: Path, tokenizer: Tokenizer) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for name in ("missing", "binary"):
        with pytest.raises(ConfigError, match=name):
            make_corpus(tmp_path / name, tokenizer, 4, 1000)
