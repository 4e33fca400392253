"""Gives vLLM the process groups of its one process without gloo's threads.

What is wrong, in vLLM 0.32: one process too gets thirteen process groups. `GroupCoordinator` asks for gloo by name, and
each gloo group has a thread that wakes a hundred times a second and two that wait. `docs/edge/results.md` has what that
costs an idle server.

Here they are groups of one rank, torch's default group included: a collective leaves what it was given. vLLM itself
skips almost all collectives of one rank.

Off: with `VLLM_OMNI_SHIM_PROCESS_GROUPS=0`; by itself where the application made torch's default group of several
processes. `tests/integration/test_shims.py` fails when vLLM makes no gloo group for one process any more.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import Work

from vllm_omni import envs
from vllm_omni.errors import ConfigError

logger = logging.getLogger("vllm_omni.shims")

BACKEND = "omni_one_rank"
REPLACED_BACKEND = "gloo"


class FinishedWork(Work):
    """A collective that ended before its call returned."""

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True


class OneRankGroup(ProcessGroup):
    """A process group of one rank, without threads and connections.

    It has the collectives that synchronise, reduce, and exchange tensors or objects among all; torch raises
    RuntimeError at the others. The names of methods and arguments are torch's.
    """

    def __init__(self) -> None:
        super().__init__(0, 1)
        self._name = ""
        self._description = ""

    def getBackendName(self) -> str:
        return BACKEND

    def getGroupName(self) -> str:
        return self._name

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupDesc(self) -> str:
        return self._description

    def setGroupDesc(self, description: str) -> None:
        self._description = description

    def barrier(self, opts: Any = None) -> Work:
        return FinishedWork()

    def allreduce(self, tensors: Sequence[torch.Tensor], opts: Any = None) -> Work:
        return FinishedWork()

    def broadcast(self, tensors: Sequence[torch.Tensor], opts: Any = None) -> Work:
        return FinishedWork()

    def allgather(
        self, outputs: Sequence[Sequence[torch.Tensor]], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> Work:
        for gathered, tensor in zip(outputs, inputs, strict=True):
            gathered[0].copy_(tensor)
        return FinishedWork()


def _make_group(_store: Any, _rank: int, num_ranks: int, _timeout: Any) -> OneRankGroup:
    """What torch calls to make a group of the backend."""
    if num_ranks != 1:
        raise ConfigError(
            f"the engine is to be one of {num_ranks} processes; accepted: one, it runs in this process alone; leave "
            "tensor_parallel_size, pipeline_parallel_size and data_parallel_size at 1"
        )
    return OneRankGroup()


@contextmanager
def process_groups(num_ranks: int) -> Iterator[None]:
    """Within the block vLLM's groups are made without gloo; torch's default group too, where there is none yet.

    Args:
        num_ranks: Processes that vLLM is configured for.

    Raises:
        ConfigError: There is to be more than one.
    """
    if not envs.VLLM_OMNI_SHIM_PROCESS_GROUPS or (dist.is_initialized() and dist.get_world_size() > 1):
        yield
        return
    dist.Backend.register_backend(BACKEND, _make_group, devices=["cpu"])
    if not dist.is_initialized():
        dist.init_process_group(BACKEND, store=dist.HashStore(), rank=0, world_size=num_ranks)
    new_group = dist.new_group
    num_replaced = 0

    def new_group_without_gloo(*args: Any, backend: str | None = None, **options: Any) -> Any:
        nonlocal num_replaced
        if backend == REPLACED_BACKEND:
            backend = BACKEND
            num_replaced += 1
        return new_group(*args, backend=backend, **options)

    dist.new_group = new_group_without_gloo
    try:
        yield
    finally:
        dist.new_group = new_group
    logger.info("event=shim_used shim=process_groups num_groups=%d", num_replaced)
