"""The short way of decode steps: which steps take it, and the arrays that they compute from."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from vllm_omni.worker.decode_step import DecodeInputs, is_plain_decode

BLOCK_SIZE = 16
MAX_SEQS = 4


def block_table(rows: list[list[int]]) -> Any:
    numbers = np.zeros((MAX_SEQS, 8), np.int32)
    for row, blocks in enumerate(rows):
        numbers[row, : len(blocks)] = blocks
    return SimpleNamespace(block_size=BLOCK_SIZE, block_table=SimpleNamespace(np=numbers))


def batch(tokens: list[list[int]], tables: list[Any]) -> Any:
    """A batch whose requests have everything computed but their last token."""
    token_ids = np.zeros((MAX_SEQS, 100), np.int32)
    for row, each in enumerate(tokens):
        token_ids[row, : len(each)] = each
    computed = np.zeros(MAX_SEQS, np.int32)
    computed[: len(tokens)] = [len(each) - 1 for each in tokens]
    return SimpleNamespace(
        num_reqs=len(tokens),
        num_computed_tokens_cpu=computed,
        token_ids_cpu=token_ids,
        block_table=SimpleNamespace(block_tables=tables),
    )


def test_each_request_computes_its_last_token() -> None:
    tokens = [list(range(100, 117)), [7]]
    step = DecodeInputs(MAX_SEQS, 1).fill(batch(tokens, [block_table([[5, 9], [3]])]))
    assert step.token_ids is not None
    assert step.token_ids.tolist() == [116, 7]
    assert step.positions.tolist() == [16, 0]
    (group,) = step.groups
    assert group.query_start.tolist() == [0, 1, 2]
    assert group.seq_lens.tolist() == [17, 1]
    assert group.slots.tolist() == [9 * BLOCK_SIZE, 3 * BLOCK_SIZE]
    assert group.block_table[:, :2].tolist() == [[5, 9], [3, 0]]


def test_each_group_has_its_own_blocks() -> None:
    step = DecodeInputs(MAX_SEQS, 2).fill(batch([[1, 2, 3]], [block_table([[4]]), block_table([[6]])]))
    assert [group.slots.tolist() for group in step.groups] == [[4 * BLOCK_SIZE + 2], [6 * BLOCK_SIZE + 2]]


def test_a_step_of_fewer_requests_shows_none_of_the_step_before() -> None:
    inputs = DecodeInputs(MAX_SEQS, 1)
    inputs.fill(batch([[1, 2], [3, 4], [5, 6]], [block_table([[1], [2], [3]])]))
    step = inputs.fill(batch([[8, 9]], [block_table([[7]])]))
    assert len(step.positions) == len(step.groups[0].seq_lens) == 1
    assert step.groups[0].slots.tolist() == [7 * BLOCK_SIZE + 1]


def scheduled(**changes: Any) -> Any:
    cached = {"req_ids": ["a", "b"], "num_computed_tokens": [4, 9], "resumed_req_ids": set()}
    cached |= {key: changes.pop(key) for key in tuple(changes) if key in cached}
    fields = {
        "num_scheduled_tokens": {"a": 1, "b": 1},
        "total_num_scheduled_tokens": 2,
        "scheduled_new_reqs": [],
        "scheduled_spec_decode_tokens": {},
    }
    return SimpleNamespace(scheduled_cached_reqs=SimpleNamespace(**cached), **(fields | changes))


def is_plain(output: Any) -> bool:
    requests = {"a": SimpleNamespace(num_tokens=5), "b": SimpleNamespace(num_tokens=10)}
    return is_plain_decode(output, requests)


def test_one_token_of_each_request_is_plain() -> None:
    assert is_plain(scheduled())


@pytest.mark.parametrize(
    "changes",
    [
        {"num_scheduled_tokens": {}, "total_num_scheduled_tokens": 0, "req_ids": [], "num_computed_tokens": []},
        {"num_scheduled_tokens": {"a": 1, "b": 3}, "total_num_scheduled_tokens": 4},
        {"scheduled_new_reqs": ["c"]},
        {"scheduled_spec_decode_tokens": {"a": [1]}},
        {"resumed_req_ids": {"a"}},
        {"num_computed_tokens": [4, 7]},
        {"req_ids": ["a"], "num_computed_tokens": [4]},
    ],
    ids=["nothing", "a prompt", "a new request", "drafts", "a resumed request", "a part of a prompt", "not all cached"],
)
def test_other_steps_go_vllms_way(changes: dict[str, Any]) -> None:
    assert not is_plain(scheduled(**changes))


def test_a_step_is_made_anew_only_where_rows_or_tables_are_other_ones() -> None:
    inputs, table = DecodeInputs(MAX_SEQS, 1), block_table([[1], [2]])
    first = inputs.fill(batch([[1, 2]], [table]))
    assert inputs.fill(batch([[1, 2, 3]], [table])) is first
    assert first.positions.tolist() == [2]
    assert inputs.fill(batch([[1, 2], [3]], [table])) is not first
    assert inputs.fill(batch([[4, 5]], [table])) is first
    moved = inputs.fill(batch([[4, 5]], [block_table([[3]])]))
    assert moved is not first
    assert moved.groups[0].block_table[:, 0].tolist() == [3]
