"""Quantizes a model's layers in order, each with the activations that it meets.

With `gptq` a layer's inputs come from the quantized layers before it, so that later layers make up for earlier
errors; with `rtn` they come from the original ones.
"""

from collections.abc import Callable, Iterator, Mapping, Set

import numpy as np

from vllm_omni.errors import WeightError
from vllm_omni.quantization.artifact_writer import ArtifactFile
from vllm_omni.quantization.calibration import SHARED_INPUTS, LayerRunner
from vllm_omni.quantization.gptq import prepare_compensation, quantize_gptq
from vllm_omni.quantization.grid_search import quantize_rtn
from vllm_omni.quantization.packed_format import MatrixFormat
from vllm_omni.quantization.packing import QuantizedMatrix, dequantize, pack, unpack
from vllm_omni.quantization.panels import row_panels
from vllm_omni.quantization.source_tensors import TensorSource
from vllm_omni.quantization.tensor_table import TIED_NAME

NORM_NAME = "model.norm.weight"
Quantizer = Callable[[np.ndarray], QuantizedMatrix]


class CalibratedLayers:
    """The layers of one source.

    A generator's consumer writes each matrix before it asks for the next: quantized layers are read back from the
    file, also those of an earlier run.
    """

    def __init__(self, source: TensorSource, matrices: Mapping[str, MatrixFormat], method: str, file: ArtifactFile):
        self._source = source
        self._matrices = matrices
        self._is_gptq = method == "gptq"
        self._file = file

    def pieces(
        self, runner: LayerRunner, names: Set[str], done: Set[str]
    ) -> Iterator[tuple[str, Iterator[np.ndarray]]]:
        """Name and packed panels of each matrix that is not done.

        Args:
            runner: A new one.
            names: Matrices to quantize by activations.
            done: Those that are on disk; grows meanwhile.
        """
        for layer in range(self._num_layers_to_run(names - done)):
            weights = self._weights(layer)
            pending = [name for name in names - done if _layer_number(name) == layer]
            moments = runner.collect(layer, weights) if pending else {}
            for first, members in SHARED_INPUTS.items():
                shared = [f"model.layers.{layer}.{member}.weight" for member in members]
                for name, quantizer in self._quantizers([n for n in shared if n in pending], moments.get(first)):
                    yield name, self._panels(name, quantizer)
            if self._is_gptq:
                runner.advance(layer, self._requantized(layer, weights))
            else:
                runner.advance(layer, None if pending else weights)
        if TIED_NAME in names - done:
            norm = self._source.rows(NORM_NAME, 0, self._source.tensors[NORM_NAME].entry.shape[0])
            for name, quantizer in self._quantizers([TIED_NAME], runner.finish(norm)):
                yield name, self._panels(name, quantizer)

    def _num_layers_to_run(self, pending: Set[str]) -> int:
        """Layers up to the last that is pending; all of them where the output projection is."""
        return 1 + max(
            (_layer_number(name) for name in (self._matrices if TIED_NAME in pending else pending)), default=-1
        )

    def _quantizers(self, names: list[str], moments: np.ndarray | None) -> Iterator[tuple[str, Quantizer]]:
        """A function for each of the matrices that share an input."""
        if not names:
            return
        assert moments is not None, names
        compensation = prepare_compensation(moments) if self._is_gptq else None
        for name in names:
            bits, group_size = self._matrices[name].bits, self._matrices[name].group_size
            if compensation is None:
                yield name, lambda rows, b=bits, g=group_size: quantize_rtn(rows, b, g, moments)  # type: ignore[misc]
            else:
                yield name, lambda rows, b=bits, g=group_size: quantize_gptq(rows, b, g, compensation)  # type: ignore[misc]

    def _panels(self, name: str, quantizer: Quantizer) -> Iterator[np.ndarray]:
        each = self._matrices[name]
        for begin, end in row_panels(each.rows, each.columns):
            try:
                yield pack(quantizer(self._source.rows(name, begin, end)))
            except WeightError as error:
                raise WeightError(f"{self._source.path}: tensor {name}: {error}") from error

    def _weights(self, layer: int) -> dict[str, np.ndarray]:
        """Name within the layer to float32, all of its tensors."""
        prefix = f"model.layers.{layer}."
        return {
            name.removeprefix(prefix): self._source.rows(name, 0, tensor.entry.shape[0])
            for name, tensor in self._source.tensors.items()
            if name.startswith(prefix) and name.endswith((".weight", ".bias"))
        }

    def _requantized(self, layer: int, weights: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The same with the matrices as they are in the file."""
        result = dict(weights)
        for short_name in weights:
            name = f"model.layers.{layer}.{short_name}"
            if each := self._matrices.get(name):
                packed = self._file.read(name)
                result[short_name] = dequantize(unpack(packed, each.rows, each.columns, each.bits, each.group_size))
        return result


def _layer_number(name: str) -> int:
    """The layer of a tensor; -1 outside of layers."""
    words = name.split(".")
    return int(words[2]) if words[:2] == ["model", "layers"] else -1
