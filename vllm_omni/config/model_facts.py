"""What a checkpoint directory says about its model, read from its JSON files alone."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from vllm_omni.errors import ConfigError

HUB_ID_PATTERN = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
POSITION_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_sequence_length")
# RoPE types whose factor comes on top of `max_position_embeddings`; with the others it is already in there.
UNSCALED_ROPE_TYPES = frozenset({"linear", "dynamic"})


@dataclass(frozen=True)
class ModelFacts:
    """Facts of one checkpoint. None: the files do not say.

    Attributes:
        path: The checkpoint directory.
        model_type: `config.json`'s key of that name.
        architectures: Class names that the checkpoint names, in its order.
        max_position_embeddings: Longest sequence in tokens, with a linear or dynamic RoPE factor applied.
        dtype: Type of the stored weights, such as "bfloat16".
        head_dim: Size of one attention head; computed from hidden size and heads when not stated.
        num_key_value_heads: As stated, else the number of attention heads.
        chat_template: Jinja text; `chat_template.jinja` wins over `tokenizer_config.json`.
        quant_method: Name of the checkpoint's own quantization.
        generation_defaults: Content of `generation_config.json`; empty without that file.
    """

    path: Path
    model_type: str
    architectures: tuple[str, ...] = ()
    max_position_embeddings: int | None = None
    dtype: str | None = None
    num_hidden_layers: int | None = None
    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_size: int | None = None
    vocab_size: int | None = None
    chat_template: str | None = None
    quant_method: str | None = None
    generation_defaults: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))


def read_model_facts(model: str) -> ModelFacts:
    """Facts of a local checkpoint directory, or of a model that the local Hugging Face cache holds.

    Raises:
        ConfigError: There is no such directory or cached model, it is a GGUF file, or one of its JSON files is missing,
            unreadable or lacks `model_type`.
    """
    directory = find_model_directory(model)
    config = read_json(directory / "config.json", required=True)
    # Composite checkpoints keep the language model's numbers in a nested map.
    nested = config.get("text_config")
    reader = _KeyReader(directory / "config.json", {**(nested if isinstance(nested, dict) else {}), **config})
    heads, hidden_size = reader.integer("num_attention_heads"), reader.integer("hidden_size")
    return ModelFacts(
        path=directory,
        model_type=_model_type(directory, config),
        architectures=reader.texts("architectures"),
        max_position_embeddings=_max_positions(reader),
        dtype=reader.text("dtype", "torch_dtype"),
        num_hidden_layers=reader.integer("num_hidden_layers"),
        num_attention_heads=heads,
        num_key_value_heads=reader.integer("num_key_value_heads") or heads,
        head_dim=reader.integer("head_dim") or (hidden_size // heads if heads and hidden_size else None),
        hidden_size=hidden_size,
        vocab_size=reader.integer("vocab_size"),
        chat_template=_chat_template(directory),
        quant_method=reader.nested("quantization_config").text("quant_method"),
        generation_defaults=MappingProxyType(read_json(directory / "generation_config.json", required=False)),
    )


def find_model_directory(model: str) -> Path:
    """The directory of `model`: the path itself, else the cached snapshot of a hub id."""
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if path.suffix == ".gguf":
        raise ConfigError(
            f"model {model!r} is a GGUF file; accepted: a checkpoint directory with a config.json. "
            f"Run `vllm-omni convert {model}` and serve the directory that it writes"
        )
    if path.exists():
        raise ConfigError(f"model {model!r} is a file; accepted: a checkpoint directory with a config.json")
    if HUB_ID_PATTERN.fullmatch(model):
        return _cached_snapshot(model)
    raise ConfigError(
        f"model {model!r} does not exist; accepted: the path of a checkpoint directory with a config.json"
    )


def _cached_snapshot(model: str) -> Path:
    missing = ConfigError(
        f"model {model!r} is not on this machine: it is neither a directory here nor in the local Hugging Face cache. "
        f"Get it with `hf download {model} --local-dir DIR` and give DIR as the model"
    )
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
    except ImportError:
        raise missing from None
    try:
        return Path(snapshot_download(model, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError) as error:
        raise missing from error


def read_text(path: Path) -> str:
    """Content of a UTF-8 file of a checkpoint."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise ConfigError(
            f"model directory {str(path.parent)!r} has no {path.name}; "
            "accepted: a checkpoint in Hugging Face layout. Is the download complete, and is this the right directory?"
        ) from error
    except (UnicodeDecodeError, OSError) as error:
        raise ConfigError(
            f"{path} cannot be read: {error}. Download the file again, or correct its permissions"
        ) from error


def read_json(path: Path, *, required: bool) -> dict[str, Any]:
    """The object in a JSON file; an optional file that is absent is `{}`."""
    if not path.exists() and not required:
        return {}
    try:
        value = json.loads(read_text(path))
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}. Download the file again") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} holds a JSON {type(value).__name__}; accepted: an object. Download the file again")
    return value


@dataclass(frozen=True)
class _KeyReader:
    """Typed access to foreign JSON; a value of another type is an error naming file and key."""

    path: Path
    values: Mapping[str, Any]

    def integer(self, *names: str) -> int | None:
        return self._first(names, int, "a whole number")

    def number(self, *names: str) -> float | None:
        return self._first(names, (int, float), "a number")

    def text(self, *names: str) -> str | None:
        return self._first(names, str, "text")

    def texts(self, name: str) -> tuple[str, ...]:
        values = self._first((name,), list, "a list") or []
        if not all(isinstance(value, str) for value in values):
            raise ConfigError(
                f"{self.path}: {name} is {values!r}; accepted: a list of texts. The checkpoint is damaged"
            )
        return tuple(values)

    def nested(self, *names: str) -> "_KeyReader":
        return _KeyReader(self.path, self._first(names, dict, "an object") or {})

    def _first(self, names: tuple[str, ...], accepted: type | tuple[type, ...], words: str) -> Any:
        for name in names:
            value = self.values.get(name)
            if value is None:
                continue
            if not isinstance(value, accepted) or isinstance(value, bool):
                raise ConfigError(f"{self.path}: {name} is {value!r}; accepted: {words}. The checkpoint is damaged")
            return value
        return None


def _model_type(directory: Path, config: Mapping[str, Any]) -> str:
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        raise ConfigError(
            f"{directory / 'config.json'} has no model_type; accepted: the name of a model family, such as 'llama'. "
            "Add the key that the model's publisher states, or use another checkpoint"
        )
    return model_type


def _max_positions(reader: _KeyReader) -> int | None:
    positions = reader.integer(*POSITION_KEYS)
    rope = reader.nested("rope_scaling", "rope_parameters")
    if positions is None or rope.text("rope_type", "type") not in UNSCALED_ROPE_TYPES:
        return positions
    return int(positions * (rope.number("factor") or 1.0))


def _chat_template(directory: Path) -> str | None:
    file = directory / "chat_template.jinja"
    if file.exists():
        return read_text(file)
    reader = _KeyReader(
        directory / "tokenizer_config.json", read_json(directory / "tokenizer_config.json", required=False)
    )
    if not isinstance(reader.values.get("chat_template"), list):
        return reader.text("chat_template")
    for entry in reader.values["chat_template"]:
        if isinstance(entry, dict) and entry.get("name") == "default":
            return _KeyReader(reader.path, entry).text("template")
    return None
