import logging
import os
import sys
from types import SimpleNamespace

import pytest

from vllm_omni import envs
from vllm_omni.edge.hardware_probe import HardwareReport
from vllm_omni.errors import ConfigError, HardwareError
from vllm_omni.platforms.cpu import threads

REPORT = HardwareReport(
    model_name=None,
    isa_flags=(),
    allowed_cpus=(0, 1, 2, 3),
    physical_cores=2,
    quota_cpus=None,
    total_bytes=None,
    available_bytes=None,
)
EXPORTED = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


@pytest.mark.parametrize(
    ("requested", "from_environment", "expected"),
    [
        (3, 1, (3, "num_threads")),
        (3, None, (3, "num_threads")),
        (None, 4, (4, "VLLM_OMNI_NUM_THREADS")),
        (None, None, (2, "hardware")),
    ],
)
def test_configuration_beats_environment_beats_hardware(
    requested: int | None, from_environment: int | None, expected: tuple[int, str]
) -> None:
    assert threads.choose_num_threads(requested, from_environment, REPORT) == expected


@pytest.mark.parametrize(
    ("requested", "from_environment", "text"),
    [(5, 1, "num_threads=5 is more than the 4"), (None, 8, "VLLM_OMNI_NUM_THREADS=8 is more than the 4")],
)
def test_more_threads_than_processors_are_refused(
    requested: int | None, from_environment: int | None, text: str
) -> None:
    with pytest.raises(HardwareError, match=text):
        threads.choose_num_threads(requested, from_environment, REPORT)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A process without torch on the recorded machine; what is exported is undone."""
    monkeypatch.setattr(threads, "probe_hardware", lambda: REPORT)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    for name in (*EXPORTED, "VLLM_OMNI_NUM_THREADS"):
        monkeypatch.setenv(name, "1")
        monkeypatch.delenv(name)
    return monkeypatch


def test_the_team_size_is_exported(machine: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "vllm_omni"):
        assert threads.configure_threads(None) == 2
    assert [os.environ[name] for name in EXPORTED] == ["2", "2"]
    assert "event=threads_set num_threads=2 source=hardware" in caplog.text


def test_the_environment_variable_is_read(machine: pytest.MonkeyPatch) -> None:
    machine.setenv("VLLM_OMNI_NUM_THREADS", "3")
    assert threads.configure_threads(None) == 3
    assert os.environ["OMP_NUM_THREADS"] == "3"


def test_a_malformed_environment_variable_is_an_error(machine: pytest.MonkeyPatch) -> None:
    machine.setenv("VLLM_OMNI_NUM_THREADS", "many")
    with pytest.raises(ConfigError, match="VLLM_OMNI_NUM_THREADS='many'"):
        threads.configure_threads(1)


def test_nothing_is_exported_when_the_number_is_refused(machine: pytest.MonkeyPatch) -> None:
    with pytest.raises(HardwareError):
        threads.configure_threads(5)
    assert not [name for name in EXPORTED if name in os.environ]


def test_torch_that_is_loaded_already_is_told(machine: pytest.MonkeyPatch) -> None:
    told: list[int] = []
    machine.setitem(sys.modules, "torch", SimpleNamespace(set_num_threads=told.append))
    threads.configure_threads(4)
    assert told == [4]


def test_the_variable_is_registered() -> None:
    assert envs.VARIABLES["VLLM_OMNI_NUM_THREADS"].default is None
