from vllm_omni.config.layers import LayeredTree


def layered(*files: dict) -> LayeredTree:
    tree = LayeredTree()
    for number, values in enumerate(files):
        tree.overlay_file(values, f"file{number}")
    return tree


def stages(**fields: object) -> dict:
    return {"stages": [{"stage_id": 0, **fields}]}


def test_plain_top_level_keys_are_replaced() -> None:
    tree = layered({"dtype": "auto", "quantization": "x"}, {"dtype": "bfloat16"})
    assert tree.to_mapping() == {"dtype": "bfloat16", "quantization": "x", "stages": []}
    assert (tree.source_of("dtype"), tree.source_of("quantization")) == ("file1", "file0")


def test_orchestrator_and_connectors_merge() -> None:
    tree = layered(
        {"orchestrator": {"init_timeout": 1, "retry_after_s": 2}, "connectors": {"a": {"extra": {"x": 1, "y": 1}}}},
        {"orchestrator": {"init_timeout": 3}, "connectors": {"a": {"extra": {"y": 2}}, "b": {}}},
    )
    assert tree.top["orchestrator"] == {"init_timeout": 3, "retry_after_s": 2}
    assert tree.top["connectors"] == {"a": {"extra": {"x": 1, "y": 2}}, "b": {}}
    assert tree.source_of("connectors.a.extra.x") == "file0"
    assert tree.source_of("connectors.a.extra.y") == "file1"


def test_stages_merge_by_id_and_new_ones_are_appended() -> None:
    tree = layered(
        {"stages": [{"stage_id": 0, "seed": 1, "block_size": 16}]},
        {"stages": [{"stage_id": 1, "seed": 5}, {"stage_id": 0, "seed": 2}]},
    )
    assert tree.to_mapping()["stages"] == [
        {"stage_id": 0, "seed": 2, "block_size": 16},
        {"stage_id": 1, "seed": 5},
    ]
    assert tree.source_of("stages[0].stage_id") == "file0"
    assert tree.source_of("stages[1].stage_id") == "file1"


def test_sampling_and_extras_merge_but_other_stage_maps_are_replaced() -> None:
    tree = layered(
        stages(default_sampling_params={"a": 1, "b": 1}, engine_extras={"c": 1}, compilation_config={"d": 1}),
        stages(default_sampling_params={"b": 2}, engine_extras={"e": 2}, compilation_config={"f": 2}),
    )
    assert tree.stages[0] == {
        "default_sampling_params": {"a": 1, "b": 2},
        "engine_extras": {"c": 1, "e": 2},
        "compilation_config": {"f": 2},
    }
    assert "stages[0].compilation_config.d" not in tree.sources
    assert tree.source_of("stages[0].default_sampling_params.a") == "file0"


def test_an_empty_map_changes_nothing_where_maps_merge() -> None:
    tree = layered(stages(engine_extras={"c": 1}), stages(engine_extras={}))
    assert tree.stages[0]["engine_extras"] == {"c": 1}


def test_a_map_replaces_a_scalar_and_null_replaces_a_map() -> None:
    tree = layered(stages(engine_extras=None, hf_overrides={"a": 1}), stages(engine_extras={"c": 1}, hf_overrides=None))
    assert tree.stages[0] == {"engine_extras": {"c": 1}, "hf_overrides": None}
    assert tree.source_of("stages[0].hf_overrides") == "file1"
    assert "stages[0].engine_extras" not in tree.sources


def test_platform_sections_apply_after_all_files_base_first() -> None:
    base = {**stages(seed=1), "platforms": {"cpu": {"stages": [{"stage_id": 0, "seed": 2, "block_size": 8}]}}}
    overlay = {**stages(seed=3, block_size=4), "platforms": {"cpu": {"stages": [{"stage_id": 0, "seed": 4}]}}}
    tree = layered(base, overlay)
    tree.apply_platform("cpu")
    assert tree.stages[0] == {"seed": 4, "block_size": 8}
    assert tree.source_of("stages[0].seed") == "platforms.cpu of file1"
    assert tree.source_of("stages[0].block_size") == "platforms.cpu of file0"


def test_another_platform_leaves_the_stages_alone() -> None:
    tree = layered({**stages(seed=1), "platforms": {"cuda": {"stages": [{"stage_id": 0, "seed": 2}]}}})
    tree.apply_platform("cpu")
    assert tree.stages[0]["seed"] == 1


def test_set_stage_field_merges_every_map() -> None:
    tree = layered(stages(compilation_config={"a": {"b": 1}, "c": 1}))
    tree.set_stage_field(0, "compilation_config", {"a": {"d": 2}}, "flag")
    assert tree.stages[0]["compilation_config"] == {"a": {"b": 1, "d": 2}, "c": 1}
    assert tree.source_of("stages[0].compilation_config.a.d") == "flag"
    assert tree.source_of("stages[0].compilation_config.a.b") == "file0"


def test_what_callers_gave_is_not_changed() -> None:
    given = stages(engine_extras={"a": [1]})
    tree = layered(given, stages(engine_extras={"b": 2}))
    assert given == stages(engine_extras={"a": [1]})
    tree.stages[0]["engine_extras"]["a"].append(2)
    assert given["stages"][0]["engine_extras"]["a"] == [1]


def test_source_of_falls_back_to_parent_then_child_then_default() -> None:
    tree = layered(stages(hf_overrides={"a": [1]}))
    assert tree.source_of("stages[0].hf_overrides.a.0") == "file0"
    assert tree.source_of("stages[0].hf_overrides") == "file0"
    assert tree.source_of("stages[0].seed") == "default"
