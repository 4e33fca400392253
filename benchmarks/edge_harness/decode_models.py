"""The files that both engines of `bench_decode` run: a real model for both, or one geometry with random weights."""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.edge_harness.comparison import say
from benchmarks.edge_harness.geometry import GEOMETRIES, Geometry
from benchmarks.edge_harness.native_model import bytes_per_token
from benchmarks.edge_harness.random_artifact import random_artifact
from benchmarks.edge_harness.random_gguf import gguf_tensor_bytes, random_gguf
from vllm_omni.quantization.artifact import read_artifact
from vllm_omni.quantization.gguf_file import open_gguf
from vllm_omni.quantization.quantize import open_source, plan_quantize, quantize
from vllm_omni.quantization.quantize_settings import QuantizeSettings


@dataclass(frozen=True)
class DecodeModels:
    """One model in each engine's form.

    Attributes:
        artifact: Directory for this package.
        artifact_bytes: Bytes of its weights that a decoded token reads.
        ggufs: Type to file for llama.cpp; empty when it does not run.
        gguf_bytes: Type to bytes of all tensors of the file.
        vocab_size: Of the model.
        is_real: Weights are of a trained model, so that a text has a log-probability that says something.
    """

    artifact: Path
    artifact_bytes: int
    ggufs: Mapping[str, Path]
    gguf_bytes: Mapping[str, int]
    vocab_size: int
    is_real: bool


def make_models(args: argparse.Namespace) -> DecodeModels:
    """Finds or makes the models that the command line asks for, in its `work_dir`.

    Raises:
        ConfigError: The GGUF file does not exist, or the directory cannot be written.
        WeightError: The GGUF file is damaged or not accepted.
    """
    args.work_dir.mkdir(parents=True, exist_ok=True)
    if args.gguf is not None:
        return _real_models(args.gguf, args.work_dir)
    types = args.types if args.llama_bench is not None else []
    return _random_models(GEOMETRIES[args.geometry], args, types)


def packed_gguf(gguf: Path, work_dir: Path) -> Path:
    """An artifact with the values of a GGUF file, without loss where its types allow; made once."""
    out = work_dir / f"{gguf.stem}-omni"
    if not out.is_dir():
        say(f"packing {gguf}")
        quantize(plan_quantize(open_source(gguf), QuantizeSettings(keep_grid=True)), out)
    return out


def _real_models(gguf: Path, work_dir: Path) -> DecodeModels:
    artifact = packed_gguf(gguf, work_dir)
    source = read_artifact(artifact)
    gguf_bytes = sum(tensor.num_bytes for tensor in open_gguf(gguf).tensors.values())
    return DecodeModels(
        artifact=artifact,
        artifact_bytes=bytes_per_token(source),
        ggufs={"file": gguf},
        gguf_bytes={"file": gguf_bytes},
        vocab_size=source.config["vocab_size"],
        is_real=True,
    )


def _random_models(geometry: Geometry, args: argparse.Namespace, types: list[str]) -> DecodeModels:
    say(f"{geometry.name}: finding or making random weights in {args.work_dir}")
    artifact = random_artifact(geometry, args.group_size, args.head_bits, args.work_dir)
    ggufs = {mix: random_gguf(geometry, mix, args.work_dir) for mix in types}
    return DecodeModels(
        artifact=artifact,
        artifact_bytes=bytes_per_token(read_artifact(artifact)),
        ggufs=ggufs,
        gguf_bytes={mix: gguf_tensor_bytes(geometry, mix) for mix in types},
        vocab_size=geometry.vocab_size,
        is_real=False,
    )
