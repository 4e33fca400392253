"""Which checkpoint an engine runs: the one that was given, or its packed form, made once and kept in the cache.

`quantization: auto` (the edge profile's) packs what can be packed and otherwise serves what was given, with a line that
says why. `quantization: omni_int4` packs or is an error; `none` serves what was given.
"""

import logging
from collections.abc import Callable

from vllm_omni.config.artifact_fields import ARTIFACT_ONLY, AUTO, PACKING, refused_values
from vllm_omni.config.deployment import Deployment
from vllm_omni.config.model_facts import read_json
from vllm_omni.entrypoints.byte_progress import byte_progress
from vllm_omni.errors import ConfigError, WeightError
from vllm_omni.model_executor.models.decoder.spec_mapping import decodable_shape
from vllm_omni.native.library import native_status
from vllm_omni.quantization.artifact import SOURCE_ARCHITECTURE_KEY
from vllm_omni.quantization.artifact_cache import cached_artifact

logger = logging.getLogger("vllm_omni.quantization")


def packed_deployment(given: Deployment, resolve: Callable[[str], Deployment]) -> Deployment:
    """The deployment to run.

    Args:
        given: Of the checkpoint that was given, whose weights were checked.
        resolve: Gives the deployment of another checkpoint with the same settings.

    Raises:
        ConfigError: `quantization: omni_int4`, and the checkpoint cannot be packed or the cache not be written.
    """
    wanted = given.stage(0).quantization
    if wanted not in PACKING or given.facts.quant_method is not None:
        return given
    try:
        return _packed(given, resolve)
    except (ConfigError, WeightError) as error:
        path = given.facts.path
        if wanted == AUTO and not _needs_artifact(given):
            logger.warning("event=weights_not_packed model=%s reason=%s", path, error)
            return given
        source = given.provenance["stages[0].quantization"]
        raise ConfigError(
            f"stages[0].quantization is {wanted!r} ({source}); {path} cannot be packed: {error}"
        ) from error


def _needs_artifact(given: Deployment) -> bool:
    """Whether a stage has a value that only an artifact can have, so that nothing else can be served."""
    return any(getattr(given.stage(0), field) in values for field, values in ARTIFACT_ONLY.items())


def _packed(given: Deployment, resolve: Callable[[str], Deployment]) -> Deployment:
    from vllm_omni.quantization.quantize_settings import QuantizeSettings

    status = native_status()
    if status.isa is None:
        raise ConfigError(f"packed weights are slow without the native core: {status.reason}")
    _require_packable(given)
    artifact = cached_artifact(given.facts.path, QuantizeSettings(), byte_progress)
    return resolve(str(artifact))


def _require_packable(given: Deployment) -> None:
    """Raises ConfigError where the decoder stack cannot compute the model, before anything is packed."""
    config = read_json(given.facts.path / "config.json", required=True)
    architectures = given.facts.architectures
    decodable_shape({**config, SOURCE_ARCHITECTURE_KEY: architectures[0] if architectures else None})
    _require_artifact_values(given)


def _require_artifact_values(given: Deployment) -> None:
    """Raises ConfigError for settings that would be refused once the weights are packed."""
    stage = given.stage(0)
    values = {**(stage.engine_extras or {}), **stage.model_dump()}
    for field, value, accepted in refused_values(values):
        source = given.provenance.get(f"stages[0].{field}", "engine_extras")
        raise ConfigError(f"{field} {value!r} is asked for ({source}); packed weights have {accepted}")
