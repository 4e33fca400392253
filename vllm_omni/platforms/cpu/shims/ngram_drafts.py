"""Makes vLLM's n-gram drafts work where numba is not installed.

What is wrong, in vLLM 0.32: `ngram_proposer` imports numba to compile its search when the engine starts. numba and its
compiler are large and are left out of the installation, so `method: ngram` ends in an ImportError.

Here the search is numpy's: it compares the last tokens with all places of the context at once. It finds what vLLM's
does: the longest match of at most `max_n` tokens, of these the earliest, and the tokens that followed it.

Off: with `VLLM_OMNI_SHIM_NGRAM_DRAFTS=0`; by itself where numba is installed.
`tests/integration/test_shims.py` fails when vLLM no longer imports numba.
"""

import importlib
import importlib.util
import logging
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np

from vllm_omni import envs

logger = logging.getLogger("vllm_omni.shims")

PROPOSER = "vllm.v1.spec_decode.ngram_proposer"
COMPILER = "numba"


def ngram_drafts_without_numba() -> None:
    """Loads vLLM's proposer with a search that needs no compiler. Re-entrant; does nothing where numba is installed."""
    if not envs.VLLM_OMNI_SHIM_NGRAM_DRAFTS or PROPOSER in sys.modules:
        return
    if importlib.util.find_spec(COMPILER) is not None:
        return
    sys.modules[COMPILER] = _stand_in()
    try:
        proposer: Any = importlib.import_module(PROPOSER)
    finally:
        del sys.modules[COMPILER]
    proposer.batch_propose_numba = propose_batch
    logger.info("event=shim_used shim=ngram_drafts")


def _stand_in() -> ModuleType:
    """What the proposer takes from numba: decorators that change nothing, and a thread count that nobody reads."""
    module: Any = ModuleType(COMPILER, "Stands in for numba while vLLM's n-gram proposer is imported.")
    module.jit = module.njit = _leave_unchanged
    module.prange = range
    module.get_num_threads = lambda: 1
    module.set_num_threads = lambda _count: None
    return module


def _leave_unchanged(function: Callable[..., Any] | None = None, **_options: Any) -> Any:
    return function if function is not None else _leave_unchanged


def propose_batch(requests: list[int], num_tokens: np.ndarray, token_ids: np.ndarray, *settings: Any) -> None:
    """vLLM's `batch_propose_numba`: fills drafts and their numbers for the requests listed.

    Args:
        requests: Rows of the other arrays.
        num_tokens: Tokens of each context.
        token_ids: [requests, longest sequence], the contexts.
        settings: Shortest and longest match, longest sequence, most drafts; then the two arrays to fill, [requests,
            most drafts] and [requests].
    """
    min_n, max_n, max_model_len, most_drafts, drafts, num_drafts = settings
    for request in requests:
        tokens = token_ids[request, : num_tokens[request]]
        draft = find_draft(tokens, (min_n, max_n), min(most_drafts, max_model_len - len(tokens)))
        num_drafts[request] = len(draft)
        drafts[request, : len(draft)] = draft


def find_draft(tokens: np.ndarray, lengths: tuple[int, int], num_drafts: int) -> np.ndarray:
    """The tokens that followed the earliest of the longest earlier occurrences of the context's end.

    Args:
        tokens: The context.
        lengths: Shortest and longest match that counts.
        num_drafts: Most tokens to return.
    """
    shortest, longest = lengths
    last = len(tokens) - 1
    if num_drafts <= 0 or last < shortest:
        return tokens[:0]
    # matched[i]: how many tokens ending at place i equal the context's last ones.
    matched = np.zeros(last, dtype=np.int64)
    alive = np.ones(last, dtype=bool)
    for back in range(min(longest, last)):
        equal = np.zeros(last, dtype=bool)
        equal[back:] = tokens[: last - back] == tokens[last - back]
        alive &= equal
        if not alive.any():
            break
        matched += alive
    if matched.max() < shortest:
        return tokens[:0]
    end = int(matched.argmax()) + 1
    return tokens[end : end + num_drafts]
