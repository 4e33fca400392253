"""Gives logits of a base model by `transformers`, and judges artifacts and GGUF files against them."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.edge_harness.comparison import say
from benchmarks.edge_harness.hf_gguf import write_float_gguf
from benchmarks.edge_harness.kl_base_file import read_base
from benchmarks.edge_harness.kl_statistics import Fidelity, score, scored_positions, summarize_scores
from benchmarks.edge_harness.llama_tools import (
    fidelity_command,
    judge_gguf,
    quantize_command,
    quantize_gguf,
    tool,
)
from benchmarks.edge_harness.native_model import NativeModel
from vllm_omni.native.spec import KV_KINDS, FloatArray
from vllm_omni.quantization.source_tensors import HfSource

# The float file, judged to show that both engines compute the same model.
FLOAT_TYPE = "F32"


@dataclass(frozen=True)
class Judged:
    """One quantized model and what was found.

    Attributes:
        name: For the table.
        bits_per_weight: From the bytes of the file, without the vocabulary that a GGUF file holds.
        fidelity: Its distance from the base.
        how: Path or command that gave it.
    """

    name: str
    bits_per_weight: float
    fidelity: Fidelity
    how: str


def base_logits(directory: Path, threads: int) -> Callable[[np.ndarray], FloatArray]:
    """A function from a chunk's ids to its [scored positions, vocabulary] logits, in float32 throughout."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()

    def logits_of(chunk: np.ndarray) -> FloatArray:
        positions = scored_positions(len(chunk))
        with torch.inference_mode():
            logits = model(torch.from_numpy(chunk.astype(np.int64))[None]).logits[0]
        return logits[positions.start : positions.stop].numpy()

    return logits_of


def judge_artifact(directory: Path, base: Path, threads: int, kv_kind: str = KV_KINDS[0]) -> Judged:
    """An artifact on the native core with a cache of `kv_kind`, each chunk as one prompt.

    Raises:
        WeightError: The directory is no intact artifact, or the base file is damaged.
        HardwareError: There is no native core for this machine.
    """
    scores = []
    chunk_tokens = len(next(read_base(base))[0])
    positions = scored_positions(chunk_tokens)
    with NativeModel(directory, threads, chunk_tokens, kv_kind=kv_kind) as model:
        for chunk, stored in read_base(base):
            hidden = model.prefill(chunk)[positions.start : positions.stop]
            scores.append(score(model.logits(hidden), stored, chunk[positions.start + 1 :]))
        how = f"{directory} on native {model.team.isa}"
    name = directory.name if kv_kind == KV_KINDS[0] else f"{directory.name}, {kv_kind} cache"
    return Judged(name, model.artifact.bits_per_weight, summarize_scores(scores), how)


class LlamaJudge:
    """Judges GGUF files of one checkpoint in llama.cpp's types; files are made once and kept in `work_dir`.

    Args:
        programs: Directory of `llama-quantize` and `llama-perplexity`.
        source: The checkpoint.
        base: File of base predictions.
        work_dir: Directory for files and output.
        threads: Threads of every program.

    Raises:
        ConfigError: A program is missing, or the checkpoint has no form in GGUF here.
    """

    def __init__(self, programs: Path, source: HfSource, base: Path, work_dir: Path, threads: int):
        self.quantizer, self.perplexity = tool(programs, "llama-quantize"), tool(programs, "llama-perplexity")
        self.base, self.work_dir, self.threads = base, work_dir, threads
        self.num_weights = sum(each.entry.num_elements for each in source.tensors.values())
        self.stem = source.path.name
        self.float_file = self._path(FLOAT_TYPE)
        if not self.float_file.is_file():
            say(f"writing {self.float_file}")
            write_float_gguf(source, self.float_file)
        # Header, vocabulary and metadata, the same in each file but for a few bytes.
        self.other_bytes = self.float_file.stat().st_size - 4 * self.num_weights

    def judge(self, mix: str, num_tokens: int) -> Judged:
        """One type; `num_tokens` are scored in the base file."""
        path = self._path(mix)
        if not path.is_file():
            say(f"writing {path}")
            command = quantize_command(self.quantizer, self.float_file, path, mix, self.threads)
            quantize_gguf(command, self.work_dir / f"quantize-{mix}.log")
        chunk_tokens = len(next(read_base(self.base))[0])
        command = fidelity_command(self.perplexity, path, self.base, chunk_tokens, self.threads)
        fidelity = judge_gguf(command, self.work_dir / f"perplexity-{mix}.log", num_tokens)
        bits = 8 * (path.stat().st_size - self.other_bytes) / self.num_weights
        return Judged(f"llama {mix}", bits, fidelity, " ".join(command))

    def _path(self, mix: str) -> Path:
        return self.work_dir / f"{self.stem}-{mix}.gguf"
