"""The decoder stack in torch operations, for machines without the native library.

The same numbers as the native core: weights as their codes stand for them, activations rounded to int8 per group, the
same cache. So both paths answer alike, up to the order of float32 sums. Written to be read, not to be fast; the weights
are held unpacked in float32, eight times the size of 4-bit ones.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.functional import gelu, pad, scaled_dot_product_attention, silu

from vllm_omni.model_executor.models.decoder.rope import RopeAngles
from vllm_omni.model_executor.models.decoder.spec_mapping import DecoderShape
from vllm_omni.model_executor.models.decoder.step import DecoderStep, GroupRows
from vllm_omni.model_executor.models.decoder.weights import MappedMatrix, placed_weights
from vllm_omni.native.spec import CHUNK_KEYS, SMALLEST_STEP, DecoderWeights, LayerWeights
from vllm_omni.quantization.packing import dequantize, unpack

MAX_CODE = 127.0


@dataclass(frozen=True)
class TorchMatrix:
    """[rows, columns] float32 weights, and the group size that activations are rounded in."""

    weight: torch.Tensor
    group_size: int

    @classmethod
    def of(cls, mapped: MappedMatrix) -> "TorchMatrix":
        """The weights of a packed matrix, a copy."""
        form = mapped.format
        codes = unpack(mapped.data, form.rows, form.columns, form.bits, form.group_size)
        return cls(torch.from_numpy(dequantize(codes)), form.group_size)

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """[n, rows] = x [n, columns], rounded per group, times the weights transposed."""
        return round_activations(x, self.group_size) @ self.weight.T


def round_activations(x: torch.Tensor, group_size: int) -> torch.Tensor:
    """The values that the int8 codes of `x` [n, columns] stand for."""
    columns = x.shape[1]
    grouped = pad(x, (0, -columns % group_size)).unflatten(1, (-1, group_size))
    codes, steps = codes_of(grouped)
    return (codes * steps).flatten(1)[:, :columns]


def rms_norm(x: torch.Tensor, weight: np.ndarray, eps: float) -> torch.Tensor:
    """`x` over its root mean square in the last dimension, times the weight."""
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps) * torch.from_numpy(weight)


def rotate(x: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """Rotates the leading dimensions of each head; partners are half the rotated size apart.

    Args:
        x: [rows, heads, head_dim].
        cos_sin: [rows, rotary_dim], cosines then sines.
    """
    cos, sin = cos_sin[:, None].chunk(2, dim=-1)
    first, second = x[..., : cos_sin.shape[1]].chunk(2, dim=-1)
    rest = x[..., cos_sin.shape[1] :]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)


class PagedCache:
    """One layer's pages, as `native/spec.py` draws them.

    Args:
        pages: [blocks, kv heads, tokens of a block, elements of a token] bfloat16 or int8.
        head_dim: Size of a head.
    """

    def __init__(self, pages: torch.Tensor, head_dim: int):
        self.block_size = pages.shape[2]
        self.is_int8 = pages.dtype == torch.int8
        flat = pages.view(*pages.shape[:2], -1)
        size = self.block_size * head_dim
        key_shape = (head_dim // 4, CHUNK_KEYS, 4) if self.is_int8 else (head_dim, CHUNK_KEYS)
        self.keys = flat[..., :size].unflatten(2, (-1, *key_shape))
        self.values = flat[..., size : 2 * size].unflatten(2, (self.block_size, head_dim))
        if self.is_int8:
            self.keys = self.keys.view(torch.uint8)
            self.scales = flat[..., 2 * size :].view(torch.float32).unflatten(2, (2, self.block_size))

    def store(self, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
        """Writes [rows, kv heads, head_dim] keys and values to their slots; negative slots are left out."""
        stored = slots >= 0
        keys, values = keys[stored], values[stored]
        blocks, places = slots[stored] // self.block_size, slots[stored] % self.block_size
        if self.is_int8:
            keys, key_steps = codes_of(keys)
            values, value_steps = codes_of(values)
            self.scales[blocks, :, :, places] = torch.cat([key_steps, value_steps], dim=2)
            keys = (keys + MAX_CODE).unflatten(2, (-1, 4))
        self.keys[blocks, :, places // CHUNK_KEYS, :, places % CHUNK_KEYS] = keys.to(self.keys.dtype)
        self.values[blocks, :, places] = values.to(self.values.dtype)

    def load(self, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of whole blocks, each [kv heads, tokens, head_dim] float32."""
        keys, values = self.keys[blocks].float(), self.values[blocks].float()
        if self.is_int8:
            steps = self.scales[blocks][..., None]
            keys = (keys - MAX_CODE).transpose(3, 4).flatten(4).flatten(2, 3) * steps[:, :, 0]
            values = values * steps[:, :, 1]
        else:
            keys = keys.transpose(3, 4).flatten(2, 3)
        return keys.transpose(0, 1).flatten(1, 2), values.transpose(0, 1).flatten(1, 2)


