"""Every error this package raises on purpose; callers branch on the class, never on the text.

A message has four parts: what was given, what is accepted, where it came from, and what to do.
"""

import difflib
from collections.abc import Iterable


class OmniError(Exception):
    """Root of the tree."""


class ConfigError(OmniError, ValueError):
    """A deploy YAML, command-line flag, keyword or environment variable is wrong."""


class ProfileNotFoundError(ConfigError):
    """A deploy profile has no file for the model; the message lists what exists."""


class HardwareError(OmniError):
    """The machine lacks something that the chosen configuration needs."""


class WeightError(OmniError, ValueError):
    """A checkpoint or weight file is damaged, incomplete or of another model."""


class CapacityError(OmniError):
    """There is no room: memory at start, or the request queue while serving.

    Attributes:
        retry_after_s: Seconds after which a retry is sensible; None where retrying cannot help.
    """

    def __init__(self, message: str, retry_after_s: int | None = None):
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RequestError(OmniError, ValueError):
    """One request is at fault; the engine is not.

    Attributes:
        message: Text for the client.
        status_code: HTTP status, 400..499.
        error_type: The `type` of the OpenAI error body.
    """

    def __init__(self, message: str, status_code: int = 400, error_type: str = "BadRequestError"):
        super().__init__(message)
        self.message = message
        self.status_code = status_code
        self.error_type = error_type


# The name vLLM-Omni gives this class.
OmniClientError = RequestError


class EngineError(OmniError, RuntimeError):
    """The engine could not start, or failed to run a request."""


class StageError(EngineError):
    """No request can be served any more: a stage has died or was shut down. `stage_id` says which, None all of them."""

    def __init__(self, message: str, stage_id: int | None = None):
        super().__init__(message)
        self.stage_id = stage_id


def nearest(name: str, accepted: Iterable[str]) -> str:
    """A hint for an unknown `name`: the nearest accepted names, or all of them when none is near."""
    choices = sorted(accepted)
    close = difflib.get_close_matches(name, choices, n=3, cutoff=0.6)
    if close:
        return "did you mean " + " or ".join(repr(match) for match in close) + "?"
    return "accepted: " + ", ".join(choices)
