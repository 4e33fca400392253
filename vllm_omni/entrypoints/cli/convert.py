"""`vllm-omni convert`: imports a GGUF file into a Hugging Face model directory."""

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

from vllm_omni.entrypoints.byte_progress import byte_progress
from vllm_omni.errors import ConfigError

DTYPES = ("bfloat16", "float16", "float32")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of the subcommand."""
    parser.add_argument("source", type=Path, metavar="SOURCE.gguf", help="GGUF file to import")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="directory to make")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="tensor type (default: %(default)s)")
    parser.add_argument(
        "--overwrite", action="store_true", help="replace DIR if an earlier conversion wrote it; nothing else is"
    )


def run(args: argparse.Namespace, rest: Sequence[str]) -> int:
    """Converts, with a progress bar on stderr and one line of results on stdout.

    Raises:
        ConfigError: An argument is unknown, the source does not exist, or the directory may not or cannot be written.
        WeightError: The file is damaged or not of an accepted kind.
    """
    if rest:
        raise ConfigError(f"unknown arguments {list(rest)}; `vllm-omni convert --help` lists what is accepted")

    from vllm_omni.quantization.gguf_import import import_gguf, plan_import

    begin_s = time.perf_counter()
    plan = plan_import(args.source, args.dtype)
    with byte_progress(plan.weight_bytes, "convert") as advance:
        import_gguf(plan, args.out, args.overwrite, advance)
    print(
        f"directory={args.out} dtype={args.dtype} tensors={len(plan.tensors)} bytes={plan.weight_bytes} "
        f"seconds={time.perf_counter() - begin_s:.1f}"
    )
    return 0
