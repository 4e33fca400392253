"""Text that language models are judged on, and its token ids cut into chunks.

The default text is the part of Python's language reference that every interpreter carries for `help()`: half a million
characters of English prose with code, under the PSF licence. It depends on the interpreter's version; its hash is
reported.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from vllm_omni.errors import ConfigError

# llama-perplexity refuses a text of less than two chunks.
MIN_CHUNKS = 2


@dataclass(frozen=True)
class Corpus:
    """Chunks of a text that are judged one by one, each from an empty cache.

    Attributes:
        chunks: [chunks, tokens of a chunk] int32; the text's first tokens without a gap, its rest is left out.
        description: Where the text is from.
        text_sha256: Of the whole text in UTF-8.
    """

    chunks: np.ndarray
    description: str
    text_sha256: str

    @property
    def tokens_sha256(self) -> str:
        """Of the ids."""
        return hashlib.sha256(self.chunks.tobytes()).hexdigest()


def default_text() -> str:
    """The topics of the language reference, in the order of their names."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def make_corpus(text_file: Path | None, tokenizer: Tokenizer, chunk_tokens: int, max_tokens: int) -> Corpus:
    """Reads and cuts a text.

    Args:
        text_file: UTF-8; None: the default text.
        tokenizer: Of the model. No special token is added, and none in the text is recognised.
        chunk_tokens: Tokens of a chunk.
        max_tokens: Most tokens to use.

    Raises:
        ConfigError: The file is missing or not UTF-8, or the text has fewer than two chunks.
    """
    text, description = _read(text_file)
    tokenizer.encode_special_tokens = True
    ids = tokenizer.encode(text, add_special_tokens=False).ids[:max_tokens]
    num_chunks = len(ids) // chunk_tokens
    if num_chunks < MIN_CHUNKS:
        raise ConfigError(
            f"{description}: {len(ids)} tokens make {num_chunks} chunks of {chunk_tokens}; accepted: {MIN_CHUNKS} or "
            "more. Give a longer text, or a smaller --ctx"
        )
    chunks = np.array(ids[: num_chunks * chunk_tokens], np.int32).reshape(num_chunks, chunk_tokens)
    return Corpus(chunks, description, hashlib.sha256(text.encode()).hexdigest())


def _read(text_file: Path | None) -> tuple[str, str]:
    if text_file is None:
        return default_text(), "Python's language reference (pydoc_data.topics)"
    try:
        return text_file.read_text(encoding="utf-8"), str(text_file)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--text {text_file} cannot be read as UTF-8: {error}") from error
