from vllm_omni.edge.weight_path import FACTS_KEY, choose_weight_path, describe_paths


def test_packed_weights_stay_packed_where_the_native_core_runs() -> None:
    assert choose_weight_path("avx2", None) == ("native-w4a8", "the native core runs on avx2")


def test_the_reason_for_torch_is_told() -> None:
    path, reason = choose_weight_path(None, "there is no library")
    assert path == "torch-unpacked"
    assert "there is no library" in reason


def test_a_model_of_this_package_tells_what_runs() -> None:
    facts = {"weight_path": "native-w4a8", "forward_path": "native", "native_isa": "avx2", "numerics": 2}
    assert describe_paths({FACTS_KEY: facts}, "float32") == facts


def test_vllms_own_models_are_described_by_their_dtype() -> None:
    expected = {"weight_path": "vllm-float32", "forward_path": "vllm"}
    assert describe_paths({}, "float32") == expected
    assert describe_paths(object(), "float32") == expected
