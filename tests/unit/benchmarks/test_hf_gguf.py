from pathlib import Path

import numpy as np
import pytest

from benchmarks.edge_harness.hf_gguf import vocabulary_of, write_float_gguf
from tests.unit.benchmarks.tiny_models import TINY, write_checkpoint
from vllm_omni.errors import ConfigError
from vllm_omni.quantization.gguf_source import GgufSource
from vllm_omni.quantization.source_tensors import HfSource


def test_the_file_is_imported_as_the_checkpoint_it_was_made_from(tmp_path: Path) -> None:
    source = HfSource(write_checkpoint(tmp_path / "model"))
    num_bytes = write_float_gguf(source, tmp_path / "model.gguf")
    found = GgufSource(tmp_path / "model.gguf")
    assert set(found.tensors) == set(source.tensors)
    for name, tensor in source.tensors.items():
        rows = tensor.entry.shape[0]
        assert (found.rows(name, 0, rows) == source.rows(name, 0, rows)).all(), name
    for key in ("hidden_size", "num_key_value_heads", "head_dim", "vocab_size", "rms_norm_eps", "rope_theta"):
        assert found.config[key] == source.config[key], key
    assert num_bytes == 4 * sum(tensor.entry.num_elements for tensor in source.tensors.values())


def test_the_vocabulary_is_that_of_the_tokenizer(tmp_path: Path) -> None:
    source = HfSource(write_checkpoint(tmp_path / "model"))
    vocabulary = vocabulary_of(source.tokenizer(), TINY.vocab_size + 2)
    assert vocabulary.tokens[256] == "ab"
    assert vocabulary.merges == (("a", "b"),)
    assert vocabulary.special_ids == {TINY.vocab_size - 1}
    assert len(set(vocabulary.tokens)) == TINY.vocab_size + 2


def test_a_family_without_a_gguf_form_here_is_refused(tmp_path: Path) -> None:
    source = HfSource(write_checkpoint(tmp_path / "model"))
    source.config["rope_parameters"] = {"rope_type": "yarn"}
    with pytest.raises(ConfigError, match="yarn"):
        write_float_gguf(source, tmp_path / "model.gguf")
    assert not np.array(list(tmp_path.glob("*.gguf*"))).size
