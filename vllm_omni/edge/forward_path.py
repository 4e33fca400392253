"""Which implementation computes a step of an artifact's decoder stack. Pure."""

from typing import Literal

ForwardPath = Literal["native_step", "native_prefill", "torch"]

# Up to this many rows reading the weights is what a step costs, with more it is arithmetic; the call is the same.
MAX_STEP_ROWS = 32


def choose_forward_path(num_rows: int, *, has_native: bool) -> ForwardPath:
    """The path of one step.

    Args:
        num_rows: Tokens that the step computes, of all its sequences.
        has_native: Whether the native core runs in this process.
    """
    if not has_native:
        return "torch"
    return "native_step" if num_rows <= MAX_STEP_ROWS else "native_prefill"
