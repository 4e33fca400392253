import pytest

from vllm_omni.edge.compute_dtype import FAST_FLAGS, choose_dtype
from vllm_omni.edge.hardware_probe import HardwareReport


def report(*isa_flags: str) -> HardwareReport:
    return HardwareReport(
        model_name=None,
        isa_flags=isa_flags,
        allowed_cpus=(0,),
        physical_cores=1,
        quota_cpus=None,
        total_bytes=None,
        available_bytes=None,
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", None])
def test_half_width_is_widened_where_its_products_are_slow(dtype: str | None) -> None:
    choice = choose_dtype(dtype, report("sse4_2", "avx2"))
    assert choice is not None
    assert choice[0] == "float32"
    assert choice[1].startswith("hardware:")


@pytest.mark.parametrize(("dtype", "flag"), [(dtype, flag) for dtype in FAST_FLAGS for flag in FAST_FLAGS[dtype]])
def test_half_width_stays_where_its_products_are_fast(dtype: str, flag: str) -> None:
    assert choose_dtype(dtype, report("avx2", flag)) is None


def test_an_unstated_dtype_counts_as_bfloat16() -> None:
    assert choose_dtype(None, report("amx_bf16")) is None


def test_float16_never_loses_precision_to_bfloat16() -> None:
    assert choose_dtype("float16", report("avx512f", "amx_bf16")) == (
        "float32",
        "hardware: no fast float16 matrix multiplication",
    )


def test_float32_is_never_touched() -> None:
    assert choose_dtype("float32", report()) is None
    assert choose_dtype("float32", report("amx_bf16")) is None
