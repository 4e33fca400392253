from typing import Any

import pytest
from tokenizers import Tokenizer

from vllm_omni.errors import WeightError
from vllm_omni.quantization.gguf_file import open_gguf
from vllm_omni.quantization.gguf_tokenizer import build_tokenizer, tokenizer_config


def tokenizer_of(sample: Any, pre: str = "smollm") -> Tokenizer:
    sample.metadata["tokenizer.ggml.pre"] = pre
    return build_tokenizer(open_gguf(sample.write()))


def pieces(tokenizer: Tokenizer, text: str) -> list[str]:
    """The pre-tokenizer's pieces, decoded from byte symbols."""
    assert tokenizer.pre_tokenizer is not None
    return [text[begin:end] for _, (begin, end) in tokenizer.pre_tokenizer.pre_tokenize_str(text)]


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("smollm", ["I", "'ll", " pay", " ", "1", "2", "3", "4", ".", "5", "  ", " now", "!!", "\n\n"]),
        ("gpt-2", ["I", "'ll", " pay", " 1234", ".", "5", "  ", " now", "!!", "\n\n"]),
        ("llama-bpe", ["I", "'ll", " pay", " ", "123", "4", ".", "5", "  ", " now", "!!\n\n"]),
        ("qwen2", ["I", "'ll", " pay", " ", "1", "2", "3", "4", ".", "5", "  ", " now", "!!\n\n"]),
        ("default", ["I", "'", "ll", " pay", " ", "123", "4", ".", "5", "  ", " now", "!!", "\n\n"]),
    ],
)
def test_pre_tokenizers_split_as_named(sample: Any, pre: str, expected: list[str]) -> None:
    assert pieces(tokenizer_of(sample, pre), "I'll pay 1234.5   now!!\n\n") == expected


def test_case_of_contractions_is_ignored_by_the_newer_kinds(sample: Any) -> None:
    assert pieces(tokenizer_of(sample, "qwen2"), "WE'LL") == ["WE", "'LL"]
    assert pieces(tokenizer_of(sample, "gpt-2"), "WE'LL") == ["WE", "'", "LL"]


@pytest.mark.parametrize("pre", ["smollm", "gpt-2", "llama-bpe", "qwen2", "default"])
def test_text_survives_encoding(sample: Any, pre: str) -> None:
    tokenizer = tokenizer_of(sample, pre)
    text = "the  thé\tπ 世界 🙂\r\n\x00 def f(x):\n    return x[0] ** 12"
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_merges_are_applied_in_order(sample: Any) -> None:
    assert tokenizer_of(sample).encode("he the").tokens == ["he", "Ġthe"]


def test_a_piece_that_is_a_token_needs_no_merges_in_the_llama_kind(sample: Any) -> None:
    sample.metadata["tokenizer.ggml.merges"] = ["h e", "Ġ t"]
    assert tokenizer_of(sample, "smollm").encode(" the").tokens == ["Ġt", "he"]
    assert tokenizer_of(sample, "llama-bpe").encode(" the", add_special_tokens=False).tokens == ["Ġthe"]


def test_special_and_user_defined_tokens_are_found_in_text(sample: Any) -> None:
    tokenizer = tokenizer_of(sample)
    encoded = tokenizer.encode("<|im_start|>the<think><|im_end|>")
    assert encoded.ids[0] == 1
    assert encoded.ids[-2:] == [3, 2]
    assert tokenizer.decode(encoded.ids, skip_special_tokens=True) == "the<think>"


def test_qwen_text_is_composed(sample: Any) -> None:
    composed, decomposed = "caf\u00e9", "cafe\u0301"
    qwen, gpt2 = tokenizer_of(sample, "qwen2"), tokenizer_of(sample, "gpt-2")
    assert qwen.encode(decomposed).ids == qwen.encode(composed).ids
    assert gpt2.encode(decomposed).ids != gpt2.encode(composed).ids


@pytest.mark.parametrize(
    ("pre", "changes", "expected"),
    [
        ("smollm", {}, ["he"]),
        ("llama-bpe", {}, ["<|im_start|>", "he"]),
        ("llama-bpe", {"tokenizer.ggml.add_bos_token": False}, ["he"]),
        (
            "gpt-2",
            {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True},
            ["<|im_start|>", "he", "<|endoftext|>"],
        ),
    ],
)
def test_beginning_and_end_are_added_as_the_file_says(
    sample: Any, pre: str, changes: dict[str, Any], expected: list[str]
) -> None:
    sample.metadata |= changes
    assert tokenizer_of(sample, pre).encode("he").tokens == expected


def test_a_pair_has_type_ids(sample: Any) -> None:
    encoded = tokenizer_of(sample, "llama-bpe").encode("he", "he")
    assert encoded.tokens == ["<|im_start|>", "he", "<|im_start|>", "he"]
    assert encoded.type_ids == [0, 0, 1, 1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer.ggml.model": "llama"}, "tokenizer.ggml.model is 'llama', accepted: gpt2"),
        ({"tokenizer.ggml.pre": "tekken"}, "'tekken', accepted: default, gpt-2, llama-bpe, qwen2, smollm"),
        ({"tokenizer.ggml.pre": None}, "tokenizer.ggml.pre is None, accepted: default"),
        ({"tokenizer.ggml.merges": ["h q"]}, "merges has 'h q', which the vocabulary does not cover"),
        ({"tokenizer.ggml.merges": None}, "tokenizer.ggml.merges is missing or empty"),
        ({"tokenizer.ggml.token_type": [1, 1]}, "263 tokens and 2 token types"),
        ({"tokenizer.ggml.tokens": ["a", "b", "a"]}, "names 1 tokens twice"),
        ({"tokenizer.ggml.bos_token_id": None, "tokenizer.ggml.add_bos_token": True}, "bos_token_id is missing"),
    ],
)
def test_an_unaccepted_tokenizer_is_named(sample: Any, changes: dict[str, Any], message: str) -> None:
    merged = {**sample.metadata, **changes}
    sample.metadata = {key: value for key, value in merged.items() if value is not None}
    source = open_gguf(sample.write())
    with pytest.raises(WeightError, match=message):
        build_tokenizer(source)


def test_more_tokens_than_rows_are_refused(sample: Any) -> None:
    sample.tensors["token_embd.weight"] = sample.tensors["token_embd.weight"][:100]
    with pytest.raises(WeightError, match=r"263 tokens, but token_embd\.weight has 100 rows"):
        tokenizer_of(sample)


def test_tokenizer_config(sample: Any) -> None:
    sample.metadata["tokenizer.ggml.unknown_token_id"] = 0
    assert tokenizer_config(open_gguf(sample.write())) == {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "bos_token": "<|im_start|>",
        "eos_token": "<|endoftext|>",
        "unk_token": "<|endoftext|>",
        "model_max_length": 128,
        "chat_template": "{{ messages[0].content }}<|im_end|>",
    }
