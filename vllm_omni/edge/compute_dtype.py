"""Which number format a model computes in on this processor. Pure."""

from vllm_omni.edge.hardware_probe import HardwareReport

# oneDNN multiplies bfloat16 matrices with these; without any of them torch falls back to a plain loop that measured
# 7 GFLOP/s against 77 for float32 (512 rows, 1536 x 576, two Zen 3 cores).
BFLOAT16_GEMM_FLAGS = frozenset({"avx512f", "avx512_bf16", "amx_bf16", "bf16"})
HALF_WIDTH_DTYPES = frozenset({"bfloat16", "float16"})


def choose_dtype(checkpoint_dtype: str | None, report: HardwareReport) -> tuple[str, str] | None:
    """The dtype to compute in and the reason, or None to take the checkpoint's.

    A 16-bit checkpoint is widened to float32, which loses nothing, where the processor has no fast 16-bit matrix
    multiplication. Weights and KV cache then take twice the memory.

    Args:
        checkpoint_dtype: As `config.json` states it; None is taken as 16 bits wide.
        report: What the processor has.
    """
    if (checkpoint_dtype or "bfloat16") not in HALF_WIDTH_DTYPES:
        return None
    fast = BFLOAT16_GEMM_FLAGS.intersection(report.isa_flags)
    if fast:
        return ("bfloat16", f"hardware: {min(fast)}") if checkpoint_dtype == "float16" else None
    return "float32", "hardware: no fast 16-bit matrix multiplication"
