import pytest

from vllm_omni.config import overrides
from vllm_omni.config.layers import LayeredTree
from vllm_omni.config.overrides import apply_overrides, apply_pipeline_wide
from vllm_omni.errors import ConfigError

ENGINE_FIELDS = {"revision": "str | None", "max_loras": "int", "pooler_config": "PoolerConfig | None"}


@pytest.fixture(autouse=True)
def engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overrides, "accepted_engine_fields", lambda: frozenset(ENGINE_FIELDS))
    monkeypatch.setattr(overrides, "accepts_text", lambda name: ENGINE_FIELDS[name].startswith("str"))


@pytest.fixture
def tree() -> LayeredTree:
    tree = LayeredTree()
    tree.overlay_file({"stages": [{"stage_id": 0, "seed": 1}, {"stage_id": 1}]}, "file")
    return tree


def test_a_stage_field_goes_to_every_stage(tree: LayeredTree) -> None:
    apply_overrides(tree, {"seed": 7}, None)
    assert tree.stages == {0: {"seed": 7}, 1: {"seed": 7}}
    assert tree.source_of("stages[1].seed") == "--seed"


def test_top_level_and_orchestrator_fields_go_to_their_place(tree: LayeredTree) -> None:
    apply_overrides(tree, {"async_chunk": False, "init_timeout": 9, "shutdown_timeout_s": "2.5"}, None)
    assert tree.top == {"async_chunk": False, "orchestrator": {"init_timeout": 9, "shutdown_timeout_s": 2.5}}
    assert tree.source_of("orchestrator.init_timeout") == "--init-timeout"


def test_a_name_of_both_levels_sets_the_stages(tree: LayeredTree) -> None:
    apply_overrides(tree, {"dtype": "float16"}, None)
    assert tree.top == {}
    assert tree.stages[1]["dtype"] == "float16"


def test_other_engine_fields_go_to_engine_extras(tree: LayeredTree) -> None:
    apply_overrides(tree, {"max_loras": "3", "revision": "123", "pooler_config": '{"a": 1}'}, None)
    expected = {"max_loras": 3, "revision": "123", "pooler_config": {"a": 1}}
    assert tree.stages[0]["engine_extras"] == tree.stages[1]["engine_extras"] == expected


def test_none_is_not_given(tree: LayeredTree) -> None:
    apply_overrides(tree, {"seed": None, "unknown_name": None, "stage_0_seed": None}, None)
    assert tree.stages[0] == {"seed": 1}


@pytest.mark.parametrize("nested", [{"1": {"seed": 4}}, '{"1": {"seed": 4}}'])
def test_stage_overrides_win_over_global_ones(tree: LayeredTree, nested: object) -> None:
    apply_overrides(tree, {"seed": 7}, nested)  # type: ignore[arg-type]
    assert [tree.stages[0]["seed"], tree.stages[1]["seed"]] == [7, 4]
    assert tree.source_of("stages[1].seed") == "--stage-overrides 1.seed"


def test_flat_spelling_is_a_stage_override(tree: LayeredTree) -> None:
    apply_overrides(tree, {"seed": 7, "stage_1_seed": "4", "stage_0_max_loras": 2}, None)
    assert tree.stages == {0: {"seed": 7, "engine_extras": {"max_loras": 2}}, 1: {"seed": 4}}
    assert tree.source_of("stages[1].seed") == "--stage-1-seed"


def test_an_explicit_null_in_stage_overrides_is_kept(tree: LayeredTree) -> None:
    apply_overrides(tree, {}, {"0": {"tool_call_parser": None}})
    assert tree.stages[0]["tool_call_parser"] is None
    assert tree.source_of("stages[0].tool_call_parser") == "--stage-overrides 0.tool_call_parser"


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("max_num_seqs", "4", 4),
        ("enforce_eager", "true", True),
        ("kv_cache_memory_bytes", "512MiB", "512MiB"),
        ("kv_cache_memory_bytes", "1024", 1024),
        ("compilation_config", '{"mode": 0}', {"mode": 0}),
        ("default_sampling_params", "{temperature: 0.5}", {"temperature": 0.5}),
        ("tokenizer", "123", "123"),
        ("dtype", "auto", "auto"),
        ("chat_template", "{% if x %}", "{% if x %}"),
    ],
)
def test_text_is_read_as_the_type_of_the_field(tree: LayeredTree, name: str, text: str, value: object) -> None:
    apply_overrides(tree, {name: text}, None)
    assert tree.stages[0][name] == value


def test_maps_merge_deeply(tree: LayeredTree) -> None:
    tree.set_stage_field(0, "compilation_config", {"mode": 0, "a": {"b": 1}}, "file")
    apply_overrides(tree, {"compilation_config": {"a": {"c": 2}}}, None)
    assert tree.stages[0]["compilation_config"] == {"mode": 0, "a": {"b": 1, "c": 2}}


@pytest.mark.parametrize(
    ("given", "nested", "message"),
    [
        ({"max_num_seq": 1}, None, "--max-num-seq is no known setting; did you mean 'max_num_seqs'"),
        ({"stages": []}, None, "--stages is no known setting"),
        ({"stage_id": 1}, None, "--stage-id is no known setting"),
        ({"stage_2_seed": 1}, None, r"--stage-2-seed: there is no stage 2; accepted: \[0, 1\]"),
        ({"stage_0_sed": 1}, None, "--stage-0-sed: 'sed' is no field of stage 0; did you mean 'seed'"),
        ({"stage_0_init_timeout": 1}, None, "'init_timeout' is no field of stage 0"),
        ({}, {"0": {"max_lora": 1}}, "--stage-overrides 0.max_lora: 'max_lora' is no field of stage 0"),
        ({}, {"5": {"seed": 1}}, "there is no stage 5"),
        ({}, "{", "--stage-overrides is not valid JSON"),
        ({}, "[1]", r"--stage-overrides is \[1\]; accepted"),
        ({}, {0: {"seed": 1}}, "--stage-overrides has 0:"),
        ({}, {"a": {"seed": 1}}, "--stage-overrides has 'a':"),
        ({}, {"0": 3}, "--stage-overrides has '0': 3; accepted"),
        ({"stage_0_seed": 1}, {"0": {"seed": 2}}, "--stage-0-seed and --stage-overrides 0.seed set the same field"),
        ({"hf_overrides": "{a: ["}, None, "--hf-overrides is '{a: \\[', which is neither a YAML scalar nor JSON"),
    ],
)
def test_errors(tree: LayeredTree, given: dict, nested: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        apply_overrides(tree, given, nested)  # type: ignore[arg-type]


def test_pipeline_wide_values_fill_stages_that_have_none(tree: LayeredTree) -> None:
    tree.set_top_field("dtype", "float16", "file")
    tree.set_stage_field(1, "dtype", "bfloat16", "file")
    apply_pipeline_wide(tree)
    assert (tree.stages[0]["dtype"], tree.stages[1]["dtype"]) == ("float16", "bfloat16")
    assert "quantization" not in tree.stages[0]
