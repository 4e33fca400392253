"""The output type that vLLM's serving classes accept and callers of this package receive."""

from vllm_omni.engine.compat import RequestOutput
from vllm_omni.outputs import OmniRequestOutput


class StageRequestOutput(OmniRequestOutput, RequestOutput):
    """An `OmniRequestOutput` that is also a vLLM `RequestOutput`; vLLM's Responses API checks the class."""
