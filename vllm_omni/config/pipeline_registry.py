"""Which pipeline serves which model type.

A pipeline is the graph of stages that a model needs; it is data, not code. Adding one is a `PipelineConfig` in a file
of its own and one line in `OMNI_PIPELINES` here. Plain text models share the single-stage pipeline `text`.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType

from vllm_omni.config.model_facts import ModelFacts
from vllm_omni.errors import ConfigError, nearest

logger = logging.getLogger(__name__)


class StageExecutionType(StrEnum):
    """How a stage computes."""

    LLM_AR = "llm_ar"  # token by token, in vLLM's engine
    LLM_GENERATION = "llm_generation"  # one forward for each chunk, no sampling
    DIFFUSION = "diffusion"


@dataclass(frozen=True)
class StagePipelineConfig:
    """One node of the graph.

    Attributes:
        model_stage: Name of the stage's role.
        input_sources: Ids of the stages whose output it takes; empty: it takes the request itself.
        final_output: Whether clients see its output, whose modality is `final_output_type`.
        owns_tokenizer: Whether it holds the request's tokenizer and chat template.
    """

    stage_id: int
    model_stage: str
    execution_type: StageExecutionType = StageExecutionType.LLM_AR
    input_sources: tuple[int, ...] = ()
    final_output: bool = False
    final_output_type: str | None = None
    owns_tokenizer: bool = False


@dataclass(frozen=True)
class ParserDefaults:
    """vLLM parser names that fit a model type.

    Attributes:
        tool_call_parser: Used when the chat template shows no call format but mentions tools, or when there is none.
        reasoning_parser: Used when `reasoning_marker` is in the chat template.
    """

    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    reasoning_marker: str = "<think>"


@dataclass(frozen=True)
class PipelineConfig:
    """The stages of a pipeline and what goes with them.

    Attributes:
        model_type: Name of the pipeline, a key of `OMNI_PIPELINES`.
        default_deploy_config_name: File in `vllm_omni/deploy/`, and in a profile without a file for the model type.
        parsers: Model type to the parsers that fit it.

    Raises:
        ConfigError: The graph is not sound; all problems are listed.
    """

    model_type: str
    stages: tuple[StagePipelineConfig, ...]
    default_deploy_config_name: str
    parsers: Mapping[str, ParserDefaults] = field(default_factory=lambda: MappingProxyType({}))

    def __post_init__(self) -> None:
        problems = self.get_validation_errors()
        if problems:
            raise ConfigError(f"pipeline {self.model_type!r} is not sound: " + "; ".join(problems))

    def get_stage(self, stage_id: int) -> StagePipelineConfig:
        """The stage of that id; KeyError if there is none."""
        return {stage.stage_id: stage for stage in self.stages}[stage_id]

    def get_validation_errors(self) -> list[str]:
        """What is wrong with the graph; empty when it is sound."""
        if not self.stages:
            return ["it has no stages"]
        ids = [stage.stage_id for stage in self.stages]
        problems = [] if sorted(ids) == list(range(len(ids))) else [f"stage ids are {ids}, not 0..{len(ids) - 1}"]
        for stage in self.stages:
            sources = [source for source in stage.input_sources if source not in ids or source == stage.stage_id]
            if sources:
                problems.append(f"stage {stage.stage_id} takes input from {sources}, which is itself or does not exist")
        if all(stage.input_sources for stage in self.stages):
            problems.append("no stage takes the request itself (empty input_sources)")
        if not any(stage.final_output for stage in self.stages):
            problems.append("no stage has final_output")
        return problems


TEXT_MODEL_TYPES: Mapping[str, ParserDefaults] = MappingProxyType(
    {
        "cohere": ParserDefaults(),
        "cohere2": ParserDefaults(),
        "exaone4": ParserDefaults("hermes"),
        "gemma": ParserDefaults(),
        "gemma2": ParserDefaults(),
        "gemma3_text": ParserDefaults(),
        "glm4": ParserDefaults(),
        "granite": ParserDefaults("granite", "granite", "Here is my thought process:"),
        "llama": ParserDefaults(),
        "mistral": ParserDefaults("mistral"),
        "olmo2": ParserDefaults(),
        "phi3": ParserDefaults(),
        "qwen2": ParserDefaults("hermes"),
        "qwen3": ParserDefaults("hermes", "qwen3"),
        "smollm3": ParserDefaults("hermes"),
        "stablelm": ParserDefaults(),
    }
)

TEXT_PIPELINE = PipelineConfig(
    model_type="text",
    stages=(
        StagePipelineConfig(
            stage_id=0, model_stage="text", final_output=True, final_output_type="text", owns_tokenizer=True
        ),
    ),
    default_deploy_config_name="text.yaml",
    parsers=TEXT_MODEL_TYPES,
)

OMNI_PIPELINES: dict[str, PipelineConfig] = {
    "text": TEXT_PIPELINE,
    **dict.fromkeys(TEXT_MODEL_TYPES, TEXT_PIPELINE),
}


def register_pipeline(pipeline: PipelineConfig, model_type: str | None = None) -> None:
    """Makes `pipeline` serve `model_type`, by default its own name. Replacing an entry is logged at WARNING."""
    key = model_type or pipeline.model_type
    if OMNI_PIPELINES.get(key, pipeline) != pipeline:
        logger.warning("pipeline_replaced model_type=%s pipeline=%s", key, pipeline.model_type)
    OMNI_PIPELINES[key] = pipeline


def resolve_pipeline_config(facts: ModelFacts, forced: str | None = None) -> PipelineConfig:
    """The pipeline of a model: the `forced` key if given, else its model type.

    Raises:
        ConfigError: The key is not registered; the message lists those that are.
    """
    key = forced or facts.model_type
    pipeline = OMNI_PIPELINES.get(key)
    registered = ", ".join(sorted(OMNI_PIPELINES))
    if pipeline is None and forced:
        raise ConfigError(
            f"pipeline {forced!r} is not registered; {nearest(str(forced), OMNI_PIPELINES)} All: {registered}"
        )
    if pipeline is None:
        raise ConfigError(
            f"model type {key!r} of {facts.path / 'config.json'} has no pipeline; registered: {registered}. "
            "If it is a plain text model that vLLM supports, force it with `pipeline: text` in a deploy YAML"
        )
    if pipeline.model_type != facts.model_type:
        logger.info(
            "pipeline=%s model_type=%s shared=true forced=%s", pipeline.model_type, facts.model_type, bool(forced)
        )
    return pipeline


def default_parsers(facts: ModelFacts) -> tuple[str | None, str | None]:
    """The (tool call, reasoning) parser names that fit the chat template, else the model type; None where none fits."""
    pipeline = OMNI_PIPELINES.get(facts.model_type)
    defaults = pipeline.parsers.get(facts.model_type, ParserDefaults()) if pipeline else ParserDefaults()
    template = facts.chat_template or ""
    reasoning = defaults.reasoning_parser if defaults.reasoning_marker in template else None
    tool = _tool_parser_of_template(template)
    if tool is None and (not template or "tools" in template):
        tool = defaults.tool_call_parser
    return tool, reasoning


def _tool_parser_of_template(template: str) -> str | None:
    """The parser for the call format that the template itself writes."""
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "<|python_tag|>" in template or "Environment: ipython" in template:
        return "llama3_json"
    if "<|tool|>" in template:
        return "phi4_mini_json"
    if "<tool_call>" in template:
        return _tool_call_tag_parser(template)
    # ChatML models trained on tool use write Hermes calls even where the template has no tool part.
    return "hermes" if "<|im_start|>" in template else None


def _tool_call_tag_parser(template: str) -> str | None:
    """Several formats share the tag: XML parameters, key/value tags (the model type decides), or JSON."""
    if "<function=" in template:
        return "qwen3_coder"
    return None if "<arg_key>" in template else "hermes"
