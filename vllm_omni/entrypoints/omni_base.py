"""What `AsyncOmni`, `Omni` and the server share: from keywords to a running orchestrator.

`prepare` is light and finds every mistake in configuration and checkpoint before torch or vLLM is imported.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_omni import envs
from vllm_omni.config.artifact_fields import QUANT_METHOD
from vllm_omni.config.deploy_config import StageDeployConfig
from vllm_omni.config.deployment import Deployment
from vllm_omni.config.model_facts import ModelFacts, read_json
from vllm_omni.config.resolve import resolve_deployment
from vllm_omni.edge.compute_dtype import choose_dtype
from vllm_omni.edge.hardware_probe import probe_hardware
from vllm_omni.edge.memory import paused_collection, release_freed_memory
from vllm_omni.entrypoints.packed_model import packed_deployment
from vllm_omni.errors import ConfigError
from vllm_omni.model_executor.models.decoder.spec_mapping import decodable_shape
from vllm_omni.platforms.cpu import plugin
from vllm_omni.platforms.cpu.quiet import silence_inapplicable_messages
from vllm_omni.platforms.cpu.shims.eager_import import eager_import
from vllm_omni.platforms.cpu.threads import configure_threads
from vllm_omni.quantization.checkpoint import check_checkpoint

if TYPE_CHECKING:
    from vllm_omni.engine.orchestrator import Orchestrator

logger = logging.getLogger("vllm_omni.engine")

# Name of the entry points in setup.py.
PLUGIN_NAME = "vllm_omni"
# vLLM's CompilationMode.NONE.
NO_COMPILATION = 0
SUPERSEDED_KEYWORDS = ("stage_configs_path", "stage_configs")
LORA_KEYWORDS = ("enable_lora", "lora_modules", "max_loras", "max_lora_rank")


def prepare(
    model: str,
    *,
    deploy_config: str | Path | None = None,
    deploy_profile: str | None = None,
    stage_overrides: Mapping[str, Mapping[str, Any]] | str | None = None,
    overrides: Mapping[str, Any] | None = None,
    check_weights: bool = True,
) -> Deployment:
    """The effective deployment of `model`, checked against its checkpoint. Loads neither torch nor vLLM.

    Args:
        model: Checkpoint directory, or an id that the local Hugging Face cache holds.
        deploy_config: Deploy YAML: a path, or the name of a packaged file.
        deploy_profile: Name of a packaged profile; exclusive with `deploy_config`.
        stage_overrides: Per-stage values by stage id.
        overrides: Values for every stage, and top-level or orchestrator keys.
        check_weights: Whether the weight files are verified.

    Raises:
        ConfigError: A name, value, file or combination is wrong.
        WeightError: The checkpoint is damaged or incomplete.
    """
    _check_plugins()
    given = dict(overrides or {})
    for name in SUPERSEDED_KEYWORDS:
        if name in given:
            raise ConfigError(f"{name} is superseded; give a deploy YAML as deploy_config, or deploy_profile")
    for name in LORA_KEYWORDS:
        if given.get(name):
            raise ConfigError(
                f"{name}={given[name]!r}: LoRA adapters are not supported; merge the adapter and serve that"
            )

    def resolve(path: str) -> Deployment:
        return resolve_deployment(
            path,
            deploy_config=deploy_config,
            deploy_profile=deploy_profile,
            overrides=given,
            stage_overrides=stage_overrides,
            derive=derive_from_hardware,
        )

    deployment = resolve(model)
    return _checked(deployment, resolve) if check_weights else deployment


def _checked(given: Deployment, resolve: Callable[[str], Deployment]) -> Deployment:
    """`given` with sound weights, or the deployment of its packed form."""
    _check_weights(given)
    packed = packed_deployment(given, resolve)
    if packed is not given:
        _check_weights(packed)
    return packed


def _check_plugins() -> None:
    plugins = envs.VLLM_PLUGINS
    if plugins is not None and PLUGIN_NAME not in plugins.split(","):
        raise ConfigError(
            f"environment variable VLLM_PLUGINS={plugins!r} keeps vLLM from loading this package; "
            f"add {PLUGIN_NAME!r} to the list, or unset the variable"
        )


def derive_from_hardware(facts: ModelFacts) -> Mapping[str, tuple[Any, str]]:
    """Stage fields that follow from the machine, with their reasons."""
    choice = choose_dtype(facts.dtype, probe_hardware())
    return {} if choice is None else {"dtype": choice}


def _check_weights(deployment: Deployment) -> None:
    path = deployment.facts.path
    report = check_checkpoint(path)
    logger.info(
        "event=checkpoint_checked path=%s total_bytes=%d num_tensors=%d verified_hash=%s",
        path,
        report.total_bytes,
        report.num_tensors,
        report.verified_hash,
    )
    if deployment.facts.quant_method == QUANT_METHOD:
        decodable_shape(read_json(path / "config.json", required=True))


@dataclass(frozen=True)
class StartOptions:
    """How an engine is started, apart from its deployment.

    Attributes:
        log_stats: Collect what `/metrics` shows.
        log_requests: Log arrival and end of each request.
        release_memory: Give freed memory back at the end; False where the caller loads more and does it later.
        while_loading: Called while the weights load in another thread; for work that would otherwise come after.
    """

    log_stats: bool = False
    log_requests: bool = False
    release_memory: bool = True
    while_loading: Callable[[], Any] | None = None


def start_orchestrator(deployment: Deployment, options: StartOptions) -> "Orchestrator":
    """Starts the pipeline of `deployment` in this process and blocks until it can serve.

    Raises:
        EngineError: It could not start, or not in time; nothing is left running.
    """
    num_threads = {stage.num_threads for stage in deployment.config.stages}
    configure_threads(max((count for count in num_threads if count is not None), default=None))
    plugin.activate(deployment.facts.architectures)
    # The executor runs in this process: vLLM must neither spawn workers nor expect them.
    envs.export({"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": envs.VLLM_LOGGING_LEVEL})

    with paused_collection(), eager_import(compiles_nothing=all(map(compiles_nothing, deployment.config.stages))):
        orchestrator = _start_stages(deployment, options)
    if options.release_memory and envs.VLLM_OMNI_CPU_RELEASE_MEMORY:
        release_freed_memory()
    return orchestrator


def compiles_nothing(stage: StageDeployConfig) -> bool:
    """Whether a stage's configuration rules torch.compile out."""
    return bool(stage.enforce_eager) or (stage.compilation_config or {}).get("mode") == NO_COMPILATION


def _start_stages(deployment: Deployment, options: StartOptions) -> "Orchestrator":
    from vllm_omni.engine.ar_stage import ARStage
    from vllm_omni.engine.orchestrator import Orchestrator
    from vllm_omni.platforms.cpu.platform import adopt_current_platform

    adopt_current_platform()
    silence_inapplicable_messages()
    limits = deployment.config.orchestrator
    stages = [
        ARStage(
            stage.stage_id,
            str(deployment.facts.path),
            stage,
            log_stats=options.log_stats,
            log_requests=options.log_requests,
            while_loading=options.while_loading,
        )
        for stage in deployment.config.stages
    ]
    orchestrator = Orchestrator(stages, max_requests=limits.max_queued_requests, retry_after_s=limits.retry_after_s)
    orchestrator.start(stage_timeout_s=limits.stage_init_timeout, total_timeout_s=limits.init_timeout)
    orchestrator.max_requests += min(stage.max_num_seqs for stage in stages)
    return orchestrator
