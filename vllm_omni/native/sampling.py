"""Tokens from logits on the native core: the same bits on every processor, for a row alone or among others.

`native/reference_sampling.py` defines what is computed.
"""

import ctypes
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vllm_omni.native.ops import Team, address_of
from vllm_omni.native.spec import FloatArray, LongArray
from vllm_omni.native.structures import SamplingStruct

# One row of settings for the C ABI, as `SamplingStruct`.
SETTINGS = np.dtype(SamplingStruct)


@dataclass(frozen=True)
class Sampling:
    """How one row of logits becomes a token.

    The tokens that are at least `min_p` as likely as the likeliest are kept, of these the `top_k` likeliest, of these
    the fewest that are at least `top_p` of their sum; one of them is drawn. Among equal logits the lower id counts as
    the likelier.

    Attributes:
        temperature: What logits are divided by, 0 or more; below 1e-5 the largest logit is taken.
        top_p: Above 0, at most 1; 1 keeps all.
        min_p: 0 to 1; 0 keeps all.
        top_k: 1 or more; 0 or less keeps all.
        seed: 64 bits; with `step` it determines the draw.
        step: Tokens that the request has already.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    min_p: float = 0.0
    top_k: int = 0
    seed: int = 0
    step: int = 0

    def fields(self) -> tuple[float, float, float, int, int, int]:
        """In the order of the C structure."""
        return self.temperature, self.top_p, self.min_p, self.top_k, self.seed, self.step


def settings_of(rows: list[Sampling]) -> npt.NDArray[np.void]:
    """The rows for `sample`."""
    return np.array([row.fields() for row in rows], SETTINGS)


def sample(team: Team, logits: FloatArray, settings: npt.NDArray[np.void]) -> LongArray:
    """[R] int64: a token for each row of `logits` [R, V] float32, by `settings` [R] of dtype `SETTINGS`.

    Raises:
        EngineError: A setting is out of its range, or an array is not what it should be.
    """
    rows, columns = logits.shape
    ids = np.empty(rows, np.int64)
    source = address_of(logits, np.float32, (rows, columns), "logits")
    given = address_of(settings, SETTINGS, (rows,), "settings")
    team.call("omni_sample", source, rows, columns, ctypes.cast(given, ctypes.POINTER(SamplingStruct)), ids.ctypes.data)
    return ids


def log_softmax(team: Team, logits: FloatArray, out: FloatArray | None = None) -> FloatArray:
    """[R, V] float32: natural logarithms of the probabilities of `logits` [R, V]. Fills `out` where one is given."""
    rows, columns = logits.shape
    out = np.empty((rows, columns), np.float32) if out is None else out
    source = address_of(logits, np.float32, (rows, columns), "logits")
    target = address_of(out, np.float32, (rows, columns), "out")
    team.call("omni_log_softmax", source, rows, columns, target)
    return out


def top(team: Team, values: FloatArray, count: int) -> LongArray:
    """[R, count] int64: ids of the largest of each row of `values` [R, V], in falling order.

    Raises:
        EngineError: `count` is below 0 or above V.
    """
    rows, columns = values.shape
    ids = np.empty((rows, count), np.int64)
    source = address_of(values, np.float32, (rows, columns), "values")
    team.call("omni_top", source, rows, columns, count, ids.ctypes.data)
    return ids
