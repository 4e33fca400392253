"""vLLM's model loader for artifact directories: the weight files are mapped, not read through an iterator."""

from pathlib import Path

from torch import nn
from vllm.config import ModelConfig, VllmConfig
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.model_executor.model_loader.utils import initialize_model

from vllm_omni.model_executor.models.decoder.model import OmniDecoderForCausalLM


class ArtifactLoader(BaseModelLoader):
    """Constructs the model and has it map its artifact; nothing is converted afterwards."""

    def download_model(self, model_config: ModelConfig) -> None:
        """Nothing to do: an artifact is a local directory."""

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        assert isinstance(model, OmniDecoderForCausalLM)
        model.load_artifact(Path(model_config.model))

    def load_model(self, vllm_config: VllmConfig, model_config: ModelConfig, prefix: str = "") -> nn.Module:
        model = initialize_model(vllm_config=vllm_config, model_config=model_config, prefix=prefix)
        self.load_weights(model, model_config)
        return model.eval()
