"""A fast tokenizer from GGUF metadata: byte-level BPE of the kinds in `PRE_TOKENIZERS`.

GGUF names the pre-tokenizer instead of describing it, so each accepted name has its construction here. A text's bytes
that the vocabulary lacks are dropped in encoding, as the published tokenizers of such models do.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from vllm_omni.errors import WeightError
from vllm_omni.quantization.gguf_config import special_ids, token_ids
from vllm_omni.quantization.gguf_file import GgufFile

CONTROL_TYPE, USER_DEFINED_TYPE = 3, 4
# %s is how many digits one piece may hold.
CL100K_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
PUNCTUATION_PATTERN = r"[\p{P}\$\+<=>\^~\|]+"


@dataclass(frozen=True)
class PreTokenizer:
    """How a named kind of byte-level BPE treats text.

    Attributes:
        build: Makes the pre-tokenizer.
        ignore_merges: A piece that is a token as a whole is not merged step by step.
        adds_bos: The beginning token is added where the file does not say.
        normalizes: Text is brought into Unicode form NFC first.
    """

    build: Callable[[], pre_tokenizers.PreTokenizer]
    ignore_merges: bool = False
    adds_bos: bool = False
    normalizes: bool = False


def _byte_level(use_regex: bool) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)


def _splits(*patterns: str) -> pre_tokenizers.PreTokenizer:
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    return pre_tokenizers.Sequence([*splits, _byte_level(use_regex=False)])


def _single_digits() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _byte_level(use_regex=True)])


PRE_TOKENIZERS = {
    # The rule that GGUF's own runtime applies to files which name none in particular.
    "default": PreTokenizer(lambda: _splits(PUNCTUATION_PATTERN, GPT2_PATTERN, r"\p{N}+", "[0-9][0-9][0-9]")),
    "gpt-2": PreTokenizer(lambda: _byte_level(use_regex=True)),
    "llama-bpe": PreTokenizer(lambda: _splits(CL100K_PATTERN % "{1,3}"), ignore_merges=True, adds_bos=True),
    "qwen2": PreTokenizer(lambda: _splits(CL100K_PATTERN % ""), normalizes=True),
    "smollm": PreTokenizer(_single_digits),
}


def build_tokenizer(source: GgufFile) -> Tokenizer:
    """The tokenizer, ready to be saved as `tokenizer.json`.

    Raises:
        WeightError: The tokenizer model or pre-tokenizer is not accepted, or vocabulary and merges are inconsistent.
    """
    kind = _pre_tokenizer(source)
    tokens = _list(source, "tokens")
    vocab = {token: index for index, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        raise WeightError(f"{source.path}: tokenizer.ggml.tokens names {len(tokens) - len(vocab)} tokens twice")
    num_rows = source.tensors["token_embd.weight"].shape[0]
    if len(tokens) > num_rows:
        raise WeightError(f"{source.path}: {len(tokens)} tokens, but token_embd.weight has {num_rows} rows")
    model = models.BPE(vocab=vocab, merges=_merges(source, vocab), ignore_merges=kind.ignore_merges)
    tokenizer = Tokenizer(model)
    if kind.normalizes:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = kind.build()
    tokenizer.decoder = decoders.ByteLevel()
    _add_special_tokens(source, tokenizer, tokens)
    _add_post_processor(source, tokenizer, tokens, kind)
    return tokenizer


def tokenizer_config(source: GgufFile) -> dict[str, Any]:
    """The content of `tokenizer_config.json`, for the class that takes `tokenizer.json` as it is."""
    tokens = _list(source, "tokens")
    ids = special_ids(source) | token_ids(source, {"unk_token_id": "unknown"})
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    config |= {name.removesuffix("_id"): tokens[index] for name, index in ids.items()}
    config["model_max_length"] = source.metadata[f"{source.metadata['general.architecture']}.context_length"]
    if template := source.metadata.get("tokenizer.chat_template"):
        config["chat_template"] = template
    return config


def _pre_tokenizer(source: GgufFile) -> PreTokenizer:
    model = source.metadata.get("tokenizer.ggml.model")
    if model != "gpt2":
        raise WeightError(
            f"{source.path}: tokenizer.ggml.model is {model!r}, accepted: gpt2 (byte-level BPE); "
            "convert from the original checkpoint instead"
        )
    name = source.metadata.get("tokenizer.ggml.pre")
    if name not in PRE_TOKENIZERS:
        raise WeightError(
            f"{source.path}: tokenizer.ggml.pre is {name!r}, accepted: {', '.join(PRE_TOKENIZERS)}; "
            "convert from the original checkpoint instead"
        )
    return PRE_TOKENIZERS[name]


def _list(source: GgufFile, key: str) -> list[Any]:
    value = source.metadata.get(f"tokenizer.ggml.{key}")
    if not isinstance(value, list) or not value:
        raise WeightError(f"{source.path}: tokenizer.ggml.{key} is missing or empty; only whole models are accepted")
    return value


def _merges(source: GgufFile, vocab: dict[str, int]) -> list[tuple[str, str]]:
    merges: list[tuple[str, str]] = []
    for merge in _list(source, "merges"):
        left, _, right = merge.partition(" ")
        if left not in vocab or right not in vocab or left + right not in vocab:
            raise WeightError(
                f"{source.path}: tokenizer.ggml.merges has {merge!r}, which the vocabulary does not cover"
            )
        merges.append((left, right))
    return merges


def _add_special_tokens(source: GgufFile, tokenizer: Tokenizer, tokens: list[str]) -> None:
    types = _list(source, "token_type")
    if len(types) != len(tokens):
        raise WeightError(f"{source.path}: tokenizer.ggml has {len(tokens)} tokens and {len(types)} token types")
    pairs = list(zip(tokens, types, strict=True))
    control = [AddedToken(token, special=True, normalized=False) for token, kind in pairs if kind == CONTROL_TYPE]
    user = [AddedToken(token, special=False, normalized=False) for token, kind in pairs if kind == USER_DEFINED_TYPE]
    tokenizer.add_special_tokens(control)
    tokenizer.add_tokens(user)


def _add_post_processor(source: GgufFile, tokenizer: Tokenizer, tokens: list[str], kind: PreTokenizer) -> None:
    ids = special_ids(source)
    begins = source.metadata.get("tokenizer.ggml.add_bos_token", kind.adds_bos)
    ends = source.metadata.get("tokenizer.ggml.add_eos_token", False)
    if begins and "bos_token_id" not in ids:
        raise WeightError(
            f"{source.path}: a beginning token is to be added, but tokenizer.ggml.bos_token_id is missing"
        )
    before = [tokens[ids["bos_token_id"]]] if begins else []
    after = [tokens[ids["eos_token_id"]]] if ends else []
    if before or after:
        special = [(token, tokens.index(token)) for token in dict.fromkeys(before + after)]
        pair = [*before, "$A", *after, *(f"{token}:1" for token in before), "$B:1", *(f"{token}:1" for token in after)]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*before, "$A", *after], pair=pair, special_tokens=special
        )
