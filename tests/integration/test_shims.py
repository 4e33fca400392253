"""Each shim is still needed, does what it says, and can be switched off. Fresh interpreters throughout."""

import subprocess
import sys

import pytest

ENGINE_IMPORT = "import vllm.v1.engine.async_llm"
REPORT = "import sys; print('torch._inductor.lowering' in sys.modules)"


def run(script: str) -> str:
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=240)
    assert run.returncode == 0, run.stderr
    return run.stdout.strip().splitlines()[-1]


def with_shim(compiles_nothing: bool) -> str:
    return f"""
from vllm_omni.platforms.cpu.shims.eager_import import eager_import
import torch
original = torch.compile
with eager_import(compiles_nothing={compiles_nothing}):
    {ENGINE_IMPORT}
assert torch.compile is original
{REPORT}
"""


def test_vllm_alone_imports_the_compiler() -> None:
    """When this fails, vLLM is fixed and the shim `eager_import` can go."""
    assert run(f"{ENGINE_IMPORT}; {REPORT}") == "True"


def test_with_the_shim_it_does_not() -> None:
    assert run(with_shim(compiles_nothing=True)) == "False"


def test_a_stage_that_compiles_keeps_the_compiler() -> None:
    assert run(with_shim(compiles_nothing=False)) == "True"


def test_the_switch_keeps_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_OMNI_SHIM_EAGER_IMPORT", "0")
    assert run(with_shim(compiles_nothing=True)) == "True"


def test_code_that_does_compile_still_finds_the_patches() -> None:
    script = with_shim(compiles_nothing=True) + "\nfrom vllm.compilation import compiler_interface\n" + REPORT
    assert run(script) == "True"


EMBEDDING = """
import torch
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead, UnquantizedEmbeddingMethod, VocabParallelEmbedding)
from vllm_omni.platforms.cpu.shims.embedding_pack import embedding_pack
import vllm.model_executor.layers.utils as utils

packed = []
pack = utils.dispatch_cpu_unquantized_gemm
utils.dispatch_cpu_unquantized_gemm = lambda layer, remove_weight: (packed.append(layer), pack(layer, remove_weight))

def loaded(kind):
    layer = kind.__new__(kind)
    torch.nn.Module.__init__(layer)
    layer.weight = torch.nn.Parameter(torch.randn(96, 64), requires_grad=False)
    UnquantizedEmbeddingMethod().process_weights_after_loading(layer)
    return layer
"""


def test_vllm_alone_packs_an_input_embedding() -> None:
    """When this fails, vLLM is fixed and the shim `embedding_pack` can go."""
    assert run(f"{EMBEDDING}\nloaded(VocabParallelEmbedding); print(len(packed))") == "1"


def test_with_the_shim_an_input_embedding_is_packed_once_when_it_is_multiplied() -> None:
    script = f"""{EMBEDDING}
with embedding_pack():
    layer = loaded(VocabParallelEmbedding)
assert packed == []
x = torch.randn(3, 64)
for _ in range(2):
    torch.testing.assert_close(layer.cpu_linear(x, layer.weight, None), x @ layer.weight.T)
print(len(packed))"""
    assert run(script) == "1"


def test_with_the_shim_an_output_layer_is_packed_at_once() -> None:
    assert run(f"{EMBEDDING}\nwith embedding_pack(): loaded(ParallelLMHead)\nprint(len(packed))") == "1"


def test_the_switch_packs_an_input_embedding_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_OMNI_SHIM_EMBEDDING_PACK", "0")
    assert run(f"{EMBEDDING}\nwith embedding_pack(): loaded(VocabParallelEmbedding)\nprint(len(packed))") == "1"


NGRAM = "vllm.v1.spec_decode.ngram_proposer"
WITHOUT_NUMBA = "import sys; sys.modules['numba'] = None\n"


def test_vllm_alone_needs_numba_for_ngram_drafts() -> None:
    """When this fails, vLLM is fixed and the shim `ngram_drafts` can go."""
    script = f"""{WITHOUT_NUMBA}
try:
    import {NGRAM}
except ImportError as error:
    print(error.name)"""
    assert run(script) == "numba"


def test_with_the_shim_vllms_proposer_drafts_without_numba() -> None:
    script = f"""
import sys
from types import SimpleNamespace
import numpy as np
from vllm_omni.platforms.cpu.shims.ngram_drafts import ngram_drafts_without_numba
ngram_drafts_without_numba()
assert "numba" not in sys.modules
from {NGRAM} import NgramProposer
config = SimpleNamespace(
    speculative_config=SimpleNamespace(prompt_lookup_min=2, prompt_lookup_max=4, num_speculative_tokens=3),
    model_config=SimpleNamespace(max_model_len=64),
    scheduler_config=SimpleNamespace(max_num_seqs=2),
    parallel_config=SimpleNamespace(tensor_parallel_size=1),
)
tokens = np.zeros((2, 64), np.int32)
tokens[0, :7] = [4, 5, 6, 7, 8, 4, 5]
print(NgramProposer(config).propose(3, [[5], []], np.array([7, 0], np.int32), tokens))"""
    assert run(script) == "[[6, 7, 8], []]"


GROUPS = """
from pathlib import Path
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed.parallel_state import ensure_model_parallel_initialized, init_distributed_environment
from vllm.utils.network_utils import get_file_store_init_method
from vllm_omni.platforms.cpu.shims.process_groups import process_groups

with set_current_vllm_config(VllmConfig()), process_groups(1):
    init_distributed_environment(1, 0, get_file_store_init_method(), 0, "gloo")
    ensure_model_parallel_initialized(1, 1)
print(sum("gloo" in path.read_text() for path in Path("/proc/self/task").glob("*/comm")))"""


def test_vllm_alone_makes_gloo_groups_for_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """When this fails, vLLM is fixed and the shim `process_groups` can go."""
    monkeypatch.setenv("VLLM_OMNI_SHIM_PROCESS_GROUPS", "0")
    assert int(run(GROUPS)) > 10


def test_with_the_shim_vllms_groups_have_no_threads() -> None:
    assert run(GROUPS) == "0"
