from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from vllm_omni.config.deployment import _map_lines
from vllm_omni.config.layers import leaves
from vllm_omni.config.resolve import resolve_deployment

AWKWARD = {
    "chat_template": "{% if x %}\n  # no comment: {{ y }}\n{% endif %}\u2028é\U0001f600\x7f",
    "hf_overrides": {
        "text": "a # b",
        "number as text": "12",
        "none as text": "null",
        "on": "yes",
        "colon: key": {"deep": [1, [2, "x: y"], {}], "empty": {}},
        "maps": [{"a": 1, "b": {"c": 2}}, {"d": None}],
        "mixed": [{"a": 1}, 2],
        "long": "word " * 80,
        "lines": "a\nb",
        "small": 1e-07,
    },
    "default_sampling_params": {"stop": ["\n", "a, b"], "logit_bias": {7: -1.5}},
}


@pytest.mark.parametrize("overrides", [{}, AWKWARD, {"seed": 1, "max_loras": 2}], ids=["plain", "awkward", "extras"])
def test_description_loads_back_to_the_tree(model: str, overrides: dict) -> None:
    deployment = resolve_deployment(model, deploy_profile="edge", overrides=overrides)
    assert yaml.safe_load(deployment.describe()) == deployment.tree()


def test_every_leaf_has_a_comment_with_its_source(model: str) -> None:
    deployment = resolve_deployment(model, deploy_profile="edge", overrides={"seed": 5, "stage_0_block_size": 16})
    lines = deployment.describe().splitlines()
    assert "  seed: 5  # --seed" in lines
    assert "  block_size: 16  # --stage-0-block-size" in lines
    assert "  max_num_seqs: 4  # vllm_omni/deploy/edge/text.yaml" in lines
    assert "- stage_id: 0  # vllm_omni/deploy/text.yaml" in lines
    assert "  tokenizer: null  # default" in lines
    assert "  kv_cache_memory_bytes: 536870912  # vllm_omni/deploy/edge/text.yaml" in lines
    assert all("  # " in line for line in lines if not line.endswith(":"))


def test_text_of_several_lines_stays_on_one(model: str) -> None:
    lines = resolve_deployment(model, overrides=AWKWARD).describe().splitlines()
    assert '    lines: "a\\nb"  # --hf-overrides' in lines


def test_provenance_has_exactly_the_leaves(model: str) -> None:
    deployment = resolve_deployment(model, overrides=AWKWARD)
    tree = deployment.tree()
    (stage,) = tree.pop("stages")
    paths = {path for path, _ in leaves(tree, "")} | {path for path, _ in leaves(stage, "stages[0]")}
    assert set(deployment.provenance) == paths


def test_description_is_a_deploy_file_with_the_same_result(model: str, tmp_path: Path) -> None:
    deployment = resolve_deployment(model, deploy_profile="edge", overrides={"max_model_len": 99})
    file = tmp_path / "printed.yaml"
    file.write_text(deployment.describe())
    assert resolve_deployment(model, deploy_config=file).tree() == deployment.tree()


def test_lists_of_maps_are_block_lists() -> None:
    lines = list(_map_lines({"a": [{"b": 1, "c": {"d": 2}}, {"e": 3}]}, "", 0, {"a[0].c.d": "file"}))
    assert lines == [
        "a:",
        "- b: 1  # default",
        "  c:",
        "    d: 2  # file",
        "- e: 3  # default",
    ]


def test_unknown_stage_is_an_error(make_model: Callable[..., Path]) -> None:
    with pytest.raises(IndexError):
        resolve_deployment(str(make_model())).stage(1)
