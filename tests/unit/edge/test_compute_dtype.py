import pytest

from vllm_omni.edge.compute_dtype import BFLOAT16_GEMM_FLAGS, choose_dtype
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


@pytest.mark.parametrize("flag", sorted(BFLOAT16_GEMM_FLAGS))
def test_bfloat16_stays_where_it_is_fast(flag: str) -> None:
    assert choose_dtype("bfloat16", report("avx2", flag)) is None
    assert choose_dtype(None, report("avx2", flag)) is None


def test_float16_becomes_bfloat16_where_that_is_fast() -> None:
    assert choose_dtype("float16", report("avx512f")) == ("bfloat16", "hardware: avx512f")


def test_float32_is_never_touched() -> None:
    assert choose_dtype("float32", report()) is None
    assert choose_dtype("float32", report("amx_bf16")) is None
