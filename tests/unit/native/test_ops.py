"""What the bindings refuse; what they compute is tested in `tests/parity`."""

import gc
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.native.cases import CacheShape, aligned, empty_cache, random_matrix, rope_table
from vllm_omni.errors import ConfigError, EngineError, HardwareError, WeightError
from vllm_omni.native import ops
from vllm_omni.native.library import Library
from vllm_omni.native.ops import Matrix, Team

RNG = np.random.default_rng(0)
SAMPLE = random_matrix(RNG, (20, 40), 4, 32)
MATRIX = SAMPLE.packed
X = np.ones((3, 40), np.float32)


# Matrices.


def test_a_matrix_keeps_its_numbers() -> None:
    assert MATRIX.shape == (20, 40)
    assert MATRIX.num_groups == 2
    assert MATRIX.data.nbytes == ops.packed_bytes(20, 40, 4, 32) == 2 * 2 * 320


@pytest.mark.parametrize(("bits", "group_size"), [(3, 32), (4, 16), (4, 0), (16, 64)])
def test_a_matrix_of_another_format_is_refused(bits: int, group_size: int) -> None:
    with pytest.raises(WeightError, match=rf"bits={bits}, group_size={group_size}; accepted: bits 4, 8"):
        Matrix(MATRIX.data, 20, 40, bits, group_size)


def test_a_matrix_with_too_few_bytes_is_refused() -> None:
    with pytest.raises(WeightError, match=r"\[40, 40\].* 1920 contiguous bytes needed, uint8 \[2, 2, 320\]"):
        Matrix(MATRIX.data, 40, 40, 4, 32)


def test_a_matrix_of_another_dtype_or_order_is_refused() -> None:
    with pytest.raises(WeightError, match=r"int8 .* given"):
        Matrix(MATRIX.data.view(np.int8), 20, 40, 4, 32)  # type: ignore[arg-type]
    with pytest.raises(WeightError, match="contiguous bytes needed"):
        Matrix(np.repeat(MATRIX.data, 2, axis=0)[::2], 20, 40, 4, 32)


def test_a_matrix_that_is_not_aligned_is_refused() -> None:
    with pytest.raises(WeightError, match="not aligned to 64 bytes"):
        Matrix(aligned(MATRIX.data, offset=16), 20, 40, 4, 32)


# Arrays.


@pytest.mark.parametrize(
    "x",
    [X.astype(np.float64), X[:, :39], np.ones((3, 80), np.float32)[:, ::2], X.reshape(3, 40, 1)],
    ids=["dtype", "columns", "strides", "dimensions"],
)
def test_an_array_that_does_not_fit_is_refused(team: Team, x: np.ndarray) -> None:
    with pytest.raises(EngineError, match=r"x: contiguous float32 \[3, 40\] needed, .* given"):
        ops.linear(team, MATRIX, x)


def test_an_output_that_does_not_fit_is_refused(team: Team) -> None:
    with pytest.raises(EngineError, match=r"out: contiguous float32 \[3, 20\] needed, float32 \[3, 21\]"):
        ops.linear(team, MATRIX, X, np.empty((3, 21), np.float32))


def test_an_output_is_filled(team: Team) -> None:
    out = np.full((3, 20), np.nan, np.float32)
    assert ops.linear(team, MATRIX, X, out) is out
    np.testing.assert_array_equal(out, ops.linear(team, MATRIX, X))


@pytest.mark.parametrize("row", [-1, 20])
def test_a_row_that_is_not_there_is_refused(team: Team, row: int) -> None:
    with pytest.raises(EngineError, match=rf"native core: row is {row}, accepted: 0 to 20 exclusive"):
        ops.dequantize_rows(team, MATRIX, np.array([0, row], np.int32))


@pytest.mark.parametrize(("begin", "count"), [(-1, 2), (19, 2), (0, 21)])
def test_a_panel_that_is_not_there_is_refused(team: Team, begin: int, count: int) -> None:
    with pytest.raises(EngineError, match="native core: rows is"):
        ops.dequantize_panel(team, MATRIX, begin, count)


def test_a_position_beyond_the_table_is_refused(team: Team) -> None:
    x, table = np.ones((2, 1, 8), np.float32), rope_table(5, 8)
    with pytest.raises(EngineError, match="position is 5, accepted: 0 to 5 exclusive"):
        ops.rope(team, x, np.array([0, 5]), table)


@pytest.mark.parametrize("rotary_dim", [10, 3])
def test_a_rotation_that_does_not_fit_a_head_is_refused(team: Team, rotary_dim: int) -> None:
    table = np.ones((5, rotary_dim), np.float32)
    with pytest.raises(EngineError, match=f"rotary_dim is {rotary_dim}, accepted: an even number from 2 to head_dim 8"):
        ops.rope(team, np.ones((1, 1, 8), np.float32), np.array([0]), table)


