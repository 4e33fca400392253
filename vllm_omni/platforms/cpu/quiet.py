"""Silences messages of vLLM and torch that do not apply to one eager process on a CPU.

An operator cannot act on any of them. Everything else at WARNING and above stays.
"""

import logging
import warnings
from collections.abc import Mapping

# Logger to the beginnings of its message templates, each with why it does not apply here.
INAPPLICABLE_MESSAGES: Mapping[str, tuple[str, ...]] = {
    "vllm.engine.arg_utils": ("The global random seed is set to",),  # one process is the design
    "vllm.config.vllm": (
        "Enforce eager set, disabling torch.compile",  # chosen by the profile
        "Inductor compilation was disabled by user settings",  # chosen by the profile
        "Model Runner V2 requires Triton",  # left out of the installation
    ),
    "vllm.platforms.cpu": ("Triton is not installed",),  # left out of the installation
    "vllm.v1.worker.cpu_worker": (
        "%s is not found in LD_PRELOAD",  # a running process cannot preload
        "CPU backend doesn't allow to use `torch.set_num_threads`",  # the threads are set before
    ),
    "vllm.utils.torch_utils": ("OMP_NUM_THREADS=%s is set",),  # set by this package
}


class DropInapplicable(logging.Filter):
    """Drops records whose template begins with one of `beginnings`."""

    def __init__(self, beginnings: tuple[str, ...]):
        super().__init__()
        self.beginnings = beginnings

    def filter(self, record: logging.LogRecord) -> bool:
        return not str(record.msg).startswith(self.beginnings)


def silence_inapplicable_messages() -> None:
    """Installs the filters. Re-entrant; may be called before vLLM is imported."""
    for name, beginnings in INAPPLICABLE_MESSAGES.items():
        target = logging.getLogger(name)
        if not any(isinstance(installed, DropInapplicable) for installed in target.filters):
            target.addFilter(DropInapplicable(beginnings))
    logging.getLogger("torch._library.triton").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", message="`torch.distributed.reduce_op` is deprecated", category=FutureWarning)
