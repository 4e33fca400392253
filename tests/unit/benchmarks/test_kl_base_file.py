import struct
from pathlib import Path

import numpy as np
import pytest

from benchmarks.edge_harness.kl_base_file import read_base, write_base
from benchmarks.edge_harness.kl_statistics import store_log_probs
from vllm_omni.errors import WeightError

CHUNKS = np.arange(16, dtype=np.int32).reshape(2, 8)
VOCABULARY = 5


def logits_of(chunk: np.ndarray) -> np.ndarray:
    return np.random.default_rng(int(chunk[0])).standard_normal((3, VOCABULARY)).astype(np.float32)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    write_base(tmp_path / "base", CHUNKS, VOCABULARY, logits_of)
    return tmp_path / "base"


def test_what_was_written_is_read(base: Path) -> None:
    found = list(read_base(base))
    assert [chunk.tolist() for chunk, _ in found] == CHUNKS.tolist()
    for chunk, stored in found:
        expected = store_log_probs(logits_of(chunk))
        assert (stored.codes == expected.codes).all()
        assert (stored.decode() == expected.decode()).all()


def test_the_bytes_are_those_that_llama_perplexity_reads(base: Path) -> None:
    data = base.read_bytes()
    assert struct.unpack_from("<8s3i", data) == (b"_logits_", 8, VOCABULARY, 2)
    assert struct.unpack_from("<16i", data, 20) == tuple(range(16))
    # Per row two floats, then the codes, rounded up to an even number.
    assert len(data) == 20 + 16 * 4 + 2 * 3 * (4 + 6) * 2
    expected = store_log_probs(logits_of(CHUNKS[0]))
    scale, lowest, *codes, padding = struct.unpack_from("<2f6H", data, 84)
    assert (scale, lowest) == (expected.scale[0], expected.lowest[0])
    assert [*codes, padding] == [*expected.codes[0].tolist(), 0]


def test_a_truncated_file_is_an_error(base: Path) -> None:
    base.write_bytes(base.read_bytes()[:-2])
    with pytest.raises(WeightError, match="truncated"):
        list(read_base(base))


def test_another_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "other").write_bytes(b"GGUF")
    with pytest.raises(WeightError, match="no file of base predictions"):
        next(read_base(tmp_path / "other"))
