"""`vllm-omni quantize`: packs a checkpoint's weights into 4 or 8 bits."""

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_omni.entrypoints.byte_progress import byte_progress
from vllm_omni.errors import ConfigError

if TYPE_CHECKING:
    from vllm_omni.quantization.calibration import LayerRunner
    from vllm_omni.quantization.quantize import QuantizePlan
    from vllm_omni.quantization.quantize_settings import QuantizeSettings

BITS = (4, 8)
GROUP_SIZES = (32, 64, 128)
DEFAULT_GROUP_SIZE = 64
METHODS = ("rtn", "gptq")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of the subcommand."""
    parser.add_argument("source", type=Path, metavar="SOURCE", help="checkpoint directory, or .gguf file")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="directory to make")
    parser.add_argument("--bits", type=int, choices=BITS, help="bits of a weight (default: 4)")
    parser.add_argument(
        "--group-size", type=int, choices=GROUP_SIZES, help="weights sharing a scale and a minimum (default: 64)"
    )
    parser.add_argument(
        "--method",
        choices=METHODS,
        help="rtn: search of scales and minima; gptq: also makes up for errors, needs calibration (default: rtn)",
    )
    parser.add_argument(
        "--calibration",
        metavar="TEXT",
        help="text whose activations weigh the errors: a UTF-8 file, `default` (shipped) or `none` "
        "(default: none for rtn, default for gptq)",
    )
    parser.add_argument(
        "--override",
        action="append",
        default=[],
        metavar="PATTERN=BITS[:GROUP]",
        help="other bits and group size for tensors by name (with * and ?), or for `head`, `embedding`, `down`; "
        "can be repeated, the last match counts",
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="replace DIR if an earlier conversion wrote it; nothing else is"
    )


def run(args: argparse.Namespace, rest: Sequence[str]) -> int:
    """Quantizes, with a progress bar on stderr and one line of results on stdout.

    Raises:
        ConfigError: An argument is unknown or wrong, the source does not exist, or the directory may not or cannot be
            written.
        WeightError: The source is damaged or not of an accepted kind.
    """
    if rest:
        raise ConfigError(f"unknown arguments {list(rest)}; `vllm-omni quantize --help` lists what is accepted")

    from vllm_omni.quantization.quantize import open_source, plan_quantize, quantize

    begin_s = time.perf_counter()
    settings = _settings(args)
    plan = plan_quantize(open_source(args.source), settings)
    with byte_progress(plan.weight_bytes, "quantize") as advance:
        make_runner = None if settings.calibration_text is None else _make_runner
        record = quantize(plan, args.out, args.overwrite, advance, make_runner)
    print(
        f"directory={args.out} method={plan.method} bits={record.settings['bits']} "
        f"group_size={record.settings['group_size']} bits_per_weight={record.settings['bits_per_weight']} "
        f"bytes={plan.weight_bytes} seconds={time.perf_counter() - begin_s:.1f}"
    )
    return 0


def _settings(args: argparse.Namespace) -> "QuantizeSettings":
    from vllm_omni.quantization.calibration import read_calibration
    from vllm_omni.quantization.quantize_settings import QuantizeSettings, parse_override

    method = args.method or METHODS[0]
    calibration = args.calibration or ("default" if method == "gptq" else "none")
    chosen = (args.bits, args.group_size, args.method, args.calibration)
    return QuantizeSettings(
        bits=args.bits or BITS[0],
        group_size=args.group_size or DEFAULT_GROUP_SIZE,
        method=method,
        calibration_text=read_calibration(calibration),
        overrides=tuple(parse_override(text) for text in args.override),
        keep_grid=all(value is None for value in chosen),
    )


def _make_runner(plan: "QuantizePlan") -> "LayerRunner":
    from vllm_omni.model_executor.calibration import make_layer_runner

    return make_layer_runner(plan)
