"""What loading an artifact costs in memory and time. The child loads the stack alone, as the engine does."""

from pathlib import Path

import pytest

from tests.child import facts_of, require_native_core

MAX_ANONYMOUS_SHARE = 0.05
MAX_LOAD_S_PER_GB = 2.0
CODE = """
import json, sys, time
from pathlib import Path
import torch
from tests.parity.decoder_harness import make_path
from vllm_omni.edge.memory import anonymous_bytes
from vllm_omni.quantization.artifact import read_artifact

before, start = anonymous_bytes(), time.process_time()
artifact = read_artifact(Path(sys.argv[1]))
path, shape = make_path("native", artifact)
seconds = time.process_time() - start
path.logits(path.embed(torch.arange(32)))
print(json.dumps({"bytes": anonymous_bytes() - before, "seconds": seconds, "weights": artifact.num_bytes}))
"""


@pytest.fixture(scope="module")
def load(smollm2_artifact: Path) -> dict[str, float]:
    """Bytes allocated and processor seconds, and the size of the weight files."""
    require_native_core()
    return facts_of(CODE, smollm2_artifact)


def test_mapped_weights_are_not_allocated(load: dict[str, float]) -> None:
    logits_bytes = 32 * 49152 * 4
    assert load["bytes"] - logits_bytes < MAX_ANONYMOUS_SHARE * load["weights"]


def test_loading_takes_no_time(load: dict[str, float]) -> None:
    assert load["seconds"] < MAX_LOAD_S_PER_GB * load["weights"] / 1e9
