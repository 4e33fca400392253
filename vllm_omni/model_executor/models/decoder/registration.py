"""Makes vLLM know the decoder's model class and its loader. Imports vLLM's model code."""

from vllm.model_executor.model_loader import _LOAD_FORMAT_TO_MODEL_LOADER, register_model_loader
from vllm.model_executor.models.registry import ModelRegistry

from vllm_omni.model_executor.models.decoder.loader import ArtifactLoader
from vllm_omni.model_executor.models.decoder.model import OmniDecoderForCausalLM
from vllm_omni.quantization.artifact import ARCHITECTURE
from vllm_omni.quantization.packed_format import QUANT_METHOD


def register_decoder() -> None:
    """Registers class and loader. Re-entrant."""
    if _LOAD_FORMAT_TO_MODEL_LOADER.get(QUANT_METHOD) is not ArtifactLoader:
        register_model_loader(QUANT_METHOD)(ArtifactLoader)
    ModelRegistry.register_model(ARCHITECTURE, OmniDecoderForCausalLM)
