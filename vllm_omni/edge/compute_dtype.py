"""Which number format a model computes in on this processor. Pure."""

from collections.abc import Mapping

from vllm_omni.edge.hardware_probe import HardwareReport

# Processor flags with which oneDNN multiplies matrices of a 16-bit type fast. Without them torch falls back to a plain
# loop, several times slower than float32.
FAST_FLAGS: Mapping[str, frozenset[str]] = {
    "bfloat16": frozenset({"avx512f", "avx512_bf16", "amx_bf16", "bf16"}),
    "float16": frozenset({"avx512_fp16", "asimdhp"}),
}


def choose_dtype(checkpoint_dtype: str | None, report: HardwareReport) -> tuple[str, str] | None:
    """The dtype to compute in and the reason, or None to take the checkpoint's.

    A 16-bit checkpoint is widened to float32, which loses nothing, where the processor has no fast matrix
    multiplication of its type. Weights and KV cache then take twice the memory.

    Args:
        checkpoint_dtype: As `config.json` states it; None is taken as bfloat16.
        report: What the processor has.
    """
    flags = FAST_FLAGS.get(checkpoint_dtype or "bfloat16")
    if flags is None or flags.intersection(report.isa_flags):
        return None
    return "float32", f"hardware: no fast {checkpoint_dtype or 'bfloat16'} matrix multiplication"