def codes_of(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of `x` [.., D] in 8 bits, as float32, and their steps [.., 1]."""
    steps = x.abs().amax(dim=-1, keepdim=True) / MAX_CODE
    steps = torch.where(steps < float(SMALLEST_STEP), 0.0, steps)
    return torch.where(steps > 0, torch.round(x / steps), 0.0), steps


class TorchPath:
    """The stack over unpacked weights.

    Args:
        shape: The model's numbers.
        weights: All weights but the output layer.
        head: The output layer.
    """

    def __init__(self, shape: DecoderShape, weights: DecoderWeights[TorchMatrix], head: TorchMatrix):
        self._shape = shape
        self._weights = weights
        self._head = head
        self._caches: tuple[PagedCache, ...] = ()
        activations: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"silu": silu, "gelu": gelu}
        self._activation = activations[shape.activation]

    def bind_cache(
        self, pages: Sequence[torch.Tensor], groups: Sequence[int], angles: RopeAngles, num_positions: int
    ) -> None:
        self._weights = placed_weights(self._weights, angles.table(num_positions), groups)
        self._caches = tuple(PagedCache(each, self._shape.head_dim) for each in pages)

    def step(self, step: DecoderStep, hidden: torch.Tensor) -> None:
        if step.inputs is not None:
            x = step.inputs
        else:
            assert step.token_ids is not None
            x = self.embed(step.token_ids)
        for layer, cache in zip(self._weights.layers, self._caches, strict=True):
            x = self._layer(layer, cache, x, step)
        hidden.copy_(rms_norm(x, self._weights.final_norm, self._shape.norm_eps))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._head.multiply(hidden)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        assert self._weights.embedding is not None
        return self._weights.embedding.weight[token_ids.long()]

    def close(self) -> None:
        self._caches = ()

    def _layer(
        self, layer: LayerWeights[TorchMatrix], cache: PagedCache, x: torch.Tensor, step: DecoderStep
    ) -> torch.Tensor:
        eps = self._shape.norm_eps
        queries, keys, values = self._project(layer, rms_norm(x, layer.input_norm, eps), step.positions)
        group = step.groups[layer.kv_group]
        cache.store(keys, values, group.slots)
        attended = self._attention(queries, cache, group, layer.window)
        x = x + _biased(layer.o.multiply(attended.flatten(1)), layer.o_bias)
        normed = rms_norm(x, layer.post_norm, eps)
        return x + layer.down.multiply(self._activation(layer.gate.multiply(normed)) * layer.up.multiply(normed))

    def _attention(self, queries: torch.Tensor, cache: PagedCache, group: GroupRows, window: int) -> torch.Tensor:
        out = torch.empty_like(queries)
        starts, lengths = group.query_start.tolist(), group.seq_lens.tolist()
        for seq, length in enumerate(lengths):
            rows = slice(starts[seq], starts[seq + 1])
            out[rows] = self._attend(queries[rows], cache, group.block_table[seq], length, window)
        return out

    def _project(
        self, layer: LayerWeights[TorchMatrix], x: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values of all rows by head, normalised and rotated."""
        head_dim, eps = self._shape.head_dim, self._shape.norm_eps
        queries = _biased(layer.q.multiply(x), layer.q_bias).unflatten(1, (-1, head_dim))
        keys = _biased(layer.k.multiply(x), layer.k_bias).unflatten(1, (-1, head_dim))
        values = _biased(layer.v.multiply(x), layer.v_bias).unflatten(1, (-1, head_dim))
        if layer.q_norm is not None and layer.k_norm is not None:
            queries, keys = rms_norm(queries, layer.q_norm, eps), rms_norm(keys, layer.k_norm, eps)
        cos_sin = torch.from_numpy(layer.rope)[positions]
        return rotate(queries, cos_sin), rotate(keys, cos_sin), values

    def _attend(
        self, queries: torch.Tensor, cache: PagedCache, table: torch.Tensor, length: int, window: int
    ) -> torch.Tensor:
        """Attention of the last rows of one sequence, [rows, heads, head_dim].

        Blocks before the window are not read: vLLM may have given them to another sequence.
        """
        num_rows = len(queries)
        first_key = max(0, length - num_rows + 1 - window) if window else 0
        first_block = first_key // cache.block_size
        keys, values = cache.load(table[first_block : -(-length // cache.block_size)])
        places = torch.arange(first_block * cache.block_size, length)
        keys, values = keys[:, : len(places)], values[:, : len(places)]
        distance = torch.arange(length - num_rows, length)[:, None] - places
        seen = (distance >= 0) & (distance < (window or length))
        if cache.is_int8:
            codes, steps = codes_of(queries)
            queries = codes * steps
        out = scaled_dot_product_attention(
            queries.transpose(0, 1), keys, values, seen, scale=self._shape.attention_scale, enable_gqa=True
        )
        return out.transpose(0, 1)


def _biased(x: torch.Tensor, bias: np.ndarray | None) -> torch.Tensor:
    return x if bias is None else x + torch.from_numpy(bias)
