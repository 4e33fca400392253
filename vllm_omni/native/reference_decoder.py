"""The definition of a decoder step: the layer stack out of the operations of `reference.py`.

```
h = embedding[token] or input                                     float32, as every intermediate result
per layer   x = rms_norm(h, input_norm)
            q, k, v = x q', x k', x v' (+ biases);  rms_norm of each head of q and k;  rope;  k, v into the cache
            y = attention over the cache, as stored;  each head times sigmoid(x head_gate')
            h = h + y o' (+ bias)
            x = rms_norm(h, post_norm)
            h = h + (activation(x gate') * (x up')) down'
result      rms_norm(h, final_norm)
```
Every product quantizes its input rows; norms of heads and gates are left out where the weights are.
"""

from collections.abc import Sequence

from vllm_omni.errors import EngineError
from vllm_omni.native.reference import (
    AttentionOptions,
    GroupedWeights,
    PagedCache,
    attention_ref,
    dequantize_rows_ref,
    gated_activation_ref,
    linear_ref,
    rms_norm_ref,
    rope_ref,
    sigmoid_ref,
    store_kv_ref,
)
from vllm_omni.native.spec import DecoderSpec, DecoderWeights, FloatArray, LayerWeights, StepRows

Weights = LayerWeights[GroupedWeights]


def decoder_ref(
    spec: DecoderSpec, weights: DecoderWeights[GroupedWeights], caches: Sequence[PagedCache], rows: StepRows
) -> FloatArray:
    """[rows, hidden] after the final norm. Stores the rows' keys and values into `caches`, one per layer."""
    hidden = _inputs(weights, rows)
    for layer, cache in zip(weights.layers, caches, strict=True):
        normed = rms_norm_ref(hidden, layer.input_norm, spec.norm_eps)
        hidden = hidden + _attention_block(spec, layer, cache, rows, normed)
        normed = rms_norm_ref(hidden, layer.post_norm, spec.norm_eps)
        gated = gated_activation_ref(linear_ref(normed, layer.gate), linear_ref(normed, layer.up), spec.activation)
        hidden = hidden + linear_ref(gated, layer.down)
    return rms_norm_ref(hidden, weights.final_norm, spec.norm_eps)


def _inputs(weights: DecoderWeights[GroupedWeights], rows: StepRows) -> FloatArray:
    if rows.token_ids is None:
        if rows.inputs is None:
            raise EngineError("a step needs token_ids or inputs; neither was given")
        return rows.inputs
    if weights.embedding is None:
        raise EngineError("token_ids were given, but the decoder has no embedding; give inputs")
    return dequantize_rows_ref(weights.embedding, rows.token_ids)


def _attention_block(
    spec: DecoderSpec, layer: Weights, cache: PagedCache, rows: StepRows, normed: FloatArray
) -> FloatArray:
    """[rows, hidden]: what attention adds to the residual stream."""
    q = _heads(_biased(linear_ref(normed, layer.q), layer.q_bias), spec.head_dim)
    k = _heads(_biased(linear_ref(normed, layer.k), layer.k_bias), spec.head_dim)
    v = _heads(_biased(linear_ref(normed, layer.v), layer.v_bias), spec.head_dim)
    q = _rotated(spec, layer, rows, q, layer.q_norm)
    k = _rotated(spec, layer, rows, k, layer.k_norm)
    store_kv_ref(cache, k, v, rows.slots[layer.kv_group])
    options = AttentionOptions(spec.attention_scale, layer.window, layer.kv_group)
    out = attention_ref(q, cache, rows, options)
    if layer.head_gate is not None:
        gate = sigmoid_ref(linear_ref(normed, layer.head_gate)).astype(out.dtype)
        out = out * gate[:, :, None]
    return _biased(linear_ref(out.reshape(len(out), -1), layer.o), layer.o_bias)


def _rotated(
    spec: DecoderSpec, layer: Weights, rows: StepRows, heads: FloatArray, norm: FloatArray | None
) -> FloatArray:
    if norm is not None:
        heads = rms_norm_ref(heads, norm, spec.norm_eps)
    return rope_ref(heads, rows.positions, layer.rope, spec.rope_style)


def _heads(x: FloatArray, head_dim: int) -> FloatArray:
    return x.reshape(len(x), -1, head_dim)


def _biased(x: FloatArray, bias: FloatArray | None) -> FloatArray:
    return x if bias is None else x + bias
