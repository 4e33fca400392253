"""Imports a GGUF file into a Hugging Face model directory.

Everything that can be refused is refused before the first byte is written. Tensors are then decoded in pieces and
streamed into safetensors shards, so memory does not grow with the model. `docs/edge/convert.md` describes the output.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_omni.errors import ConfigError, WeightError
from vllm_omni.quantization.checkpoint import INDEX_NAME
from vllm_omni.quantization.conversion_record import (
    ConversionRecord,
    FileEntry,
    hash_bytes,
    hash_directory,
    write_record,
)
from vllm_omni.quantization.gguf_config import hf_config, hf_generation_config, permuted_heads
from vllm_omni.quantization.gguf_file import GgufFile, GgufTensor, open_gguf
from vllm_omni.quantization.gguf_tensors import ROPE_FACTORS_NAME, SAFETENSORS_DTYPES, encoded_pieces, hf_name
from vllm_omni.quantization.gguf_tokenizer import build_tokenizer, tokenizer_config
from vllm_omni.quantization.json_file import write_json
from vllm_omni.quantization.output_directory import staged_directory
from vllm_omni.quantization.safetensors_format import TensorEntry, write_shard
from vllm_omni.quantization.tensor_table import require_expected

DEFAULT_MAX_SHARD_BYTES = 4 << 30

Progress = Callable[[str, int], None]


@dataclass(frozen=True)
class ImportPlan:
    """What will be written, decided from the header alone.

    Attributes:
        config: The content of `config.json`.
        dtype: Output type of every tensor.
        tensors: Hugging Face name, source tensor and output entry, in file order.
    """

    source: GgufFile
    config: dict[str, Any]
    dtype: str
    tensors: tuple[tuple[str, GgufTensor, TensorEntry], ...]

    @property
    def weight_bytes(self) -> int:
        return sum(entry.num_bytes for _, _, entry in self.tensors)


def plan_import(source_path: Path, dtype: str) -> ImportPlan:
    """Parses a GGUF file and decides what to write.

    Args:
        source_path: The file.
        dtype: `bfloat16`, `float16` or `float32`.

    Raises:
        ConfigError: There is no such file, or the type is not accepted.
        WeightError: The file is damaged, or its architecture, tensor types or tensors are not accepted.
    """
    if dtype not in SAFETENSORS_DTYPES:
        raise ConfigError(f"--dtype {dtype!r}, accepted: {', '.join(SAFETENSORS_DTYPES)}")
    if not source_path.is_file():
        raise ConfigError(f"source {source_path}: no such file; accepted: the path of a .gguf file")
    source = open_gguf(source_path)
    _require_unsplit(source)
    config = hf_config(source, dtype)
    tensors = tuple(
        (hf_name(tensor.name), tensor, TensorEntry(SAFETENSORS_DTYPES[dtype], tensor.shape))
        for tensor in source.tensors.values()
        if tensor.name != ROPE_FACTORS_NAME
    )
    require_expected(config, {name: tensor.shape for name, tensor, _ in tensors}, str(source_path))
    return ImportPlan(source, config, dtype, tensors)


def import_gguf(
    plan: ImportPlan,
    out: Path,
    overwrite: bool = False,
    progress: Progress | None = None,
    max_shard_bytes: int = DEFAULT_MAX_SHARD_BYTES,
) -> ConversionRecord:
    """Writes the planned directory; it appears under its name only when it is complete.

    Args:
        plan: From `plan_import`.
        out: Directory to make.
        overwrite: Replace `out` if a conversion wrote it.
        progress: Called after each piece with the tensor's name and the bytes written.
        max_shard_bytes: A shard is closed before it would exceed this; a larger tensor has its own.

    Raises:
        ConfigError: `out` exists and may not be replaced, or cannot be written.
        WeightError: The tokenizer is not accepted, or a tensor's values are not finite or exceed the output type.
    """
    if plan.source.path.resolve().is_relative_to(out.resolve()):
        raise ConfigError(f"--out {out} holds the source {plan.source.path}; pass another directory")
    tokenizer = build_tokenizer(plan.source)
    documents = _documents(plan)
    source = {plan.source.path.name: hash_bytes(plan.source.data.data)}
    with staged_directory(out, overwrite, plan.weight_bytes) as directory:
        for name, document in documents.items():
            write_json(directory / name, document)
        tokenizer.save(str(directory / "tokenizer.json"))
        if template := plan.source.metadata.get("tokenizer.chat_template"):
            (directory / "chat_template.jinja").write_text(template, encoding="utf-8")
        weights = _write_weights(plan, directory, progress or _no_progress, max_shard_bytes)
        record = _record(plan, source, hash_directory(directory, weights))
        write_record(directory, record)
    return record


def _require_unsplit(source: GgufFile) -> None:
    if source.metadata.get("split.count", 1) > 1:
        raise WeightError(f"{source.path}: one part of a split GGUF; accepted: single files, so merge the parts first")


def _documents(plan: ImportPlan) -> dict[str, dict[str, Any]]:
    return {
        "config.json": plan.config,
        "generation_config.json": hf_generation_config(plan.source),
        "tokenizer_config.json": tokenizer_config(plan.source),
    }


def _record(plan: ImportPlan, source: dict[str, FileEntry], files: dict[str, FileEntry]) -> ConversionRecord:
    return ConversionRecord(
        method="gguf-import",
        dtype=plan.dtype,
        source=source,
        files=files,
        settings={
            "architecture": plan.source.metadata["general.architecture"],
            "source_tensor_types": dict(Counter(tensor.type_name for tensor in plan.source.tensors.values())),
        },
    )


def _write_weights(plan: ImportPlan, directory: Path, progress: Progress, max_shard_bytes: int) -> dict[str, FileEntry]:
    shards = _split(plan, max_shard_bytes)
    written: dict[str, FileEntry] = {}
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file_name = f"model-{number:05d}-of-{len(shards):05d}.safetensors" if len(shards) > 1 else "model.safetensors"
        entries = [(name, entry) for name, _, entry in shard]
        written[file_name] = write_shard(directory / file_name, entries, _pieces(plan, shard, progress))
        weight_map |= {name: file_name for name, _ in entries}
    if len(shards) > 1:
        index = {"metadata": {"total_size": plan.weight_bytes}, "weight_map": dict(sorted(weight_map.items()))}
        write_json(directory / INDEX_NAME, index)
    return written


def _split(plan: ImportPlan, max_shard_bytes: int) -> list[list[tuple[str, GgufTensor, TensorEntry]]]:
    shards: list[list[tuple[str, GgufTensor, TensorEntry]]] = [[]]
    shard_bytes = 0
    for item in plan.tensors:
        if shards[-1] and shard_bytes + item[2].num_bytes > max_shard_bytes:
            shards.append([])
            shard_bytes = 0
        shards[-1].append(item)
        shard_bytes += item[2].num_bytes
    return shards


def _pieces(
    plan: ImportPlan, shard: Sequence[tuple[str, GgufTensor, TensorEntry]], progress: Progress
) -> Iterator[bytes]:
    for name, tensor, _ in shard:
        num_heads = permuted_heads(plan.config, tensor.name)
        for piece in encoded_pieces(plan.source, tensor, plan.dtype, num_heads):
            yield piece
            progress(name, len(piece))


def _no_progress(name: str, num_bytes: int) -> None:
    del name, num_bytes
