"""Runs a few tokens through a new engine core, so that the first request is as fast as the second.

Without it the first request pays for what vLLM and torch set up on first use: kernel dispatch, oneDNN primitives, the
sampler's branches. Runs in the engine thread before the core is handed out; nothing of it stays in the prefix cache.
"""

import logging
import time

from vllm_omni.engine.compat import EngineCore, EngineCoreRequest, SamplingParams
from vllm_omni.errors import EngineError

logger = logging.getLogger("vllm_omni.warm_up")

PROMPT_TOKENS = 48
NEW_TOKENS = 3
# Each entry covers branches of the sampler that the others do not.
SAMPLING = (
    {"temperature": 0.0, "logprobs": 1},
    {"temperature": 1.0, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.1, "presence_penalty": 0.1, "min_p": 0.01},
)
MAX_STEPS = 100


def warm_up(core: EngineCore) -> None:
    """Runs the warm-up requests to their end.

    Raises:
        EngineError: They did not end; the engine would not answer users either.
    """
    start = time.monotonic()
    prompt_tokens = max(1, min(PROMPT_TOKENS, core.vllm_config.model_config.max_model_len - NEW_TOKENS - 1))
    for number, values in enumerate(SAMPLING):
        params = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True, **values)
        request = _request(f"warm-up-{number}", prompt_tokens, params)
        core.add_request(*core.preprocess_add_request(request))
    _run_to_end(core)
    core.reset_prefix_cache()
    logger.info("event=warm_up_done requests=%d seconds=%.2f", len(SAMPLING), time.monotonic() - start)


def _request(request_id: str, prompt_tokens: int, params: SamplingParams) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=[1] * prompt_tokens,
        mm_features=None,
        sampling_params=params,
        pooling_params=None,
        arrival_time=time.time(),
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )


def _run_to_end(core: EngineCore) -> None:
    for _ in range(MAX_STEPS):
        if not core.scheduler.has_requests():
            return
        _, model_executed = core.step_fn()
        core.post_step(model_executed)
    raise EngineError(f"warm-up requests did not end within {MAX_STEPS} steps")
