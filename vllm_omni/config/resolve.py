"""From a model and what the user gave to one `Deployment`: the only place where deploy files are chosen and layered.

Highest first: override of one stage, override of all, platform section, deploy file (over its bases), defaults.
"""

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from vllm_omni.config.artifact_fields import apply_artifact
from vllm_omni.config.deploy_config import PLATFORM_NAMES, DeployConfig, StageDeployConfig
from vllm_omni.config.deployment import Deployment
from vllm_omni.config.layers import LayeredTree, leaves
from vllm_omni.config.loader import DEPLOY_DIR, check_stage_maps, display_path, load_deploy_file, validate
from vllm_omni.config.model_facts import ModelFacts, read_model_facts
from vllm_omni.config.overrides import apply_overrides, apply_pipeline_wide
from vllm_omni.config.pipeline_registry import PipelineConfig, default_parsers, resolve_pipeline_config
from vllm_omni.errors import ConfigError, ProfileNotFoundError, nearest

logger = logging.getLogger(__name__)

# From the model's facts to stage fields with value and reason.
Derivation = Callable[[ModelFacts], Mapping[str, tuple[Any, str]]]


def resolve_deployment(
    model: str,
    *,
    deploy_config: str | Path | None = None,
    deploy_profile: str | None = None,
    overrides: Mapping[str, Any] | None = None,
    stage_overrides: Mapping[str, Mapping[str, Any]] | str | None = None,
    platform: str = "cpu",
    derive: Derivation | None = None,
) -> Deployment:
    """The effective configuration. Reads files only; takes well under a second.

    Args:
        model: Checkpoint directory, or hub id of a model in the local Hugging Face cache.
        deploy_config: Path of a deploy file, or name of a packaged one. Excludes `deploy_profile`.
        deploy_profile: Directory of `vllm_omni/deploy/` that holds a file for the model.
        overrides: Explicitly given flags or keywords, by field name; None values count as not given.
        stage_overrides: Stage id (as text) to fields; JSON text is read.
        platform: Which `platforms:` section applies.
        derive: Stage values that follow from model and machine, with their reasons; they fill keys that no layer sets.

    Raises:
        ProfileNotFoundError: The profile, or its file for this model, does not exist.
        ConfigError: Anything else that is wrong with model, file, flags, or their combination.
    """
    overrides = overrides or {}
    _check_choice(deploy_config, deploy_profile, platform)
    facts = read_model_facts(model)
    forced = overrides.get("pipeline")
    if deploy_config is not None:
        tree, files = load_deploy_file(find_deploy_file(deploy_config))
        forced = forced or tree.top.get("pipeline")
        pipeline = resolve_pipeline_config(facts, forced)
    else:
        pipeline = resolve_pipeline_config(facts, forced)
        tree, files = load_deploy_file(_packaged_file(facts, pipeline, deploy_profile))
    file = display_path(files[0])
    logger.info("deploy_file=%s model_type=%s pipeline=%s", file, facts.model_type, pipeline.model_type)
    _check_stage_ids(tree, pipeline, file)
    tree.apply_platform(platform)
    apply_overrides(tree, overrides, stage_overrides)
    apply_pipeline_wide(tree)
    apply_artifact(tree, facts)
    _fill_derived(tree, derive(facts) if derive is not None else {})
    config = _complete(tree, facts, pipeline)
    return Deployment(facts, pipeline, config, _provenance(config, tree), files, platform)


def _check_choice(deploy_config: str | Path | None, deploy_profile: str | None, platform: str) -> None:
    if deploy_config is not None and deploy_profile is not None:
        raise ConfigError(
            f"--deploy-config {str(deploy_config)!r} and --deploy-profile {deploy_profile!r} exclude each other; "
            "give one. To change a profile, write a deploy file whose `base_config` names the profile's file"
        )
    if platform not in PLATFORM_NAMES:
        raise ConfigError(f"platform {platform!r} is not known; {nearest(platform, PLATFORM_NAMES)}")


def find_deploy_file(deploy_config: str | Path) -> Path:
    """The file itself, else the packaged file of that name.

    Raises:
        ConfigError: Neither exists; the message lists the packaged files.
    """
    for candidate in (Path(deploy_config).expanduser(), DEPLOY_DIR / deploy_config):
        if candidate.is_file():
            return candidate
    packaged = sorted(str(file.relative_to(DEPLOY_DIR)) for file in DEPLOY_DIR.rglob("*.yaml"))
    raise ConfigError(
        f"--deploy-config {str(deploy_config)!r} does not exist; accepted: the path of a YAML file, "
        f"or a packaged file: {', '.join(packaged)}"
    )


def list_profiles() -> list[str]:
    """Names that `--deploy-profile` accepts."""
    return sorted(entry.name for entry in DEPLOY_DIR.iterdir() if entry.is_dir() and any(entry.glob("*.yaml")))


