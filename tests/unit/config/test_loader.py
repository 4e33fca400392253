from collections.abc import Callable
from pathlib import Path

import pytest

from vllm_omni.config import loader
from vllm_omni.config.loader import DEPLOY_DIR, display_path, load_deploy_file, read_yaml
from vllm_omni.errors import ConfigError

WriteYaml = Callable[..., Path]
STAGE = "stages:\n  - stage_id: 0\n"


def message_of(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        load_deploy_file(path)
    assert str(path) in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 2\na: 3\n", "line 3, column 1, is not valid YAML: key 'a' is given twice"),
        ("s:\n  - {x: 1, x: 2}\n", "line 2, column 12, is not valid YAML: key 'x' is given twice"),
        ("a: [1\nb: 2\n", "line 2, column 2, is not valid YAML"),
        ("a: !!python/object:os.system x\n", "is not valid YAML: could not determine a constructor"),
        ("", "is empty; accepted: a map of keys"),
        ("- 1\n", "is a list; accepted: a map of keys"),
        ("a: \x01\n", "is not valid YAML"),
        ("a: &a {x: 1}\nb: {<<: *a}\n", "line 2, column 5, is not valid YAML: merge keys (<<) are not accepted"),
    ],
)
def test_unreadable_yaml_says_where(write_yaml: WriteYaml, text: str, message: str) -> None:
    assert message in message_of(write_yaml(text))


def test_missing_file(tmp_path: Path) -> None:
    assert "does not exist; accepted: the path of a YAML file" in message_of(tmp_path / "absent.yaml")


def test_file_that_is_no_text(tmp_path: Path) -> None:
    file = tmp_path / "x.yaml"
    file.write_bytes(b"\xff\xfe")
    assert "cannot be read" in message_of(file)
    assert "cannot be read" in message_of(tmp_path)


def test_aliases_are_read(write_yaml: WriteYaml) -> None:
    assert read_yaml(write_yaml("a: &a {x: 1}\nb: *a\n")) == {"a": {"x": 1}, "b": {"x": 1}}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("stagse: []\n", "stagse is not a known key; did you mean 'stages'?"),
        (STAGE + "    max_num_seq: 2\n", "stages[0].max_num_seq is not a known key; did you mean 'max_num_seqs'"),
        (
            "orchestrator: {init_timeouts: 2}\n",
            "orchestrator.init_timeouts is not a known key; did you mean 'init_time",
        ),
        (
            "connectors: {c: {name: InProcConnector, ext: {}}}\n",
            "connectors.c.ext is not a known key; did you mean 'extra'",
        ),
        ("platforms: {cpu: {stage: []}}\n", "platforms.cpu.stage is not a known key; did you mean 'stages'?"),
        (
            "platforms: {cpu: {stages: [{stage_id: 0, sed: 1}]}}\n",
            "platforms.cpu.stages[0].sed is not a known key; did you mean 'seed'",
        ),
        ("platforms: {cpuu: {stages: []}}\n", "platforms.cpuu is no platform; did you mean 'cpu'"),
        (
            STAGE + "    default_sampling_params: {temprature: 1}\n",
            "stages[0].default_sampling_params.temprature is no",
        ),
        (
            STAGE + "platforms: {cpu: {stages: [{stage_id: 0, default_sampling_params: {topk: 1}}]}}\n",
            "platforms.cpu.stages[0].default_sampling_params.topk is no sampling field; did you mean 'top_k'",
        ),
        (STAGE + "    env: {A: b}\n", "stages[0].env is not a known key; accepted: additional_config, "),
        ("1: 2\n", "is 1 (int)"),
    ],
)
def test_unknown_keys_at_any_level_name_path_and_nearest(write_yaml: WriteYaml, text: str, message: str) -> None:
    assert message in message_of(write_yaml(text))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (STAGE + "    max_num_seqs: four\n", "stages[0].max_num_seqs is 'four' (str); accepted: a valid integer"),
        (STAGE + "    max_num_seqs: 0\n", "stages[0].max_num_seqs is 0 (int); accepted: greater than or equal to 1"),
        (STAGE + "    max_num_seqs: true\n", "stages[0].max_num_seqs is True (bool); accepted: a valid integer"),
        (STAGE + "    enforce_eager: 1\n", "stages[0].enforce_eager is 1 (int); accepted: a valid boolean"),
        (STAGE + "    hf_overrides: [1]\n", "stages[0].hf_overrides is [1] (list); accepted: a valid dictionary"),
        (
            STAGE + "    kv_cache_memory_bytes: 1GB\n",
            "stages[0].kv_cache_memory_bytes is '1GB' (str); accepted: a number",
        ),
        (STAGE + "    kv_cache_memory_bytes: 0B\n", "greater than or equal to 1"),
        (STAGE + "    dtype: int4\n", "stages[0].dtype is 'int4' (str); accepted: 'auto', 'bfloat16'"),
        (STAGE + "    devices: gpu0\n", "stages[0].devices is 'gpu0' (str)"),
        ("stage_topology: process\n", "stage_topology is 'process' (str); accepted: 'inline'"),
        ("stages: {}\n", "stages is {} (dict); accepted: a valid list"),
        ("stages: [{seed: 1}]\n", "stages[0].stage_id is missing; add it"),
        ("stages: [{stage_id: -1}]\n", "stages[0].stage_id is -1 (int); accepted: greater than or equal to 0"),
        ("connectors: {c: {name: SharedMemoryConnector}}\n", "accepted: 'InProcConnector'"),
        ("connectors: {c: {}}\n", "connectors.c.name is missing"),
        ("orchestrator: {shutdown_timeout_s: 0}\n", "accepted: greater than 0"),
        ("orchestrator: {shutdown_timeout_s: .inf}\n", "accepted: a finite number"),
        ("platforms: {cpu: null}\n", "platforms.cpu is None (NoneType)"),
    ],
)
def test_wrong_values_say_given_and_accepted(write_yaml: WriteYaml, text: str, message: str) -> None:
    assert message in message_of(write_yaml(text))


