"""The C ABI of `csrc/include/omni_native.h` for ctypes: structures, functions, constants.

Pointers are plain addresses (`c_void_p`): an integer of numpy or of a tensor's `data_ptr()` goes in as it is.
`tests/unit/native/test_structures.py` compares this file with the header.
"""

import ctypes
from collections.abc import Mapping
from ctypes import POINTER, c_char_p, c_float, c_int32, c_int64, c_uint64, c_void_p
from types import MappingProxyType
from typing import Any

ABI_VERSION = 2

OK = 0
ERROR_ARGUMENT = -1
ERROR_ISA = -2
ERROR_MEMORY = -3
ERROR_INTERNAL = -4


class MatrixStruct(ctypes.Structure):
    """`omni_matrix`: a packed matrix; an address of None says that there is none."""

    _fields_ = [
        ("data", c_void_p),
        ("rows", c_int64),
        ("columns", c_int64),
        ("bits", c_int32),
        ("group_size", c_int32),
    ]


class LayerStruct(ctypes.Structure):
    """`omni_layer`: weights and per-layer numbers of one decoder layer."""

    _fields_ = [
        ("q", MatrixStruct),
        ("k", MatrixStruct),
        ("v", MatrixStruct),
        ("o", MatrixStruct),
        ("gate", MatrixStruct),
        ("up", MatrixStruct),
        ("down", MatrixStruct),
        ("head_gate", MatrixStruct),
        ("input_norm", c_void_p),
        ("post_norm", c_void_p),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("q_bias", c_void_p),
        ("k_bias", c_void_p),
        ("v_bias", c_void_p),
        ("o_bias", c_void_p),
        ("rope", c_void_p),
        ("rotary_dim", c_int32),
        ("window", c_int32),
        ("kv_group", c_int32),
    ]


class DecoderStruct(ctypes.Structure):
    """`omni_decoder_spec`: what all layers share."""

    _fields_ = [
        ("num_layers", c_int32),
        ("hidden_size", c_int32),
        ("intermediate_size", c_int32),
        ("num_heads", c_int32),
        ("num_kv_heads", c_int32),
        ("head_dim", c_int32),
        ("activation", c_int32),
        ("rope_style", c_int32),
        ("num_kv_groups", c_int32),
        ("max_position", c_int32),
        ("norm_eps", c_float),
        ("attention_scale", c_float),
        ("final_norm", c_void_p),
        ("embedding", MatrixStruct),
    ]


class KvCacheStruct(ctypes.Structure):
    """`omni_kv_cache`: where one layer's keys and values lie; strides in bytes."""

    _fields_ = [
        ("data", c_void_p),
        ("num_blocks", c_int64),
        ("block_stride", c_int64),
        ("head_stride", c_int64),
        ("block_size", c_int32),
        ("kind", c_int32),
    ]


class BatchStruct(ctypes.Structure):
    """`omni_batch`: the rows of one step."""

    _fields_ = [
        ("num_rows", c_int32),
        ("num_seqs", c_int32),
        ("num_groups", c_int32),
        ("token_ids", c_void_p),
        ("inputs", c_void_p),
        ("positions", c_void_p),
        ("query_start", c_void_p),
        ("seq_lens", c_void_p),
        ("slots", c_void_p),
        ("block_tables", c_void_p),
        ("block_table_strides", c_void_p),
        ("hidden", c_void_p),
    ]


class SamplingStruct(ctypes.Structure):
    """`omni_sampling`: how one row of logits becomes a token."""

    _fields_ = [
        ("temperature", c_float),
        ("top_p", c_float),
        ("min_p", c_float),
        ("top_k", c_int32),
        ("seed", c_uint64),
        ("step", c_uint64),
    ]


STRUCTURES: Mapping[str, type[ctypes.Structure]] = MappingProxyType(
    {
        "omni_matrix": MatrixStruct,
        "omni_layer": LayerStruct,
        "omni_decoder_spec": DecoderStruct,
        "omni_kv_cache": KvCacheStruct,
        "omni_batch": BatchStruct,
        "omni_sampling": SamplingStruct,
    }
)

_MATRIX = POINTER(MatrixStruct)
_CACHE = POINTER(KvCacheStruct)
_BATCH = POINTER(BatchStruct)
_SAMPLING = POINTER(SamplingStruct)

# Name to (result, parameters).
FUNCTIONS: Mapping[str, tuple[Any, tuple[Any, ...]]] = MappingProxyType(
    {
        "omni_abi_version": (c_int32, ()),
        "omni_numerics_version": (c_int32, ()),
        "omni_last_error": (c_char_p, ()),
        "omni_compiled_isas": (c_char_p, ()),
        "omni_runnable_isas": (c_char_p, ()),
        "omni_team_create": (c_void_p, (c_int32, c_char_p, c_int32)),
        "omni_team_destroy": (None, (c_void_p,)),
        "omni_team_isa": (c_char_p, (c_void_p,)),
        "omni_linear": (c_int32, (c_void_p, _MATRIX, c_void_p, c_int64, c_void_p)),
        "omni_dequantize_rows": (c_int32, (c_void_p, _MATRIX, c_void_p, c_int64, c_void_p)),
        "omni_dequantize_panel": (c_int32, (c_void_p, _MATRIX, c_int64, c_int64, c_void_p)),
        "omni_quantize_rows": (
            c_int32,
            (c_void_p, c_void_p, c_int64, c_int64, c_int32, c_void_p, c_void_p, c_void_p),
        ),
        "omni_rms_norm": (c_int32, (c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_float, c_void_p)),
        "omni_rope_table": (c_int32, (c_void_p, c_void_p, c_int64, c_int64, c_float, c_void_p)),
        "omni_rope": (
            c_int32,
            (c_void_p, c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_int32, c_int32, c_int32, c_int32),
        ),
        "omni_gated_activation": (c_int32, (c_void_p, c_void_p, c_void_p, c_int64, c_int32, c_void_p)),
        "omni_store_kv": (c_int32, (c_void_p, _CACHE, c_void_p, c_void_p, c_void_p, c_int64, c_int32, c_int32)),
        "omni_attention": (
            c_int32,
            (c_void_p, _CACHE, _BATCH, c_int32, c_void_p, c_int32, c_int32, c_int32, c_int32, c_float, c_void_p),
        ),
        "omni_log_softmax": (c_int32, (c_void_p, c_void_p, c_int64, c_int64, c_void_p)),
        "omni_top": (c_int32, (c_void_p, c_void_p, c_int64, c_int64, c_int64, c_void_p)),
        "omni_sample": (c_int32, (c_void_p, c_void_p, c_int64, c_int64, _SAMPLING, c_void_p)),
        "omni_decoder_create": (c_void_p, (c_void_p, POINTER(DecoderStruct), POINTER(LayerStruct))),
        "omni_decoder_destroy": (None, (c_void_p,)),
        "omni_decoder_bind_cache": (c_int32, (c_void_p, _CACHE)),
        "omni_decoder_step": (c_int32, (c_void_p, _BATCH)),
    }
)
