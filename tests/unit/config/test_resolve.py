import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from vllm_omni.config import resolve
from vllm_omni.config.resolve import list_profiles, resolve_deployment
from vllm_omni.errors import ConfigError, ProfileNotFoundError

WriteYaml = Callable[..., Path]
LAYERS = """
stages:
  - stage_id: 0
    {yaml}
platforms:
  cpu:
    stages:
      - stage_id: 0
        {platform}
"""


@pytest.mark.parametrize(
    ("yaml", "platform", "flag", "stage_flag", "expected", "source"),
    [
        ("", "", {}, None, None, "default"),
        ("seed: 1", "", {}, None, 1, "{file}"),
        ("seed: 1", "seed: 2", {}, None, 2, "platforms.cpu of {file}"),
        ("seed: 1", "seed: 2", {"seed": 3}, None, 3, "--seed"),
        ("seed: 1", "seed: 2", {"seed": 3, "stage_0_seed": 4}, None, 4, "--stage-0-seed"),
        ("seed: 1", "seed: 2", {"seed": 3}, {"0": {"seed": 4}}, 4, "--stage-overrides 0.seed"),
        ("seed: 1", "", {"seed": None}, None, 1, "{file}"),
    ],
)
def test_precedence(
    model: str,
    write_yaml: WriteYaml,
    yaml: str,
    platform: str,
    flag: dict,
    stage_flag: dict | None,
    expected: int | None,
    source: str,
) -> None:
    file = write_yaml(LAYERS.format(yaml=yaml, platform=platform))
    deployment = resolve_deployment(model, deploy_config=file, overrides=flag, stage_overrides=stage_flag)
    assert deployment.stage(0).seed == expected
    assert deployment.provenance["stages[0].seed"] == source.format(file=file)


def test_another_platform_takes_no_cpu_section(model: str, write_yaml: WriteYaml) -> None:
    file = write_yaml(LAYERS.format(yaml="seed: 1", platform="seed: 2"))
    assert resolve_deployment(model, deploy_config=file, platform="cuda").stage(0).seed == 1


def test_pipeline_wide_value_reaches_the_stage_with_its_source(model: str, write_yaml: WriteYaml) -> None:
    file = write_yaml("dtype: float16\nstages: [{stage_id: 0}]\n")
    deployment = resolve_deployment(model, deploy_config=file)
    assert deployment.stage(0).dtype == "float16"
    assert deployment.provenance["stages[0].dtype"] == str(file)


def test_without_a_choice_the_pipelines_file_is_used(model: str) -> None:
    deployment = resolve_deployment(model)
    assert deployment.provenance["stages[0].max_num_seqs"] == "vllm_omni/deploy/text.yaml"
    assert [file.name for file in deployment.files] == ["text.yaml"]


def test_profile_lies_over_its_base(model: str) -> None:
    deployment = resolve_deployment(model, deploy_profile="edge")
    assert deployment.provenance["stages[0].max_num_seqs"] == "vllm_omni/deploy/edge/text.yaml"
    assert deployment.provenance["stages[0].stage_id"] == "vllm_omni/deploy/text.yaml"
    assert len(deployment.files) == 2
    assert deployment.config.base_config is None