def test_names_that_are_not_known_are_refused(team: Team) -> None:
    with pytest.raises(ConfigError, match="activation: 'relu' given, accepted: silu, gelu"):
        ops.gated_activation(team, X, X, "relu")
    with pytest.raises(ConfigError, match="rope style: 'spiral' given, accepted: halves, pairs"):
        ops.rope(team, np.ones((1, 1, 8), np.float32), np.array([0]), rope_table(5, 8), "spiral")


def test_a_slot_beyond_the_cache_is_refused_and_nothing_is_stored(team: Team) -> None:
    cache = empty_cache(CacheShape(2, 1, 16, 8, "bfloat16"))
    k = np.ones((2, 1, 8), np.float32)
    with pytest.raises(EngineError, match="slot is 32, accepted: below num_blocks \\* block_size 32"):
        ops.store_kv(team, cache.view, k, k, np.array([0, 32]))
    assert (cache.memory == 0xFF).all()


def test_a_cache_whose_cells_overlap_is_refused(team: Team) -> None:
    cache = empty_cache(CacheShape(2, 1, 16, 8, "bfloat16"))
    k = np.ones((1, 1, 16), np.float32)
    with pytest.raises(EngineError, match="head_stride is 512, accepted: at least a head's 1024 bytes of a page"):
        ops.store_kv(team, cache.view, k, k, np.array([0]))


# Teams.


def test_a_team_says_what_it_is(library: Library) -> None:
    with Team(3, "generic", library=library) as team:
        assert (team.num_threads, team.isa) == (3, "generic")


@pytest.mark.parametrize("num_threads", [0, -1, 100000])
def test_a_number_of_threads_that_cannot_be_is_refused(library: Library, num_threads: int) -> None:
    with pytest.raises(EngineError, match=f"num_threads is {num_threads}, accepted: 1 to 256"):
        Team(num_threads, library=library)


def test_an_unknown_arm_is_refused(library: Library) -> None:
    with pytest.raises(HardwareError, match=r"^isa='altivec': .* it can run: .*generic"):
        Team(1, "altivec", library=library)


def test_a_closed_team_refuses_work_and_can_be_closed_again(library: Library) -> None:
    team = Team(2, library=library)
    team.close()
    team.close()
    with pytest.raises(EngineError, match="omni_linear: this team was closed"):
        ops.linear(team, MATRIX, X)


def test_a_team_that_nobody_holds_ends_its_threads(library: Library) -> None:
    before = thread_ids()
    team = Team(3, library=library)
    assert len(thread_ids() - before) == 2
    del team
    gc.collect()
    wait_until(lambda: thread_ids() <= before)


def test_a_forked_process_is_told_that_it_has_no_threads(library: Library) -> None:
    """Also where another thread held the team's lock at the fork. The child ends without the parent's clean-up."""
    team = Team(2, library=library)
    expected = ops.linear(team, MATRIX, X)
    reader, writer = os.pipe()
    with team.lock:
        child = os.fork()
    if child == 0:
        try:
            ops.linear(team, MATRIX, X)
            os.write(writer, b"computed")
        except EngineError as error:
            os.write(writer, str(error).encode())
        team.close()
        os._exit(0)
    os.close(writer)
    _, status = os.waitpid(child, 0)
    with os.fdopen(reader, "rb") as answer:
        assert "made before the process was forked" in answer.read().decode()
    assert status == 0
    np.testing.assert_array_equal(ops.linear(team, MATRIX, X), expected)
    team.close()


def test_calls_from_several_threads_wait_for_each_other(team: Team) -> None:
    expected, results = ops.linear(team, MATRIX, X), []

    def work() -> None:
        for _ in range(50):
            results.append(np.array_equal(ops.linear(team, MATRIX, X), expected))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 150


def test_idle_threads_park_and_come_back(library: Library) -> None:
    before = thread_ids()
    with Team(3, spin_us=1000, library=library) as team:
        first = ops.linear(team, MATRIX, X)
        workers = thread_ids() - before
        assert len(workers) == 2
        wait_until(lambda: all(is_sleeping(worker) for worker in workers))
        np.testing.assert_array_equal(ops.linear(team, MATRIX, X), first)
    wait_until(lambda: not workers & thread_ids())


def thread_ids() -> set[str]:
    return {path.name for path in Path("/proc/self/task").iterdir()}


def is_sleeping(thread: str) -> bool:
    """Whether the operating system has put the thread to sleep; one that spins is running."""
    return Path(f"/proc/self/task/{thread}/stat").read_text().rpartition(")")[2].split()[0] == "S"


def wait_until(is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.001)
