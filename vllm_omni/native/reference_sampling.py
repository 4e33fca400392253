"""The definition of sampling in numpy: plain, slow, in float64; what the native core is compared with."""

import numpy as np

from vllm_omni.native.reference import Array
from vllm_omni.native.sampling import Sampling
from vllm_omni.native.spec import FloatArray, LongArray

GREEDY_TEMPERATURE = 1e-5
# Farther below the largest logit, a token is never drawn.
MAX_DEPTH = 87.0
_GOLDEN = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1


def uniform_ref(seed: int, step: int) -> float:
    """A number in [0, 1) of 53 bits: the splitmix64 finalizer of the seed, and of that plus the step."""
    return (_mixed(_mixed(seed + _GOLDEN) + (step + 1) * _GOLDEN) >> 11) * 2.0**-53


def log_softmax_ref(logits: FloatArray) -> FloatArray:
    """[R, V]: logarithms of the probabilities of `logits` [R, V]."""
    wide = logits.astype(np.float64)
    largest = wide.max(axis=1, keepdims=True)
    return (wide - largest - np.log(np.exp(wide - largest).sum(axis=1, keepdims=True))).astype(np.float32)


def top_ref(values: FloatArray, count: int) -> LongArray:
    """[R, count]: ids of the largest of each row of `values` [R, V], the lower id first among equals."""
    return np.argsort(-values.astype(np.float64), axis=1, kind="stable")[:, :count]


def sample_ref(logits: FloatArray, settings: list[Sampling]) -> LongArray:
    """[R]: a token for each row of `logits` [R, V]."""
    return np.array([_sample_row(row, each) for row, each in zip(logits, settings, strict=True)], np.int64)


def kept_ref(logits: FloatArray, settings: Sampling) -> tuple[LongArray, Array]:
    """Ids that may be drawn from one row `logits` [V], in the order of the walk, and their probabilities."""
    scaled = logits / np.float32(settings.temperature)
    depth = scaled.max() - scaled
    weights = np.where(depth <= MAX_DEPTH, np.exp(-depth.astype(np.float64)), 0)
    ids = np.flatnonzero(weights)
    if 0 < settings.top_k < len(logits) or settings.min_p > 0 or settings.top_p < 1:
        ids = ids[np.argsort(-scaled[ids], kind="stable")]
        ids = ids[weights[ids] >= settings.min_p]
        ids = ids[: settings.top_k] if settings.top_k > 0 else ids
        before = np.cumsum(weights[ids]) - weights[ids]
        ids = ids[(before < np.float32(settings.top_p) * weights[ids].sum()) | (before == 0)]
    return ids, weights[ids] / weights[ids].sum()


def _sample_row(logits: FloatArray, settings: Sampling) -> int:
    if settings.temperature < GREEDY_TEMPERATURE:
        return int(logits.argmax())
    ids, probabilities = kept_ref(logits, settings)
    drawn = np.searchsorted(np.cumsum(probabilities), uniform_ref(settings.seed, settings.step), side="right")
    return int(ids[min(int(drawn), len(ids) - 1)])


def _mixed(x: int) -> int:
    x &= _MASK
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & _MASK
    return x ^ (x >> 31)