def test_profile_file_of_the_model_type_wins_over_the_pipelines(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    profile = tmp_path / "deploy" / "tiny"
    profile.mkdir(parents=True)
    for name, seed in (("text.yaml", 1), ("llama.yaml", 2)):
        (profile / name).write_text(f"stages: [{{stage_id: 0, seed: {seed}}}]\n")
    monkeypatch.setattr(resolve, "DEPLOY_DIR", tmp_path / "deploy")
    assert resolve_deployment(model, deploy_profile="tiny").stage(0).seed == 2


def test_packaged_file_by_name(model: str) -> None:
    assert resolve_deployment(model, deploy_config="text.yaml").files[0].name == "text.yaml"
    assert resolve_deployment(model, deploy_config="edge/text.yaml").stage(0).max_num_seqs == 4


def test_deploy_file_that_does_not_exist_lists_packaged_ones(model: str) -> None:
    with pytest.raises(ConfigError, match=r"'nope\.yaml' does not exist; accepted.*edge/text\.yaml, text\.yaml"):
        resolve_deployment(model, deploy_config="nope.yaml")


def test_config_and_profile_exclude_each_other(model: str) -> None:
    with pytest.raises(ConfigError, match="exclude each other; give one"):
        resolve_deployment(model, deploy_config="text.yaml", deploy_profile="edge")


@pytest.mark.parametrize("profile", ["egde", "", "..", "edge/..", "/"])
def test_missing_profile_lists_what_exists(model: str, profile: str) -> None:
    with pytest.raises(ProfileNotFoundError, match=r"does not exist; accepted: edge\b"):
        resolve_deployment(model, deploy_profile=profile)


def test_profile_without_a_file_for_the_model_lists_its_files(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    profile = tmp_path / "deploy" / "tiny"
    profile.mkdir(parents=True)
    (profile / "other.yaml").write_text("stages: []\n")
    monkeypatch.setattr(resolve, "DEPLOY_DIR", tmp_path / "deploy")
    with pytest.raises(ProfileNotFoundError, match=r"looked for llama\.yaml and text\.yaml\); it has: other\.yaml"):
        resolve_deployment(model, deploy_profile="tiny")


def test_unknown_platform(model: str) -> None:
    with pytest.raises(ConfigError, match="platform 'cpus' is not known; did you mean 'cpu'"):
        resolve_deployment(model, platform="cpus")


def test_unknown_model_type_can_be_forced_by_the_file(make_model: Callable[..., Path], write_yaml: WriteYaml) -> None:
    directory = str(make_model(model_type="mamba9"))
    with pytest.raises(ConfigError, match="`pipeline: text` in a deploy YAML"):
        resolve_deployment(directory, deploy_profile="edge")
    file = write_yaml("base_config: edge/text.yaml\npipeline: text\n")
    assert resolve_deployment(directory, deploy_config=file).pipeline.model_type == "text"
    forced = resolve_deployment(directory, deploy_profile="edge", overrides={"pipeline": "text"})
    assert forced.config.pipeline == "text"


@pytest.mark.parametrize("text", ["orchestrator: {}\n", "stages: [{stage_id: 0}, {stage_id: 1}]\n"])
def test_stage_ids_must_be_those_of_the_pipeline(model: str, write_yaml: WriteYaml, text: str) -> None:
    with pytest.raises(ConfigError, match=r"accepted: those of pipeline 'text', \[0\]"):
        resolve_deployment(model, deploy_config=write_yaml(text))


def test_orchestrator_block_applies_whichever_flag_loaded_the_file(model: str, write_yaml: WriteYaml) -> None:
    file = write_yaml("stages: [{stage_id: 0}]\norchestrator: {max_queued_requests: 3}\n")
    assert resolve_deployment(model, deploy_config=file).config.orchestrator.max_queued_requests == 3
    assert resolve_deployment(model, deploy_profile="edge").config.orchestrator.max_queued_requests == 16
    flagged = resolve_deployment(model, deploy_profile="edge", overrides={"max_queued_requests": 5})
    assert flagged.config.orchestrator.max_queued_requests == 5
    assert flagged.provenance["orchestrator.max_queued_requests"] == "--max-queued-requests"
    assert flagged.config.orchestrator.retry_after_s == 2


def test_async_chunk_is_off_with_one_stage(model: str) -> None:
    deployment = resolve_deployment(model, overrides={"async_chunk": True})
    assert deployment.config.async_chunk is False
    assert deployment.provenance["async_chunk"] == "pipeline text has one stage"


def test_parsers_come_from_the_chat_template(make_model: Callable[..., Path]) -> None:
    template = {"chat_template.jinja": "<|im_start|> tools <tool_call> <think>"}
    deployment = resolve_deployment(str(make_model(template, model_type="qwen3")))
    assert (deployment.stage(0).tool_call_parser, deployment.stage(0).reasoning_parser) == ("hermes", "qwen3")
    assert deployment.provenance["stages[0].tool_call_parser"] == "chat template"


def test_named_or_null_parser_stays(make_model: Callable[..., Path], write_yaml: WriteYaml) -> None:
    directory = str(make_model({"chat_template.jinja": "<|im_start|> <tool_call>"}))
    file = write_yaml("stages: [{stage_id: 0, tool_call_parser: null}]\n")
    assert resolve_deployment(directory, deploy_config=file).stage(0).tool_call_parser is None
    named = resolve_deployment(directory, overrides={"tool_call_parser": "pythonic"})
    assert named.stage(0).tool_call_parser == "pythonic"


def test_batch_smaller_than_sequences_names_both_sources(model: str) -> None:
    message = (
        r"max_num_batched_tokens is 2 \(--max-num-batched-tokens\), below max_num_seqs 4 \(vllm_omni/deploy/edge/text"
    )
    with pytest.raises(ConfigError, match=message):
        resolve_deployment(model, deploy_profile="edge", overrides={"max_num_batched_tokens": 2})


def test_length_beyond_the_model_names_both_numbers(model: str) -> None:
    with pytest.raises(ConfigError, match=r"max_model_len is 4096 \(--max-model-len\), but .*config\.json allows 2048"):
        resolve_deployment(model, overrides={"max_model_len": 4096})
    assert resolve_deployment(model, overrides={"max_model_len": 2048}).stage(0).max_model_len == 2048
    overridden = {"max_model_len": 4096, "hf_overrides": {"rope_scaling": {"rope_type": "yarn"}}}
    assert resolve_deployment(model, overrides=overridden).stage(0).max_model_len == 4096


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            {"max_num_seqs": "many"},
            r"--max-num-seqs: stages\[0\].max_num_seqs is 'many' \(str\); accepted: a valid int",
        ),
        ({"max_num_seqs": 0}, r"--max-num-seqs: stages\[0\].max_num_seqs is 0"),
        ({"init_timeout": 0}, r"--init-timeout: orchestrator.init_timeout is 0"),
        ({"stage_topology": "ray"}, r"--stage-topology: stage_topology is 'ray' \(str\); accepted: 'inline'"),
        ({"default_sampling_params": {"topk": 1}}, r"--default-sampling-params: .*topk is no sampling field"),
        ({"engine_extras": {"seed": 1}}, r"--engine-extras: .*seed is a stage key"),
    ],
)
def test_wrong_overrides_name_the_flag(model: str, overrides: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve_deployment(model, overrides=overrides)


def test_profiles_are_the_directories_with_files() -> None:
    assert "edge" in list_profiles()


def test_resolution_loads_no_heavy_module_and_is_quick(model: str) -> None:
    # The limit on process time is generous: importing torch or vLLM alone takes several seconds.
    script = (
        "import sys, time\n"
        "from vllm_omni.config.resolve import resolve_deployment\n"
        f"resolve_deployment({model!r}, deploy_profile='edge').describe()\n"
        "heavy = {'torch', 'vllm', 'transformers', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "assert time.process_time() < 2.0, time.process_time()\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60, cwd=Path(resolve.__file__).parents[2])
