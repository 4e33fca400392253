import pytest

from vllm_omni.edge.forward_path import MAX_STEP_ROWS, choose_forward_path


@pytest.mark.parametrize(
    ("num_rows", "expected"),
    [
        (1, "native_step"),
        (MAX_STEP_ROWS, "native_step"),
        (MAX_STEP_ROWS + 1, "native_prefill"),
        (2048, "native_prefill"),
    ],
)
def test_the_native_core_takes_steps_of_every_size(num_rows: int, expected: str) -> None:
    assert choose_forward_path(num_rows, has_native=True) == expected


@pytest.mark.parametrize("num_rows", [1, MAX_STEP_ROWS + 1])
def test_torch_takes_all_where_there_is_no_native_core(num_rows: int) -> None:
    assert choose_forward_path(num_rows, has_native=False) == "torch"
