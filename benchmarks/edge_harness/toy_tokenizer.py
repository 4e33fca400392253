"""A made-up byte-level vocabulary of any size: real enough for both engines to load, encode and decode with.

256 tokens for the bytes, one merge (llama.cpp refuses a vocabulary without merges), fillers of plain ASCII that no
text is encoded to, and the end of text as the last id.
"""

from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from vllm_omni.quantization.json_file import write_json

MERGE = ("a", "b")
END_OF_TEXT = "<|end|>"


@dataclass(frozen=True)
class Vocabulary:
    """A byte-level BPE vocabulary.

    Attributes:
        tokens: By id.
        merges: Pairs, first merged first.
        special_ids: Ids of control tokens.
        end_id: Id of the end of text.
    """

    tokens: tuple[str, ...]
    merges: tuple[tuple[str, str], ...]
    special_ids: frozenset[int]
    end_id: int


def toy_vocabulary(size: int) -> Vocabulary:
    """A vocabulary of `size` tokens, 258 or more."""
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "".join(MERGE)]
    tokens += [f"w{number:06d}" for number in range(len(tokens), size - 1)]
    tokens.append(END_OF_TEXT)
    assert len(tokens) == size, f"a vocabulary of {size} has no room for the bytes"
    return Vocabulary(tuple(tokens), (MERGE,), frozenset({size - 1}), size - 1)


def write_tokenizer(directory: Path, vocabulary: Vocabulary, max_length: int) -> None:
    """Writes `tokenizer.json`, `tokenizer_config.json` and `generation_config.json`."""
    ids = {token: index for index, token in enumerate(vocabulary.tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=list(vocabulary.merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [vocabulary.tokens[index] for index in sorted(vocabulary.special_ids)]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.save(str(directory / "tokenizer.json"))
    end = vocabulary.tokens[vocabulary.end_id]
    write_json(
        directory / "tokenizer_config.json",
        {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end, "model_max_length": max_length},
    )
    write_json(directory / "generation_config.json", {"eos_token_id": vocabulary.end_id})
