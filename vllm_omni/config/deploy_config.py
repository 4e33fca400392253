"""The deploy YAML as types: every key, its type, default, unit and meaning.

Unknown keys and wrong types are refused. Reading files, merging and precedence are `loader.py` and `resolve.py`.
`docs/configuration/deploy_yaml.md` shows the same texts; a test compares the two.
"""

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

PLATFORM_NAMES = ("cpu", "cuda", "npu", "rocm", "xpu", "musa")

# Names of vLLM SamplingParams fields that a deploy file may set. Left out are those that the engine itself decides for
# each request, such as the output kind.
SAMPLING_FIELDS = frozenset(
    {
        "allowed_token_ids",
        "bad_words",
        "detokenize",
        "extra_args",
        "flat_logprobs",
        "frequency_penalty",
        "ignore_eos",
        "include_stop_str_in_output",
        "logit_bias",
        "logprob_token_ids",
        "logprobs",
        "max_tokens",
        "min_p",
        "min_tokens",
        "n",
        "presence_penalty",
        "prompt_logprobs",
        "repetition_detection",
        "repetition_penalty",
        "seed",
        "skip_reading_prefix_cache",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "stop",
        "stop_token_ids",
        "structured_outputs",
        "temperature",
        "thinking_token_budget",
        "top_k",
        "top_p",
    }
)

BYTE_UNITS: Mapping[str, int] = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
BYTES_PATTERN = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)")


def parse_bytes(value: Any) -> Any:
    """Number of bytes of a text such as "512MiB" or "1.5GiB"; anything but text is returned unchanged.

    Raises:
        ValueError: The text is no number with one of the units B, KiB, MiB, GiB.
    """
    if not isinstance(value, str):
        return value
    match = BYTES_PATTERN.fullmatch(value.strip())
    if match is None or match[2] not in BYTE_UNITS:
        raise ValueError("accepted: a number of bytes, or text with a unit: B, KiB, MiB or GiB, such as 512MiB")
    return int(float(match[1]) * BYTE_UNITS[match[2]])


def setting(description: str, *, unit: str = "-", **options: Any) -> Any:
    """A field with its meaning and unit, default None; `options` are pydantic's (`default`, `ge`, `pattern`, ...)."""
    if "default_factory" not in options:
        options.setdefault("default", None)
    return Field(description=description, json_schema_extra={"unit": unit}, **options)


Bytes = Annotated[int, BeforeValidator(parse_bytes)]
Dtype = Literal["auto", "bfloat16", "float16", "float32", "half", "float"]


class StrictModel(BaseModel):
    """Base of all: unknown keys and type conversions (text for a number, 1 for true) are errors; values are frozen."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        frozen=True,
        allow_inf_nan=False,
        protected_namespaces=(),
        # Validators are built when first used: `serve --help` needs none, and they took a third of its time.
        defer_build=True,
    )


class ConnectorConfig(StrictModel):
    """One connector: the queue that carries payloads from one stage to the next."""

    name: Literal["InProcConnector"] = setting("Connector class: a queue inside the process.", default=...)
    extra: dict[str, Any] = setting("Settings of that connector class.", default_factory=dict)


class StageDeployConfig(StrictModel):
    """One stage. A key left out takes the pipeline-wide value of the same name, else vLLM's own default."""

    stage_id: int = setting("Position of the stage in its pipeline; the first is 0.", default=..., ge=0)
    dtype: Dtype | None = setting("Type of activations and of weights that are not quantized.")
    quantization: str | None = setting(
        "Weight quantization method. `auto` packs a plain checkpoint once where that is possible, `omni_int4` requires "
        "it, `none` serves what is given; unset: what the checkpoint states."
    )
    max_model_len: int | None = setting(
        "Longest prompt plus answer; unset: the model's own limit, or less if the key/value cache is smaller.",
        unit="tokens",
        ge=1,
    )
    max_num_seqs: int | None = setting("Requests computed together in one step.", unit="requests", ge=1)
    max_num_batched_tokens: int | None = setting(
        "Most tokens computed in one step; at least `max_num_seqs`. Bounds activation memory.", unit="tokens", ge=1
    )
    kv_cache_memory_bytes: Bytes | None = setting(
        'Memory of the key/value cache; a number, or text such as "512MiB".', unit="bytes", ge=1
    )
    kv_cache_dtype: str | None = setting(
        "Type in which keys and values are stored; an artifact has `bfloat16` (when unset) or `int8`."
    )
    block_size: int | None = setting("Size of one key/value cache block.", unit="tokens", ge=1)
    enable_prefix_caching: bool | None = setting("Reuse the cache of a prompt beginning that was computed before.")
    enable_chunked_prefill: bool | None = setting("Split long prompts over several steps, between decode steps.")
    enforce_eager: bool | None = setting("Run without graph capture and without compilation.")
    async_scheduling: bool | None = setting("Schedule the next step while the current one is computed.")
    seed: int | None = setting("Seed of the random generators of the stage.", ge=0)
    trust_remote_code: bool | None = setting("Allow Python code shipped in the checkpoint to run.")
    tokenizer: str | None = setting("Tokenizer directory, if it is not the model's.", unit="path")
    tokenizer_mode: str | None = setting("How vLLM loads the tokenizer, such as `auto` or `mistral`.")
    load_format: str | None = setting("How vLLM loads weights, such as `auto`, `safetensors` or `dummy`.")
    hf_overrides: dict[str, Any] | None = setting("Values that replace those of the model's `config.json`.")
    generation_config: str | None = setting(
        "Where default sampling values come from: `auto` (the model), `vllm` (none), or a directory."
    )
    speculative_config: dict[str, Any] | None = setting("vLLM's speculative decoding settings.")
    structured_outputs_config: dict[str, Any] | None = setting("vLLM's settings for constrained output.")
    compilation_config: dict[str, Any] | None = setting("vLLM's compilation settings; `mode: 0` compiles nothing.")
    attention_backend: str | None = setting("Name of a vLLM attention backend.")
    additional_config: dict[str, Any] | None = setting("Free map handed to the platform plugin.")
    num_threads: int | None = setting(
        "Compute threads; unset: derived from the machine and `VLLM_OMNI_NUM_THREADS`.", unit="threads", ge=1
    )
    tool_call_parser: str | None = setting(
        "vLLM tool call parser; left out: chosen from the chat template and model type; `null`: none."
    )
    reasoning_parser: str | None = setting(
        "vLLM reasoning parser; left out: chosen from the chat template and model type; `null`: none."
    )
    chat_template: str | None = setting("Path or text of a chat template that replaces the model's.")
    default_sampling_params: dict[str, Any] | None = setting(
        "Sampling values (vLLM SamplingParams fields) for requests that do not set them."
    )
    devices: Literal["cpu"] | None = setting("Devices of the stage; only `cpu` exists.")
    engine_extras: dict[str, Any] | None = setting("Any other vLLM engine field, by its vLLM name.")


