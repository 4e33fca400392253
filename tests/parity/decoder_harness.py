"""Tiny random models as artifacts, their dequantized twins, and steps through the stack without an engine."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from vllm_omni.model_executor.models.decoder.native_path import NativePath, native_matrix
from vllm_omni.model_executor.models.decoder.rope import rope_angles
from vllm_omni.model_executor.models.decoder.spec_mapping import DecoderShape, shape_of
from vllm_omni.model_executor.models.decoder.step import DecoderPath, DecoderStep, GroupRows
from vllm_omni.model_executor.models.decoder.torch_path import TorchMatrix, TorchPath
from vllm_omni.model_executor.models.decoder.weights import MappedWeights, decoder_weights
from vllm_omni.native.library import native_library
from vllm_omni.native.ops import Team
from vllm_omni.native.spec import kv_cell_bytes
from vllm_omni.quantization.artifact import Artifact, read_artifact
from vllm_omni.quantization.quantize import open_source, plan_quantize, quantize
from vllm_omni.quantization.quantize_settings import QuantizeSettings

BLOCK_SIZE = 16
NUM_BLOCKS = 128
MAX_POSITIONS = 1024
CACHE_DTYPES = {"bfloat16": torch.bfloat16, "int8": torch.int8}


def make_checkpoint(config: PretrainedConfig, directory: Path) -> Path:
    """A checkpoint with random weights, biases and norms.

    The output layer resembles the embedding, so that the first choice leads clearly, as in a trained model.
    """
    torch.manual_seed(11)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=parameter.shape[1] ** -0.5 if "embed" not in name else 1.0)
            else:
                parameter.uniform_(0.5, 1.5) if "norm" in name else parameter.normal_(std=0.5)
        if not config.tie_word_embeddings:
            head, embedding = model.get_output_embeddings().weight, model.get_input_embeddings().weight
            head.normal_(std=0.5).add_(embedding)
    model.save_pretrained(directory)
    return directory


def make_artifact(checkpoint: Path, out: Path, bits: int = 8, group_size: int = 32) -> Artifact:
    """The checkpoint quantized; 8 bits in small groups change a model little."""
    quantize(plan_quantize(open_source(checkpoint), QuantizeSettings(bits=bits, group_size=group_size)), out)
    return read_artifact(out)


def dequantized_twin(checkpoint: Path, artifact: Artifact) -> PreTrainedModel:
    """The checkpoint's model in transformers with the weights that the artifact's codes stand for."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    mapped = MappedWeights(artifact)
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, stored in artifact.matrices.items():
            matrix = TorchMatrix.of(mapped.matrix(name, stored.format.rows, stored.format.columns))
            parameters[name].copy_(matrix.weight)
    return model.eval()


def runnable_paths() -> list[str]:
    """The torch path, and the arms of the installed native core that this machine runs."""
    library = native_library()
    return ["torch", *(() if library is None else library.runnable_isas)]


def open_path(name: str, artifact: Artifact) -> tuple[DecoderPath, DecoderShape]:
    """The artifact on one of `runnable_paths`."""
    return make_path("torch", artifact) if name == "torch" else make_path("native", artifact, name)


def make_path(kind: str, artifact: Artifact, isa: str | None = None) -> tuple[DecoderPath, DecoderShape]:
    """The artifact on the `native` path, on its best arm or on `isa`, or on the `torch` path."""
    mapped, shape = MappedWeights(artifact), shape_of(artifact.config)
    make: Any = native_matrix if kind == "native" else TorchMatrix.of
    weights = decoder_weights(mapped, shape, make)
    head = weights.embedding
    if not shape.ties_embeddings:
        head = make(mapped.matrix(shape.head_name, shape.vocab_size, shape.hidden_size))
    assert head is not None
    path = NativePath(Team(2, isa), shape, weights, head) if kind == "native" else TorchPath(shape, weights, head)
    return path, shape


@dataclass
class Sequences:
    """Sequences in a paged cache, advanced together by `step`. Layers with a window have block tables of their own.

    Attributes:
        path: What computes.
        shape: The model's numbers.
        lengths: Tokens of each sequence in the cache.
    """

    path: DecoderPath
    shape: DecoderShape
    config: dict[str, Any]
    kind: str = "bfloat16"
    num_seqs: int = 1
    lengths: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        cell = kv_cell_bytes(self.shape.head_dim, self.kind)
        size = (self.shape.num_layers, NUM_BLOCKS, self.shape.num_kv_heads, BLOCK_SIZE, cell)
        # What was never written must not be read.
        raw = torch.full(size, 0x7F, dtype=torch.uint8)
        pages = raw.view(CACHE_DTYPES[self.kind])
        if self.kind == "bfloat16":
            pages.fill_(float("nan"))
        self.groups = [int(window > 0) if len(set(self.shape.windows)) > 1 else 0 for window in self.shape.windows]
        angles = rope_angles(self.config, self.shape.head_dim)
        self.path.bind_cache(list(pages), self.groups, angles, MAX_POSITIONS)
        order = torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(5), dtype=torch.int32)
        num_groups = max(self.groups) + 1
        self.tables = order[: NUM_BLOCKS // num_groups // self.num_seqs * num_groups * self.num_seqs].reshape(
            num_groups, self.num_seqs, -1
        )
        self.lengths = [0] * self.num_seqs

    @torch.inference_mode()
    def step(self, tokens: dict[int, Sequence[int]]) -> torch.Tensor:
        """Adds tokens to some sequences and returns the logits of all of them, in order of the sequences."""
        seqs = sorted(tokens)
        positions = [self.lengths[seq] + place for seq in seqs for place in range(len(tokens[seq]))]
        owners = [seq for seq in seqs for _ in tokens[seq]]
        for seq in seqs:
            self.lengths[seq] += len(tokens[seq])
        starts = [0]
        for seq in seqs:
            starts.append(starts[-1] + len(tokens[seq]))
        groups = tuple(self._rows(table, seqs, starts, owners, positions) for table in self.tables)
        ids = torch.tensor([token for seq in seqs for token in tokens[seq]], dtype=torch.int32)
        hidden = torch.empty(len(ids), self.shape.hidden_size)
        self.path.step(DecoderStep(torch.tensor(positions), groups, token_ids=ids), hidden)
        return self.path.logits(hidden)

    def _rows(
        self, table: torch.Tensor, seqs: list[int], starts: list[int], owners: list[int], positions: list[int]
    ) -> GroupRows:
        places = torch.tensor(positions)
        blocks = table[torch.tensor(owners), places // BLOCK_SIZE]
        return GroupRows(
            query_start=torch.tensor(starts, dtype=torch.int32),
            seq_lens=torch.tensor([self.lengths[seq] for seq in seqs], dtype=torch.int32),
            block_table=table[torch.tensor(seqs)],
            slots=blocks * BLOCK_SIZE + places % BLOCK_SIZE,
        )
