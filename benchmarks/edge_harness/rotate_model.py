"""Rotates the residual stream of a model by a random orthogonal matrix: other weights, the same function.

    python -m benchmarks.edge_harness.rotate_model --model DIR --out DIR [--seed 0] [--dtype float32]

A model that was made from a 4-bit file has weights on a 4-bit grid, which such formats store without loss. Rotated,
they lie off every grid, and quantizers can be compared on it.

With h the residual stream and Q orthogonal, h becomes h Q. That does not change a root mean square, so a norm commutes
with it once its weight is folded into the matrices that follow:

    matrix that reads the stream      W  ->  W diag(norm weight) Q
    matrix that writes to it          W  ->  transpose(Q) W              (its bias b -> b Q)
    embedding                         E  ->  E Q
    output layer                      E diag(final norm weight) Q        no longer tied to the embedding
    norms                             1

Heads, and norms and rotations within them, are not touched.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from benchmarks.edge_harness.command_line import run_program
from benchmarks.edge_harness.comparison import say
from vllm_omni.errors import ConfigError
from vllm_omni.quantization.conversion_record import ConversionRecord, hash_directory, write_record
from vllm_omni.quantization.json_file import write_json
from vllm_omni.quantization.output_directory import staged_directory
from vllm_omni.quantization.quantize_settings import EMBEDDING_NAME
from vllm_omni.quantization.safetensors_format import TensorEntry, write_shard
from vllm_omni.quantization.source_tensors import HfSource
from vllm_omni.quantization.tensor_table import TABLE_MODEL_TYPES, TIED_NAME, expected_tensors

MODULE = "benchmarks.edge_harness.rotate_model"
METHOD = "rotate"
FINAL_NORM = "model.norm.weight"
STREAM_NORMS = ("input_layernorm.weight", "post_attention_layernorm.weight", FINAL_NORM)
# Part of a layer that reads the stream to the norm before it.
READERS = {
    "self_attn.q_proj": "input_layernorm",
    "self_attn.k_proj": "input_layernorm",
    "self_attn.v_proj": "input_layernorm",
    "mlp.gate_proj": "post_attention_layernorm",
    "mlp.up_proj": "post_attention_layernorm",
}
WRITERS = ("self_attn.o_proj", "mlp.down_proj")
DTYPES = {"float32": "F32", "bfloat16": "BF16"}


def random_rotation(size: int, seed: int) -> np.ndarray:
    """[size, size] float64: an orthogonal matrix, evenly distributed."""
    rng = np.random.default_rng(seed)
    rotation, upper = np.linalg.qr(rng.standard_normal((size, size)))
    # The signs make the distribution even (Mezzadri, arXiv math-ph/0609050, section 5).
    return rotation * np.sign(np.diagonal(upper))


class RotatedTensors:
    """The tensors of the rotated model, computed one by one.

    Args:
        source: The model.
        rotation: [hidden, hidden] float64, orthogonal.

    Raises:
        ConfigError: The model is of a type whose tensors are not known here.
    """

    def __init__(self, source: HfSource, rotation: np.ndarray):
        if source.config.get("model_type") not in TABLE_MODEL_TYPES:
            raise ConfigError(
                f"--model {source.path}: model_type {source.config.get('model_type')!r}; accepted: "
                f"{', '.join(TABLE_MODEL_TYPES)}"
            )
        self.source = source
        self.rotation = rotation
        self.shapes = {name: shape for name, shape in expected_tensors(source.config).items() if self._exists(name)}

    def compute(self, name: str) -> np.ndarray:
        """One tensor of the rotated model, float64."""
        if name.endswith(STREAM_NORMS):
            return np.ones(self.shapes[name])
        if name == TIED_NAME:
            head = name if name in self.source.tensors else EMBEDDING_NAME
            return (self._read(head) * self._read(FINAL_NORM)) @ self.rotation
        if name == EMBEDDING_NAME:
            return self._read(name) @ self.rotation
        return self._layer_tensor(name)

    def _layer_tensor(self, name: str) -> np.ndarray:
        stem, _, kind = name.rpartition(".")
        *layer, part = stem.split(".", 3)
        if part in READERS and kind == "weight":
            norm = ".".join([*layer, READERS[part], "weight"])
            return (self._read(name) * self._read(norm)) @ self.rotation
        if part in WRITERS:
            return self.rotation.T @ self._read(name)
        return self._read(name)

    def _read(self, name: str) -> np.ndarray:
        return self.source.rows(name, 0, self.shapes[name][0]).astype(np.float64)

    def _exists(self, name: str) -> bool:
        return name in self.source.tensors or name == TIED_NAME


def rotate(source: HfSource, out: Path, seed: int, dtype: str = "float32") -> None:
    """Writes the rotated model's checkpoint directory.

    Args:
        source: The model; small enough that a matrix fits memory in float64.
        out: Directory to make.
        seed: Determines the rotation.
        dtype: A key of `DTYPES`; what the weights are rounded to.

    Raises:
        ConfigError: `out` exists or cannot be written, or the model's type is not accepted.
    """
    tensors = RotatedTensors(source, random_rotation(source.config["hidden_size"], seed))
    entries = [(name, TensorEntry(DTYPES[dtype], shape)) for name, shape in tensors.shapes.items()]
    with staged_directory(out, False, sum(entry.num_bytes for _, entry in entries)) as directory:
        file_entry = write_shard(directory / "model.safetensors", entries, _pieces(tensors, dtype))
        config = source.config | {"tie_word_embeddings": False, "dtype": dtype}
        write_json(directory / "config.json", config)
        source.write_side_files(directory)
        files = hash_directory(directory, {"model.safetensors": file_entry})
        record = ConversionRecord(METHOD, dtype, source.hashes(), files, {"seed": seed})
        write_record(directory, record)


def _pieces(tensors: RotatedTensors, dtype: str) -> Iterator[bytes]:
    for name in tensors.shapes:
        values = np.ascontiguousarray(tensors.compute(name), "<f4")
        yield values.tobytes() if dtype == "float32" else _bfloat16(values)


def _bfloat16(values: np.ndarray) -> bytes:
    """Rounded to the nearest, halves to even."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("<u2").tobytes()


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description="Rotate a model's residual stream.")
    parser.add_argument("--model", type=Path, required=True, metavar="DIR", help="checkpoint directory")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="directory to make")
    parser.add_argument("--seed", type=int, default=0, help="determines the rotation (default %(default)s)")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="float32", help="of weights (default %(default)s)")
    return parser


def run(args: argparse.Namespace, _words: Sequence[str]) -> None:
    """Writes the rotated model.

    Raises:
        OmniError: The input is wrong or damaged.
    """
    rotate(HfSource(args.model), args.out, args.seed, args.dtype)
    say(f"wrote {args.out}")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit code of `run_program`."""
    return run_program("rotate_model", build_parser(), run, argv)


if __name__ == "__main__":
    sys.exit(main())