class PlatformDeployConfig(StrictModel):
    """What differs on one platform."""

    stages: list[StageDeployConfig] = setting(
        "Stage entries laid over the file's stages of the same id.", default_factory=list
    )


class OrchestratorConfig(StrictModel):
    """Limits of the server around the stages."""

    stage_init_timeout: int = setting("Longest start of one stage.", default=300, unit="s", ge=1)
    init_timeout: int = setting("Longest start of the whole pipeline.", default=600, unit="s", ge=1)
    shutdown_timeout_s: float = setting("Longest orderly shutdown.", default=8.0, unit="s", gt=0)
    max_queued_requests: int = setting(
        "Admitted requests that wait beyond `max_num_seqs`; the next one is answered 429. 0: none wait.",
        default=64,
        unit="requests",
        ge=0,
    )
    retry_after_s: int = setting("`Retry-After` of such an answer.", default=2, unit="s", ge=1)
    keep_alive_interval_s: float = setting(
        "Pause in a stream after which a comment line keeps the connection open; 0: never.",
        default=5.0,
        unit="s",
        ge=0,
    )
    max_request_bytes: Bytes = setting("Largest accepted request body.", default=16 << 20, unit="bytes", ge=1)


class DeployConfig(StrictModel):
    """One deploy file, or the effective result of all layers."""

    pipeline: str | None = setting("Registered pipeline to use instead of the one found by the model's type.")
    base_config: str | None = setting(
        "File that this one is laid over: a path relative to this file, or a packaged file.", unit="path"
    )
    async_chunk: bool = setting(
        "Stream chunks from stage to stage; has no effect, and becomes false, with a single stage.", default=True
    )
    stage_topology: Literal["inline"] = setting(
        "Where stages run; `inline`: in the server's process.", default="inline"
    )
    trust_remote_code: bool | None = setting("Pipeline-wide value of the stage key.")
    dtype: Dtype | None = setting("Pipeline-wide value of the stage key.")
    quantization: str | None = setting("Pipeline-wide value of the stage key.")
    enable_prefix_caching: bool | None = setting("Pipeline-wide value of the stage key.")
    enable_chunked_prefill: bool | None = setting("Pipeline-wide value of the stage key.")
    connectors: dict[str, ConnectorConfig] | None = setting("Connectors by name; one stage needs none.")
    stages: list[StageDeployConfig] = setting("One entry for each stage of the pipeline.", default_factory=list)
    platforms: dict[str, PlatformDeployConfig] | None = setting(
        "Values for one platform, by its name: " + ", ".join(f"`{name}`" for name in PLATFORM_NAMES) + "."
    )
    orchestrator: OrchestratorConfig = setting("Limits of the server.", default_factory=OrchestratorConfig)


# Top-level keys that give a value to every stage that does not set its own.
PIPELINE_WIDE_FIELDS = tuple(name for name in DeployConfig.model_fields if name in StageDeployConfig.model_fields)
