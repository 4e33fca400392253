"""Writes a GGUF file for llama.cpp: metadata of a decoder, its vocabulary, then each tensor as it is made."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter, LlamaFileType, TokenType

from benchmarks.edge_harness.toy_tokenizer import Vocabulary

# Tells how text is cut before merging; benchmarks hand over token ids.
PRE_TOKENIZER = "gpt-2"


@dataclass(frozen=True)
class GgufTensorPlan:
    """One tensor to be written.

    Attributes:
        name: In GGUF.
        hf_name: In a checkpoint.
        shape: Slowest dimension first.
        type: How it is encoded.
    """

    name: str
    hf_name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType

    @property
    def byte_shape(self) -> tuple[int, ...]:
        """The shape of its bytes: the last dimension is encoded blocks."""
        block_size, block_bytes = GGML_QUANT_SIZES[self.type]
        return (*self.shape[:-1], self.shape[-1] // block_size * block_bytes)


@dataclass(frozen=True)
class GgufPlan:
    """One file to be written.

    Attributes:
        config: `config.json` of the model.
        vocabulary: Its tokens.
        file_type: The mix of types by llama.cpp's name.
        tensors: In file order.
    """

    config: Mapping[str, Any]
    vocabulary: Vocabulary
    file_type: LlamaFileType
    tensors: Sequence[GgufTensorPlan]


def write_gguf(path: Path, plan: GgufPlan, encode: Callable[[GgufTensorPlan], np.ndarray]) -> None:
    """Writes `path`, which appears when it is complete.

    Args:
        path: File to make.
        plan: What to write.
        encode: Gives a tensor's bytes, uint8 of `byte_shape`; called once for each in file order.
    """
    partial = path.with_name(path.name + ".partial")
    writer = GGUFWriter(partial, plan.config["model_type"])
    _add_model(writer, plan)
    _add_vocabulary(writer, plan.vocabulary)
    for tensor in plan.tensors:
        shape = tensor.byte_shape
        num_bytes = int(np.prod(shape))
        writer.add_tensor_info(tensor.name, shape, np.dtype(np.uint8), num_bytes, raw_dtype=tensor.type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor in plan.tensors:
        writer.write_tensor_data(encode(tensor))
    writer.close()
    partial.rename(path)


def _add_model(writer: GGUFWriter, plan: GgufPlan) -> None:
    config = plan.config
    rope = config.get("rope_parameters") or {}
    writer.add_name("benchmark")
    writer.add_file_type(plan.file_type)
    writer.add_quantization_version(2)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(float(rope.get("rope_theta") or config["rope_theta"]))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])


def _add_vocabulary(writer: GGUFWriter, vocabulary: Vocabulary) -> None:
    special = vocabulary.special_ids
    types = [TokenType.CONTROL if index in special else TokenType.NORMAL for index in range(len(vocabulary.tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(PRE_TOKENIZER)
    writer.add_token_list(list(vocabulary.tokens))
    writer.add_token_types(types)
    writer.add_token_merges([" ".join(pair) for pair in vocabulary.merges])
    writer.add_eos_token_id(vocabulary.end_id)
    writer.add_bos_token_id(vocabulary.end_id)
    # Otherwise llama.cpp would put it in the place of a chunk's first token.
    writer.add_add_bos_token(False)
