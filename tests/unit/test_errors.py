import inspect

import pytest

from vllm_omni import errors
from vllm_omni.errors import (
    CapacityError,
    ConfigError,
    EngineError,
    HardwareError,
    OmniClientError,
    OmniError,
    ProfileNotFoundError,
    RequestError,
    StageError,
    WeightError,
    nearest,
)


def test_every_class_is_in_the_tree() -> None:
    classes = {found for _, found in inspect.getmembers(errors, inspect.isclass) if found.__module__ == errors.__name__}
    assert len(classes) == 9
    assert all(issubclass(found, OmniError) for found in classes)


@pytest.mark.parametrize(
    ("error", "builtin"),
    [(ConfigError, ValueError), (WeightError, ValueError), (RequestError, ValueError), (EngineError, RuntimeError)],
)
def test_some_are_builtin_errors_too(error: type[Exception], builtin: type[Exception]) -> None:
    assert issubclass(error, builtin)


def test_kinds_of_failure_are_told_apart_by_class() -> None:
    assert issubclass(ProfileNotFoundError, ConfigError)
    assert issubclass(StageError, EngineError)
    kinds = (ConfigError, HardwareError, WeightError, CapacityError, RequestError, EngineError)
    for kind in kinds:
        assert [other for other in kinds if issubclass(kind, other)] == [kind]


def test_the_upstream_name_is_the_same_class() -> None:
    assert OmniClientError is RequestError


def test_request_error_carries_what_http_needs() -> None:
    error = RequestError("too long", 413, "RequestTooLargeError")
    assert (str(error), error.message) == ("too long", "too long")
    assert (error.status_code, error.error_type) == (413, "RequestTooLargeError")
    assert (RequestError("x").status_code, RequestError("x").error_type) == (400, "BadRequestError")


def test_capacity_and_stage_errors_carry_their_facts() -> None:
    assert CapacityError("full", retry_after_s=2).retry_after_s == 2
    assert CapacityError("no memory").retry_after_s is None
    assert StageError("dead", 1).stage_id == 1
    assert StageError("dead").stage_id is None
    assert str(CapacityError("full", 2)) == "full"


def test_nearest_names_what_is_close() -> None:
    assert nearest("max_num_seq", ["seed", "max_num_seqs"]) == "did you mean 'max_num_seqs'?"
    assert nearest("abcd", {"abce", "abcf"}) in (
        "did you mean 'abce' or 'abcf'?",
        "did you mean 'abcf' or 'abce'?",
    )


def test_nearest_lists_everything_sorted_when_nothing_is_close() -> None:
    assert nearest("zzzz", ["seed", "dtype"]) == "accepted: dtype, seed"
