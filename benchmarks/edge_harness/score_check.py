"""Compares log-probabilities that two numeric paths give to the same tokens, before anything is timed.

Tokens are no such comparison: where the two largest logits are close, either path may choose its own without being
wrong, and all that follows differs.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from vllm_omni.errors import EngineError

# Nats. SmolLM2-135M on the native arms avx512_vnni, avx2 and generic against torch, which quantize activations alike
# and sum in another order: 0.08 or less as root mean square, 0.27 at the worst token. A wrong matrix, position or mask
# moves log-probabilities by several nats.
RMS_TOLERANCE = 0.25
MAX_TOLERANCE = 1.0


@dataclass(frozen=True)
class Scores:
    """What a path says of a text.

    Attributes:
        token_ids: Of the text and what follows it.
        logprobs: Of every token but the first, each given those before it.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


def score_differences(found: Scores, expected: Scores) -> dict[str, float]:
    """Root mean square and largest difference of the log-probabilities; infinite where one is not finite.

    Raises:
        EngineError: The scores are of different tokens.
    """
    if found.token_ids != expected.token_ids or len(found.logprobs) != len(expected.logprobs):
        raise EngineError("the two paths have scored different tokens; nothing can be compared")
    pairs = list(zip(found.logprobs, expected.logprobs, strict=True))
    if not pairs or not all(math.isfinite(value) for pair in pairs for value in pair):
        return {"rms": math.inf, "max": math.inf}
    differences = [abs(one - other) for one, other in pairs]
    return {"rms": math.sqrt(math.fsum(each * each for each in differences) / len(pairs)), "max": max(differences)}


def require_same_scores(found: Scores, expected: Scores) -> dict[str, float]:
    """The differences, of which none exceeds its tolerance.

    Raises:
        EngineError: One does, or as `score_differences`; the speed of a wrong answer is not measured.
    """
    differences = score_differences(found, expected)
    if differences["rms"] > RMS_TOLERANCE or differences["max"] > MAX_TOLERANCE:
        raise EngineError(
            f"log-probabilities of the same tokens differ by {differences['rms']:.2g} as root mean square and by "
            f"{differences['max']:.2g} at most; accepted are {RMS_TOLERANCE:g} and {MAX_TOLERANCE:g}. The speed of a "
            "wrong answer is not reported; run tests/parity"
        )
    return differences


def parse_ids(text: str) -> list[int]:
    """Token ids of a command line, separated by commas."""
    return [int(word) for word in text.split(",")]


def format_ids(token_ids: Sequence[int]) -> str:
    """The text for `parse_ids`."""
    return ",".join(map(str, token_ids))
