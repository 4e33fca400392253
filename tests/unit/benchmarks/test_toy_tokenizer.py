import json
from pathlib import Path

from tokenizers import Tokenizer

from benchmarks.edge_harness.toy_tokenizer import END_OF_TEXT, toy_vocabulary, write_tokenizer


def test_the_vocabulary_has_the_size_asked_for_and_ends_with_the_end() -> None:
    vocabulary = toy_vocabulary(300)
    assert len(set(vocabulary.tokens)) == 300
    assert vocabulary.tokens[vocabulary.end_id] == END_OF_TEXT
    assert vocabulary.special_ids == {299}


def test_any_text_survives_the_written_tokenizer(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, toy_vocabulary(300), 64)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    ids = tokenizer.encode("abc größer\n").ids
    assert tokenizer.decode(ids) == "abc größer\n"
    assert tokenizer.token_to_id("ab") in ids
    assert tokenizer.get_vocab_size() == 300
    assert json.loads((tmp_path / "tokenizer_config.json").read_text())["eos_token"] == END_OF_TEXT


def test_fillers_decode_to_whole_text() -> None:
    vocabulary = toy_vocabulary(300)
    assert all(token.isascii() for token in vocabulary.tokens[256:])
