import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from vllm_omni.errors import ConfigError
from vllm_omni.platforms.cpu.shims.process_groups import BACKEND, process_groups

NEW_GROUP = dist.new_group


@pytest.fixture(autouse=True)
def no_groups_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """torch's groups belong to the process, and making them replaces its exception hook."""
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.delenv("VLLM_OMNI_SHIM_PROCESS_GROUPS", raising=False)
    assert not dist.is_initialized()
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def group() -> dist.ProcessGroup:
    """A group that was asked of gloo."""
    with process_groups(1):
        return dist.new_group([0], backend="gloo")


def num_gloo_threads() -> int:
    return sum("gloo" in path.read_text() for path in Path("/proc/self/task").glob("*/comm"))


def test_groups_of_the_block_have_no_threads(group: dist.ProcessGroup) -> None:
    assert (dist.get_backend(), dist.get_backend(group)) == (BACKEND, BACKEND)
    assert num_gloo_threads() == 0


def test_a_group_knows_its_rank_size_and_name(group: dist.ProcessGroup) -> None:
    assert (dist.get_rank(group), dist.get_world_size(group), dist.get_process_group_ranks(group)) == (0, 1, [0])
    assert group.group_name
    assert group.group_name != dist.group.WORLD.group_name


def test_a_sum_over_one_rank_is_what_it_had(group: dist.ProcessGroup) -> None:
    tensor = torch.tensor([1.0, 2.0])
    dist.all_reduce(tensor, group=group)
    assert tensor.tolist() == [1.0, 2.0]


def test_an_asynchronous_collective_is_waited_for(group: dist.ProcessGroup) -> None:
    tensor = torch.tensor([1.0, 2.0])
    assert dist.all_reduce(tensor, op=dist.ReduceOp.MIN, group=group, async_op=True).wait() is True
    assert tensor.tolist() == [1.0, 2.0]


def test_an_asynchronous_collective_is_complete_before_it_is_waited_for(group: dist.ProcessGroup) -> None:
    work = dist.all_reduce(torch.ones(1), group=group, async_op=True)
    assert work.is_completed() is True
    assert work.is_success() is True


def test_a_broadcast_leaves_the_senders_tensor(group: dist.ProcessGroup) -> None:
    tensor = torch.tensor([3, 4])
    dist.broadcast(tensor, src=0, group=group)
    assert tensor.tolist() == [3, 4]


def test_a_gathered_tensor_is_a_copy(group: dist.ProcessGroup) -> None:
    tensor, gathered = torch.tensor([5, 6]), [torch.zeros(2, dtype=torch.int64)]
    dist.all_gather(gathered, tensor, group=group)
    tensor.zero_()
    assert gathered[0].tolist() == [5, 6]


def test_objects_are_exchanged(group: dist.ProcessGroup) -> None:
    gathered, sent = [None], [{"name": "sent"}]
    dist.all_gather_object(gathered, {"name": "gathered"}, group=group)
    dist.broadcast_object_list(sent, src=0, group=group)
    assert (gathered, sent) == ([{"name": "gathered"}], [{"name": "sent"}])


def test_a_barrier_of_one_rank_is_passed(group: dist.ProcessGroup) -> None:
    dist.barrier(group=group)


def test_a_collective_that_the_group_lacks_is_refused(group: dist.ProcessGroup) -> None:
    tensor = torch.ones(1)
    with pytest.raises(RuntimeError, match="No backend type associated"):
        dist.reduce_scatter(tensor, [torch.ones(1)], group=group)


def test_groups_are_destroyed_and_made_again() -> None:
    for _ in range(2):
        with process_groups(1):
            dist.destroy_process_group(dist.new_group([0], backend="gloo"))
        dist.destroy_process_group()
        assert not dist.is_initialized()


def test_several_processes_are_refused() -> None:
    with pytest.raises(ConfigError, match="one of 2 processes; accepted: one"), process_groups(2):
        pytest.fail("the block was entered")
    assert not dist.is_initialized()


def test_after_the_block_torch_is_as_it_was(group: dist.ProcessGroup) -> None:
    assert dist.new_group is NEW_GROUP


def test_after_an_error_torch_is_as_it_was() -> None:
    with pytest.raises(KeyError), process_groups(1):
        raise KeyError
    assert dist.new_group is NEW_GROUP


def test_an_applications_group_stays_its_own() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with process_groups(1):
        assert dist.get_backend(dist.new_group([0], backend="gloo")) == BACKEND
    assert dist.get_backend() == "gloo"


def test_an_application_of_several_processes_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as of_two:
        of_two.setattr(dist, "is_initialized", lambda: True)
        of_two.setattr(dist, "get_world_size", lambda: 2)
        with process_groups(1):
            assert dist.new_group is NEW_GROUP


def test_the_switch_leaves_gloo_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_OMNI_SHIM_PROCESS_GROUPS", "0")
    with process_groups(1):
        assert dist.new_group is NEW_GROUP
        assert not dist.is_initialized()
