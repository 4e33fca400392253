import ast
import importlib.util
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from vllm_omni.config import pipeline_registry
from vllm_omni.config.model_facts import ModelFacts
from vllm_omni.config.pipeline_registry import (
    OMNI_PIPELINES,
    TEXT_MODEL_TYPES,
    TEXT_PIPELINE,
    PipelineConfig,
    StageExecutionType,
    StagePipelineConfig,
    default_parsers,
    register_pipeline,
    resolve_pipeline_config,
)
from vllm_omni.errors import ConfigError

STAGE = StagePipelineConfig(0, "first", final_output=True)
CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}{% endfor %}"


def facts(model_type: str, template: str | None = None) -> ModelFacts:
    return ModelFacts(path=Path("/m"), model_type=model_type, chat_template=template)


def pipeline(*stages: StagePipelineConfig, name: str = "two") -> PipelineConfig:
    return PipelineConfig(model_type=name, stages=stages, default_deploy_config_name="two.yaml")


@pytest.fixture
def restored_registry() -> Iterator[None]:
    before = dict(OMNI_PIPELINES)
    yield
    OMNI_PIPELINES.clear()
    OMNI_PIPELINES.update(before)


def test_text_model_types_share_the_text_pipeline() -> None:
    for model_type in TEXT_MODEL_TYPES:
        assert resolve_pipeline_config(facts(model_type)) is TEXT_PIPELINE
    stage = TEXT_PIPELINE.get_stage(0)
    assert (stage.execution_type, stage.final_output_type) == (StageExecutionType.LLM_AR, "text")
    assert stage.owns_tokenizer and stage.final_output


def test_sharing_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        resolve_pipeline_config(facts("qwen2"))
    assert "pipeline=text model_type=qwen2 shared=true" in caplog.text


def test_unknown_model_type_lists_registered_and_the_way_out() -> None:
    with pytest.raises(ConfigError, match=r"'mamba9'.*registered:.*llama.*`pipeline: text` in a deploy YAML"):
        resolve_pipeline_config(facts("mamba9"))


def test_forced_pipeline_serves_an_unknown_model_type() -> None:
    assert resolve_pipeline_config(facts("mamba9"), "text") is TEXT_PIPELINE


def test_unknown_forced_pipeline_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="pipeline 'texd' is not registered; did you mean 'text'"):
        resolve_pipeline_config(facts("llama"), "texd")


@pytest.mark.usefixtures("restored_registry")
def test_registered_pipeline_is_found_by_its_name_and_by_another_model_type() -> None:
    two = pipeline(STAGE, StagePipelineConfig(1, "second", StageExecutionType.LLM_GENERATION, (0,)))
    register_pipeline(two)
    register_pipeline(two, "other")
    assert resolve_pipeline_config(facts("two")) is two
    assert resolve_pipeline_config(facts("other")) is two


@pytest.mark.usefixtures("restored_registry")
def test_replacing_a_pipeline_warns(caplog: pytest.LogCaptureFixture) -> None:
    register_pipeline(pipeline(STAGE), "llama")
    assert "pipeline_replaced model_type=llama" in caplog.text
    assert resolve_pipeline_config(facts("llama")).model_type == "two"


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ((), "it has no stages"),
        ((STAGE, STAGE), r"stage ids are \[0, 0\]"),
        ((StagePipelineConfig(1, "x", final_output=True),), r"stage ids are \[1\], not 0\.\.0"),
        ((STAGE, StagePipelineConfig(1, "x", input_sources=(7,))), r"stage 1 takes input from \[7\]"),
        ((STAGE, StagePipelineConfig(1, "x", input_sources=(1,))), "which is itself"),
        (
            (
                StagePipelineConfig(0, "a", input_sources=(1,), final_output=True),
                StagePipelineConfig(1, "b", input_sources=(0,)),
            ),
            "no stage takes the request itself",
        ),
        ((StagePipelineConfig(0, "a"),), "no stage has final_output"),
    ],
)
def test_unsound_graphs_are_refused(stages: tuple[StagePipelineConfig, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        pipeline(*stages)


def test_all_problems_of_a_graph_are_listed() -> None:
    with pytest.raises(ConfigError, match=r"no stage takes the request itself.*no stage has final_output"):
        pipeline(StagePipelineConfig(0, "a", input_sources=(0,)))


@pytest.mark.parametrize(
    ("model_type", "template", "expected"),
    [
        ("qwen3", CHATML + "tools <tool_call> <think>", ("hermes", "qwen3")),
        ("qwen3", CHATML + "tools <tool_call>", ("hermes", None)),
        ("qwen2", CHATML + "tools <tool_call> <think>", ("hermes", None)),
        ("qwen2", None, ("hermes", None)),
        ("qwen3", CHATML + "<tool_call><function=", ("qwen3_coder", None)),
        ("llama", CHATML, ("hermes", None)),
        ("llama", "tools <|python_tag|>", ("llama3_json", None)),
        ("llama", "{% if tools %}Environment: ipython", ("llama3_json", None)),
        ("llama", "<|user|>", (None, None)),
        ("llama", None, (None, None)),
        ("llama", "[TOOL_CALLS] tools", ("mistral", None)),
        ("mistral", "[INST] tools [TOOL_CALLS]", ("mistral", None)),
        ("mistral", "[INST]", (None, None)),
        ("mistral", None, ("mistral", None)),
        ("phi3", "{% if tools %}<|tool|>", ("phi4_mini_json", None)),
        ("phi3", "<|user|>", (None, None)),
        ("granite", "{% if tools %}<|tool_call|>", ("granite", None)),
        ("granite", "tools 'Here is my thought process:'", ("granite", "granite")),
        ("gemma2", "<start_of_turn>", (None, None)),
        ("llama", "tools <tool_call>name<arg_key>", (None, None)),
        ("unregistered", CHATML, ("hermes", None)),
    ],
)
def test_default_parsers(model_type: str, template: str | None, expected: tuple[str | None, str | None]) -> None:
    assert default_parsers(facts(model_type, template)) == expected


def _registered_in_vllm(module: str, table: str) -> set[str]:
    package = importlib.util.find_spec("vllm")
    if package is None or not package.submodule_search_locations:
        pytest.skip("vLLM is not installed")
    source = Path(package.submodule_search_locations[0], module, "__init__.py").read_text()
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == table:
            return set(ast.literal_eval(node.value))
    raise AssertionError(f"vLLM has no {table}")


def test_parser_names_are_registered_in_vllm() -> None:
    tools = {defaults.tool_call_parser for defaults in TEXT_MODEL_TYPES.values()} - {None}
    marked = {"mistral", "llama3_json", "phi4_mini_json", "qwen3_coder", "hermes"}
    source = Path(pipeline_registry.__file__).read_text()
    assert all(f'"{name}"' in source for name in marked)
    assert tools | marked <= _registered_in_vllm("tool_parsers", "_TOOL_PARSERS_TO_REGISTER")
    reasoning = {defaults.reasoning_parser for defaults in TEXT_MODEL_TYPES.values()} - {None}
    assert reasoning <= _registered_in_vllm("reasoning", "_REASONING_PARSERS_TO_REGISTER")