def _packaged_file(facts: ModelFacts, pipeline: PipelineConfig, profile: str | None) -> Path:
    """The pipeline's file, or the profile's file for the model type, else for the pipeline."""
    if profile is None:
        return DEPLOY_DIR / pipeline.default_deploy_config_name
    if profile not in list_profiles():
        raise ProfileNotFoundError(
            f"--deploy-profile {profile!r} does not exist; accepted: {', '.join(list_profiles())}. "
            "For a file of your own use --deploy-config"
        )
    names = (f"{facts.model_type}.yaml", pipeline.default_deploy_config_name)
    for name in names:
        if (DEPLOY_DIR / profile / name).is_file():
            return DEPLOY_DIR / profile / name
    present = sorted(file.name for file in (DEPLOY_DIR / profile).glob("*.yaml"))
    raise ProfileNotFoundError(
        f"--deploy-profile {profile!r} has no file for model type {facts.model_type!r} (looked for "
        f"{' and '.join(names)}); it has: {', '.join(present)}. Write one and give it with --deploy-config"
    )


def _complete(tree: LayeredTree, facts: ModelFacts, pipeline: PipelineConfig) -> DeployConfig:
    """The typed config, with what follows from the model filled in and all cross-checks passed."""
    if len(pipeline.stages) == 1:
        tree.set_top_field("async_chunk", False, f"pipeline {pipeline.model_type} has one stage")
    _fill_parsers(tree, facts, pipeline)
    config = validate(tree.to_mapping(), tree.source_of)
    if config.connectors and len(pipeline.stages) == 1:
        raise ConfigError(
            f"connectors {sorted(config.connectors)} ({tree.source_of('connectors')}): pipeline "
            f"{pipeline.model_type!r} has one stage and nothing to connect; remove the key"
        )
    for stage in config.stages:
        check_stage_maps(tree.stages[stage.stage_id], f"stages[{stage.stage_id}]", tree.source_of)
        _check_batch(stage, tree)
        _check_length(stage, tree, facts)
    return config


def _check_stage_ids(tree: LayeredTree, pipeline: PipelineConfig, file: str) -> None:
    expected = sorted(stage.stage_id for stage in pipeline.stages)
    if sorted(tree.stages) != expected:
        raise ConfigError(
            f"{file}: stage ids are {sorted(tree.stages)}; accepted: those of pipeline "
            f"{pipeline.model_type!r}, {expected}. "
            "Add the missing entries (or a base_config that has them) and remove others"
        )


def _fill_parsers(tree: LayeredTree, facts: ModelFacts, pipeline: PipelineConfig) -> None:
    """Chooses the parsers of stages that take text where no layer names one; an explicit null stays."""
    source = "chat template" if facts.chat_template else f"model type {facts.model_type}"
    names = zip(("tool_call_parser", "reasoning_parser"), default_parsers(facts), strict=True)
    for field, name in names:
        for stage_id in [stage.stage_id for stage in pipeline.stages if stage.owns_tokenizer]:
            if field not in tree.stages[stage_id] and name is not None:
                tree.set_stage_field(stage_id, field, name, source)


def _fill_derived(tree: LayeredTree, derived: Mapping[str, tuple[Any, str]]) -> None:
    for field, (value, source) in derived.items():
        for stage_id, stage in tree.stages.items():
            if field not in stage:
                tree.set_stage_field(stage_id, field, value, source)


def _check_batch(stage: StageDeployConfig, tree: LayeredTree) -> None:
    tokens, seqs = stage.max_num_batched_tokens, stage.max_num_seqs
    if tokens is not None and seqs is not None and tokens < seqs:
        path = f"stages[{stage.stage_id}]."
        raise ConfigError(
            f"{path}max_num_batched_tokens is {tokens} ({tree.source_of(path + 'max_num_batched_tokens')}), below "
            f"max_num_seqs {seqs} ({tree.source_of(path + 'max_num_seqs')}); accepted: at least one token for each "
            "request. Raise the first or lower the second"
        )


def _check_length(stage: StageDeployConfig, tree: LayeredTree, facts: ModelFacts) -> None:
    limit = facts.max_position_embeddings
    if stage.max_model_len is None or limit is None or stage.hf_overrides or stage.max_model_len <= limit:
        return
    path = f"stages[{stage.stage_id}].max_model_len"
    raise ConfigError(
        f"{path} is {stage.max_model_len} ({tree.source_of(path)}), but {facts.path / 'config.json'} allows {limit} "
        f"positions; accepted: 1 to {limit}. If the model is meant to go further, state how in hf_overrides"
    )


def _provenance(config: DeployConfig, tree: LayeredTree) -> dict[str, str]:
    """A source for every leaf of the effective tree."""
    values = config.model_dump(exclude={"stages", "base_config", "platforms"})
    paths = [path for path, _ in leaves(values, "")]
    for stage in config.stages:
        paths += [path for path, _ in leaves(stage.model_dump(), f"stages[{stage.stage_id}]")]
    return {path: tree.source_of(path) for path in paths}
