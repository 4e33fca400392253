"""How far a model's predictions are from those of a base model: the definitions of `llama-perplexity --kl-divergence`.

A chunk of C tokens is scored at its positions C/2 .. C-2, each predicting the token after it. The base's log
probabilities are stored in 16 bits between the largest and 16 below it (by its logits); the KL divergence
sums p_base * (log p_base - log p) over tokens with log p_base above -16. The base's perplexity and its most
likely token come from the stored numbers too.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vllm_omni.native.spec import FloatArray

LOG_RANGE = np.float32(16.0)
LEVELS = np.float32(65535.0)


@dataclass(frozen=True)
class StoredLogProbs:
    """Log probabilities of rows in 16 bits: log p = scale * code + lowest.

    Attributes:
        scale: [rows] float32.
        lowest: [rows] float32.
        codes: [rows, vocabulary] uint16.
    """

    scale: FloatArray
    lowest: FloatArray
    codes: np.ndarray

    def decode(self) -> FloatArray:
        """[rows, vocabulary] float32."""
        return self.scale[:, None] * self.codes.astype(np.float32) + self.lowest[:, None]


def scored_positions(chunk_tokens: int) -> range:
    """Positions of a chunk whose predictions count."""
    return range(chunk_tokens // 2, chunk_tokens - 1)


def store_log_probs(logits: FloatArray) -> StoredLogProbs:
    """The stored form of [rows, vocabulary] float32 logits."""
    largest = logits.max(axis=1)
    smallest = np.maximum(logits.min(axis=1), largest - LOG_RANGE)
    scale = (largest - smallest) / LEVELS
    inverse = np.divide(1.0, scale, out=np.zeros_like(scale), where=scale > 0)
    codes = np.rint((logits - smallest[:, None]) * inverse[:, None])
    codes = np.where(logits > smallest[:, None], codes, 0).astype(np.uint16)
    return StoredLogProbs(scale, smallest - largest - _log_sum(logits, largest), codes)


@dataclass(frozen=True)
class TokenScores:
    """One number for each scored token.

    Attributes:
        nll: Negative log likelihood of the token that came, by the judged model.
        base_nll: The same by the base.
        kl: KL divergence of the judged model from the base.
        is_same_top: Both find the same token most likely.
    """

    nll: np.ndarray
    base_nll: np.ndarray
    kl: np.ndarray
    is_same_top: np.ndarray


def score(logits: FloatArray, base: StoredLogProbs, targets: np.ndarray) -> TokenScores:
    """Scores rows of logits.

    Args:
        logits: [rows, vocabulary] float32 of the judged model.
        base: The same rows of the base.
        targets: [rows], the token that came after each.
    """
    largest = logits.max(axis=1)
    log_probs = logits - (largest + _log_sum(logits, largest))[:, None]
    base_log_probs = base.decode()
    rows = np.arange(len(targets))
    # The largest exponent is 0 where a row is certain; what is below the range counts as nothing.
    terms = np.exp(base_log_probs) * (base_log_probs - log_probs)
    kl = np.where(base_log_probs > -LOG_RANGE, terms, 0.0).sum(axis=1, dtype=np.float64)
    return TokenScores(
        nll=-log_probs[rows, targets].astype(np.float64),
        base_nll=-base_log_probs[rows, targets].astype(np.float64),
        kl=kl,
        is_same_top=logits.argmax(axis=1) == base_log_probs.argmax(axis=1),
    )


def _log_sum(logits: FloatArray, largest: FloatArray) -> FloatArray:
    """[rows]: logarithm of the sum of e^(logit - largest)."""
    return np.log(np.exp(logits - largest[:, None]).sum(axis=1, dtype=np.float64)).astype(np.float32)


@dataclass(frozen=True)
class Fidelity:
    """A judged model in numbers; `*_error` is one standard error of the mean.

    Attributes:
        num_tokens: Tokens scored.
        perplexity: Of the judged model; `base_perplexity` of the base.
        mean_kl: Mean KL divergence in nats; `p99_kl` its 99th percentile.
        same_top_percent: Tokens that both find most likely.
    """

    num_tokens: int
    perplexity: float
    perplexity_error: float
    base_perplexity: float
    mean_kl: float
    mean_kl_error: float
    p99_kl: float
    same_top_percent: float
    same_top_error: float

    def as_dict(self) -> dict[str, Any]:
        return vars(self).copy()


def summarize_scores(chunks: Sequence[TokenScores]) -> Fidelity:
    """The numbers over all chunks; there are two scored tokens or more."""
    nll, base_nll, kl, same = (
        np.concatenate([getattr(each, name) for each in chunks]) for name in ("nll", "base_nll", "kl", "is_same_top")
    )
    perplexity, share = math.exp(nll.mean()), float(same.mean())
    return Fidelity(
        num_tokens=len(nll),
        perplexity=perplexity,
        perplexity_error=perplexity * _standard_error(nll),
        base_perplexity=math.exp(base_nll.mean()),
        mean_kl=float(kl.mean()),
        mean_kl_error=_standard_error(kl),
        p99_kl=float(np.percentile(kl, 99)),
        same_top_percent=100 * share,
        same_top_error=100 * math.sqrt(share * (1 - share) / (len(same) - 1)),
    )


def _standard_error(values: np.ndarray) -> float:
    return float(math.sqrt(values.var() / (len(values) - 1)))
