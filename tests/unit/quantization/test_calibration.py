from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from vllm_omni.errors import ConfigError
from vllm_omni.quantization.calibration import MAX_WINDOWS, read_calibration, token_windows


@pytest.fixture
def tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a"))
    tokenizer.pre_tokenizer = Whitespace()
    return tokenizer


def test_no_calibration() -> None:
    assert read_calibration("none") is None


def test_the_shipped_text_is_there() -> None:
    text = read_calibration("default")
    assert text is not None
    assert 8_000 < len(text.encode()) < 20_000


def test_a_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("Grüße", encoding="utf-8")
    assert read_calibration(str(tmp_path / "x.txt")) == "Grüße"


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "No such file"), (b"\xff\xfe\xff", "codec can't decode"), (b" \n", "is empty")],
)
def test_an_unusable_file_is_refused(tmp_path: Path, content: bytes | None, message: str) -> None:
    path = tmp_path / "x.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=rf"--calibration .*x\.txt.*{message}"):
        read_calibration(str(path))


def test_windows_hold_all_tokens_in_order(tokenizer: Tokenizer) -> None:
    windows = token_windows(tokenizer, "a b b " * 50, 64)
    assert [len(each) for each in windows] == [64, 64, 22]
    np.testing.assert_array_equal(np.concatenate(windows), np.tile([0, 1, 1], 50))


def test_windows_are_bounded(tokenizer: Tokenizer) -> None:
    assert len(token_windows(tokenizer, "a " * (MAX_WINDOWS + 5) * 4, 4)) == MAX_WINDOWS


def test_a_short_text_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(ConfigError, match="the text has 3 tokens, accepted: 64 or more"):
        token_windows(tokenizer, "a b a")
