"""The native core as the benchmarks drive it, on a small artifact of random weights."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks.edge_harness import native_check
from benchmarks.edge_harness.decode_work import DECODE_NAME
from benchmarks.edge_harness.fidelity_judges import judge_artifact
from benchmarks.edge_harness.kl_base_file import write_base
from benchmarks.edge_harness.kl_statistics import scored_positions
from benchmarks.edge_harness.measurement import Workload
from benchmarks.edge_harness.native_arm import time_native
from benchmarks.edge_harness.native_model import NativeModel
from benchmarks.edge_harness.random_artifact import random_artifact
from tests.unit.benchmarks.tiny_models import TINY
from vllm_omni.errors import EngineError, RequestError
from vllm_omni.native.library import native_library

pytestmark = pytest.mark.skipif(native_library() is None, reason="the native core is not built")
CHUNKS = np.random.default_rng(0).integers(0, TINY.vocab_size, (3, 16)).astype(np.int32)


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_artifact(TINY, 64, 4, tmp_path_factory.mktemp("models"))


def test_a_prompt_in_one_step_is_the_same_as_token_by_token(artifact: Path) -> None:
    with NativeModel(artifact, 1, 16) as model:
        whole = model.logits(model.prefill(CHUNKS[0]))
        single = np.concatenate([model.logits(model.decode(int(each), at)) for at, each in enumerate(CHUNKS[0])])
    assert native_check.relative_difference(single, whole) < native_check.TOLERANCE


def test_a_prompt_longer_than_the_cache_is_refused(artifact: Path) -> None:
    with NativeModel(artifact, 1, 8) as model, pytest.raises(RequestError, match="raise max_tokens"):
        model.prefill(np.zeros(model.spec.max_position + 1, np.int32))


def test_the_core_passes_the_check_and_another_model_does_not(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    differences = native_check.check_native(artifact, 1)
    assert len(differences) == 3
    assert max(differences.values()) < native_check.TOLERANCE
    right = native_check.unpack
    monkeypatch.setattr(native_check, "unpack", lambda packed, *form: right(np.roll(packed, 1, axis=0), *form))
    with pytest.raises(EngineError, match="decoded row"):
        native_check.check_native(artifact, 1)


def test_every_test_is_timed_as_often_as_asked(artifact: Path) -> None:
    with NativeModel(artifact, 1, 1024) as model:
        samples = time_native(model, Workload(0, 2, 1, TINY.vocab_size))
    assert set(samples) == {"pp128_tok_s", "pp512_tok_s", DECODE_NAME}
    assert all(len(rates) == 2 and min(rates) > 0 for rates in samples.values())


def test_a_model_judged_against_itself_is_the_same(artifact: Path, tmp_path: Path) -> None:
    positions = scored_positions(CHUNKS.shape[1])
    with NativeModel(artifact, 1, 16) as model:
        write_base(
            tmp_path / "base",
            CHUNKS,
            TINY.vocab_size,
            lambda chunk: model.logits(model.prefill(chunk)[positions.start : positions.stop]),
        )
    judged = judge_artifact(artifact, tmp_path / "base", 1)
    assert judged.fidelity.num_tokens == 3 * 7
    assert judged.fidelity.same_top_percent == 100.0
    assert abs(judged.fidelity.mean_kl) < 1e-4
    assert judged.fidelity.perplexity == pytest.approx(judged.fidelity.base_perplexity, rel=1e-3)
    assert judged.bits_per_weight == pytest.approx(4.5, abs=0.1)
