// What an instruction set provides. Each arm fills one table; everything else is written on top of it.
#pragma once

#include <stdint.h>

#include "omni_native.h"

namespace omni {

constexpr int64_t kBlockRows = 16;
constexpr int64_t kCellHeaderBytes = 64;

// Static: an inline function compiled for one instruction set must not be the copy that the linker keeps for all.
static inline int64_t num_blocks(const omni_matrix& m) { return (m.rows + kBlockRows - 1) / kBlockRows; }
static inline int64_t num_groups(const omni_matrix& m) { return (m.columns + m.group_size - 1) / m.group_size; }
static inline int64_t cell_bytes(const omni_matrix& m) { return kCellHeaderBytes + kBlockRows * m.group_size * m.bits / 8; }

// Keys that lie side by side, keys that are scored together, and keys whose sums are taken from nothing: attention.inl.
constexpr int64_t kChunkKeys = 16;
constexpr int64_t kTileKeys = 64;
constexpr int64_t kPartKeys = 256;

// Where one token's key and value of one head begin; README.md draws it. The scales are those of an int8 cache.
struct CacheCell {
    uint8_t *keys, *values, *key_scale, *value_scale;
};

static inline CacheCell cell_in(const omni_kv_cache& cache, int32_t head_dim, int64_t block, int64_t head, int64_t offset) {
    uint8_t* page = cache.data + block * cache.block_stride + head * cache.head_stride;
    const int64_t element = cache.kind == OMNI_KV_BFLOAT16 ? 2 : 1;
    const int64_t side_by_side = cache.kind == OMNI_KV_BFLOAT16 ? 2 : 4;  // bytes of one key among those of the others
    uint8_t* values = page + cache.block_size * head_dim * element;
    uint8_t* scales = values + cache.block_size * head_dim * element;
    return {page + offset / kChunkKeys * kChunkKeys * head_dim * element + offset % kChunkKeys * side_by_side,
            values + offset * head_dim * element, scales + 4 * offset, scales + 4 * (cache.block_size + offset)};
}

// Quantized rows of activations: p [rows, padded columns], a, s and sums (of p) [rows, groups].
struct Activations {
    const int8_t* p;
    const float* a;
    const float* s;
    const int32_t* sums;
    int64_t padded_columns;
    int64_t groups;
};

// Where one such row is written.
struct QuantizedRow {
    int8_t* p;
    float *a, *s;
    int32_t* sums;
};

// Queries of one head group of one sequence against a range of its keys.
struct AttentionTask {
    const omni_kv_cache* cache;
    const int32_t* block_table;
    int32_t kv_head;
    int32_t head_dim;
    int32_t heads_per_kv;
    int32_t window;
    int64_t first_index;    // place of the first query row's token in the sequence
    int64_t num_rows;       // consecutive query rows
    int64_t key_begin;      // parts before it are not looked at, nor keys of its own part before it
    int64_t key_end;        // exclusive; later keys than a query's own are masked
    float scale;
    const float* q;         // first row, first head of the group
    int64_t q_stride;       // floats from row to row; heads are head_dim apart
    bool is_split;          // each part's result is handed over by itself, num_rows rows after the one before
    float* out;             // unnormalised sums, rows and heads as out_stride says
    int64_t out_stride;
    float* state;           // [num_rows, heads_per_kv, 2]: largest score and sum of exponentials; 0 as the sum: no key was seen
    int64_t state_stride;
    float* scratch;         // AttentionLayout::floats of it, aligned to 64 bytes
};

struct Kernels {
    const char* name;

    // out[row - row_begin][column] for the matrix's blocks [block_begin, block_end), added to what is there if `accumulate`.
    void (*gemm)(const omni_matrix& matrix, const Activations& x, int64_t row_begin, int64_t row_end, int64_t block_begin,
                 int64_t block_end, float* out, int64_t out_stride, bool accumulate);
    void (*quantize_row)(const float* x, int64_t columns, int32_t group_size, const QuantizedRow& out);
    void (*dequantize_row)(const omni_matrix& matrix, int64_t row, float* out);
    void (*to_bfloat16)(const float* x, int64_t count, uint16_t* out);
    void (*rms_norm_row)(const float* x, const float* weight, int64_t columns, float eps, float* out);
    void (*rope_head)(float* x, const float* cos_sin, int32_t rotary_dim, int32_t style);
    void (*gated_activation)(const float* gate, const float* up, int64_t count, int32_t activation, float* out);
    void (*sigmoid)(float* x, int64_t count);
    void (*store_cell)(const CacheCell& cell, const float* k, const float* v, int32_t head_dim, int32_t kind);
    void (*attention)(const AttentionTask& task);
    // Folds `parts` results of one head, from the first to the last, and normalises. Parts are part_stride floats apart.
    void (*join_attention)(const float* sums, int64_t part_stride, const float* states, int64_t state_stride, int64_t parts,
                           int32_t head_dim, float* out);
    // Index of the largest, the first of equal ones; what is not a number counts as less than all others.
    int64_t (*largest_index)(const float* x, int64_t count);
    // out = e^(x - shift), 0 below e^-87 and for what is not a number; returns their sum.
    float (*exponentials)(const float* x, int64_t count, float shift, float* out);
};

// Where a task's scratch holds what, in floats from its beginning, each at a multiple of 64 bytes; `queries` = rows x heads of a group.
struct AttentionLayout {
    int64_t width;                       // head_dim, rounded up to whole registers
    int64_t queries, sums, total_sums;   // [queries, width]
    int64_t scores;                      // [queries, kTileKeys]
    int64_t state, total_state;          // [queries, 2]
    int64_t unpacked;                    // [width, kTileKeys], or the other way round
    int64_t code_steps, code_sums;       // [queries], the second as int32
    int64_t codes;                       // [queries, width] int8
    int64_t floats;                      // of all
};

static inline int64_t rounded_up_to_16(int64_t x) { return (x + 15) / 16 * 16; }

static inline AttentionLayout attention_layout(int64_t queries, int32_t head_dim) {
    AttentionLayout layout = {};
    layout.width = rounded_up_to_16(head_dim);
    const int64_t rows = rounded_up_to_16(queries * layout.width), numbers = rounded_up_to_16(queries);
    layout.sums = rows;
    layout.total_sums = layout.sums + rows;
    layout.scores = layout.total_sums + rows;
    layout.state = layout.scores + queries * kTileKeys;
    layout.total_state = layout.state + rounded_up_to_16(2 * queries);
    layout.unpacked = layout.total_state + rounded_up_to_16(2 * queries);
    layout.code_steps = layout.unpacked + layout.width * kTileKeys;
    layout.code_sums = layout.code_steps + numbers;
    layout.codes = layout.code_sums + numbers;
    layout.floats = layout.codes + rounded_up_to_16((queries * layout.width + 3) / 4);
    return layout;
}

const Kernels* generic_kernels();
const Kernels* avx2_kernels();
const Kernels* avx512_vnni_kernels();
const Kernels* neon_dotprod_kernels();

// Whether the processor has the instructions and the operating system saves their registers.
bool can_run_avx2();
bool can_run_avx512_vnni();
bool can_run_neon_dotprod();

}  // namespace omni