def test_all_problems_of_a_file_are_listed(write_yaml: WriteYaml) -> None:
    message = message_of(write_yaml("async_chunk: 3\nstagse: []\n"))
    assert len(message.splitlines()) == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("stages: [{stage_id: 0}, {stage_id: 0}]\n", "stages has stage_id 0 twice"),
        ("stages: [{stage_id: 0}, {stage_id: 2}]\n", "stage ids are [0, 2]; accepted: 0 to N-1"),
        ("stages: [{stage_id: 1}]\n", "stage ids are [1]"),
        (STAGE + "platforms: {npu: {stages: [{stage_id: 1}]}}\n", "platforms.npu.stages names stage 1; accepted"),
        (
            STAGE + "platforms: {cpu: {stages: [{stage_id: 0}, {stage_id: 0}]}}\n",
            "platforms.cpu.stages has stage_id 0 twice",
        ),
        ("stage_args: []\n", "`stage_args` belongs to an older schema; move each entry to `stages:`"),
    ],
)
def test_stage_lists(write_yaml: WriteYaml, text: str, message: str) -> None:
    assert message in message_of(write_yaml(text))


def test_engine_extras_are_checked_against_vllm(write_yaml: WriteYaml, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "accepted_engine_fields", lambda: frozenset({"watermark", "max_loras"}))
    tree, _ = load_deploy_file(write_yaml(STAGE + "    engine_extras: {max_loras: 2}\n"))
    assert tree.stages[0]["engine_extras"] == {"max_loras": 2}
    message = message_of(write_yaml(STAGE + "    engine_extras: {max_lora: 2}\n"))
    assert "stages[0].engine_extras.max_lora is no vLLM engine field; did you mean 'max_loras'" in message


def test_stage_keys_do_not_belong_into_engine_extras(write_yaml: WriteYaml) -> None:
    message = message_of(write_yaml(STAGE + "    engine_extras: {seed: 2}\n"))
    assert "stages[0].engine_extras.seed is a stage key; set it directly, as stages[0].seed" in message


def test_engine_field_as_stage_key_points_to_engine_extras(
    write_yaml: WriteYaml, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "engine_arguments_file", lambda: Path("x"))
    monkeypatch.setattr(loader, "accepted_engine_fields", lambda: frozenset({"max_loras"}))
    assert "write it under engine_extras" in message_of(write_yaml(STAGE + "    max_loras: 2\n"))


def test_base_config_is_relative_to_the_file_and_recursive(write_yaml: WriteYaml) -> None:
    bottom = write_yaml(STAGE + "    seed: 1\n    block_size: 8\n    max_num_seqs: 3\n", "lower/bottom.yaml")
    middle = write_yaml("base_config: bottom.yaml\n" + STAGE + "    seed: 2\n    block_size: 16\n", "lower/middle.yaml")
    top = write_yaml("base_config: lower/middle.yaml\n" + STAGE + "    seed: 3\n", "top.yaml")
    tree, files = load_deploy_file(top)
    assert tree.stages[0] == {"seed": 3, "block_size": 16, "max_num_seqs": 3}
    assert [file.resolve() for file in files] == [top, middle, bottom]
    assert tree.source_of("stages[0].block_size") == str(middle)


def test_base_config_may_name_a_packaged_file(write_yaml: WriteYaml) -> None:
    _, files = load_deploy_file(write_yaml("base_config: edge/text.yaml\n"))
    assert [display_path(file) for file in files[1:]] == [
        "vllm_omni/deploy/edge/text.yaml",
        "vllm_omni/deploy/text.yaml",
    ]
    assert files[1].is_relative_to(DEPLOY_DIR)


def test_base_that_does_not_exist(write_yaml: WriteYaml) -> None:
    assert "base_config 'nowhere.yaml' does not exist" in message_of(write_yaml("base_config: nowhere.yaml\n"))


def test_cycle_of_bases(write_yaml: WriteYaml) -> None:
    write_yaml("base_config: a.yaml\n", "b.yaml")
    message = message_of(write_yaml("base_config: b.yaml\n", "a.yaml"))
    assert "base_config forms a cycle" in message
    assert message.count("a.yaml") == 2


def test_a_problem_in_a_base_names_the_base(write_yaml: WriteYaml) -> None:
    base = write_yaml("stagse: []\n", "base.yaml")
    with pytest.raises(ConfigError) as caught:
        load_deploy_file(write_yaml("base_config: base.yaml\n", "top.yaml"))
    assert str(caught.value).startswith(f"{base}: stagse")


def test_an_overlay_may_list_only_a_later_stage(write_yaml: WriteYaml) -> None:
    write_yaml("stages: [{stage_id: 0}, {stage_id: 1}]\n", "base.yaml")
    tree, _ = load_deploy_file(write_yaml("base_config: base.yaml\nstages: [{stage_id: 1, seed: 4}]\n", "top.yaml"))
    assert tree.stages == {0: {}, 1: {"seed": 4}}
