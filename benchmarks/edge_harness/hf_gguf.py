"""A checkpoint directory as a GGUF file in float32, for `llama-quantize` to make its types from."""

import json
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, LlamaFileType
from tokenizers import Tokenizer

from benchmarks.edge_harness.geometry import ARCHITECTURES, gguf_name
from benchmarks.edge_harness.gguf_output import GgufPlan, GgufTensorPlan, write_gguf
from benchmarks.edge_harness.toy_tokenizer import Vocabulary
from vllm_omni.errors import ConfigError
from vllm_omni.quantization.gguf_config import permuted_heads
from vllm_omni.quantization.gguf_tensors import paired_row_order
from vllm_omni.quantization.source_tensors import HfSource


def write_float_gguf(source: HfSource, path: Path) -> int:
    """Writes every tensor as float32 and gives the bytes of all tensors.

    Raises:
        ConfigError: The model is of a type whose GGUF form this does not write.
    """
    config = dict(source.config)
    if config["model_type"] not in ARCHITECTURES or _rope_type(config) != "default":
        raise ConfigError(
            f"{source.path}: model_type {config['model_type']!r} with rope_type {_rope_type(config)!r}; accepted: "
            f"{', '.join(ARCHITECTURES)} with rope_type 'default'"
        )
    config.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])
    tensors = [
        GgufTensorPlan(gguf_name(name), name, each.entry.shape, GGMLQuantizationType.F32)
        for name, each in source.tensors.items()
    ]
    vocabulary = vocabulary_of(source.tokenizer(), config["vocab_size"])
    plan = GgufPlan(config, vocabulary, LlamaFileType.ALL_F32, tensors)
    write_gguf(path, plan, lambda tensor: _encode(source, tensor))
    return sum(int(np.prod(tensor.byte_shape)) for tensor in tensors)


def _rope_type(config: dict[str, object]) -> object:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    assert isinstance(rope, dict)
    return rope.get("rope_type", "default")


def _encode(source: HfSource, tensor: GgufTensorPlan) -> np.ndarray:
    values = source.rows(tensor.hf_name, 0, tensor.shape[0])
    heads = permuted_heads(source.config, tensor.name)
    if heads is not None:
        values = values[np.argsort(paired_row_order(len(values), heads))]
    return np.ascontiguousarray(values, "<f4").view(np.uint8)


def vocabulary_of(tokenizer: Tokenizer, size: int) -> Vocabulary:
    """The tokens of a byte-level BPE tokenizer, with fillers for rows of the embedding that have none.

    Raises:
        ConfigError: It is another kind of tokenizer.
    """
    document = json.loads(tokenizer.to_str())
    if document["model"]["type"] != "BPE":
        raise ConfigError(f"the tokenizer's model is {document['model']['type']!r}; accepted: byte-level BPE")
    ids = tokenizer.get_vocab(with_added_tokens=True)
    tokens = [f"<|unused_{number}|>" for number in range(size)]
    for token, index in ids.items():
        tokens[index] = token
    special = frozenset(each["id"] for each in document["added_tokens"] if each["special"])
    merges = tuple(_pair(each) for each in document["model"]["merges"])
    return Vocabulary(tuple(tokens), merges, special, max(special, default=0))


def _pair(merge: str | list[str]) -> tuple[str, str]:
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return left, right
