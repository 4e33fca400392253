// Operations written once with the compiler's vector types and compiled for each arm. An arm defines, before it includes this:
//   OMNI_ARM    its namespace
//   OMNI_LANES  float32 lanes of a register
// Nothing of the standard library is used: an inline function of a header, compiled here for one instruction set, could be the
// copy that the linker keeps for all.

#include <stdint.h>
#include <string.h>

#include "../include/kernel_table.h"

namespace omni {
namespace OMNI_ARM {
namespace {

typedef float Floats __attribute__((vector_size(4 * OMNI_LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * OMNI_LANES)));
typedef int8_t Bytes __attribute__((vector_size(OMNI_LANES)));

inline Floats load(const float* x) {
    Floats v;
    memcpy(&v, x, sizeof v);
    return v;
}

inline void store(float* x, Floats v) { memcpy(x, &v, sizeof v); }

inline Floats splat(float x) { return x - Floats{}; }

inline float sum_of(Floats v) {
    float lanes[OMNI_LANES];
    memcpy(lanes, &v, sizeof v);
    for (int width = OMNI_LANES / 2; width > 0; width /= 2)
        for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
    return lanes[0];
}

inline float larger(float x, float y) { return x > y ? x : y; }
inline int64_t smaller(int64_t x, int64_t y) { return x < y ? x : y; }
inline int64_t divide_up(int64_t x, int64_t y) { return (x + y - 1) / y; }

inline float from_bits(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

inline uint32_t to_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

// Adding and taking away 1.5 * 2^23 rounds to the nearest integer, halves to even, for |x| < 2^22.
constexpr float kRounder = 12582912.0f;

inline float rounded(float x) { return (x + kRounder) - kRounder; }

inline float from_half(uint16_t half) {
    // Exponent moved to float32's place; the product with 2^112 restores the bias and makes subnormals normal.
    const float magnitude = from_bits(uint32_t(half & 0x7fff) << 13) * from_bits(0x77800000);
    const uint32_t special = (half & 0x7c00) == 0x7c00 ? 0x7f800000u : 0;
    return from_bits(to_bits(magnitude) | special | uint32_t(half & 0x8000) << 16);
}

inline uint16_t to_bfloat16_bits(float x) {
    const uint32_t bits = to_bits(x);
    const uint32_t nearest = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    return uint16_t(x == x ? nearest : 0x7fc0);
}

inline float from_bfloat16(uint16_t bits) { return from_bits(uint32_t(bits) << 16); }

// e^x to about 1 unit in the last place; below -87 it is 1e-38, above 88 it is 1e38.
inline Floats exponential(Floats x) {
    const Floats low = splat(-87.0f), high = splat(88.0f);
    x = x < low ? low : x;
    x = x > high ? high : x;
    const Floats shifted = x * 1.44269504f + kRounder;
    const Floats n = shifted - kRounder;
    const Ints exponent = ((Ints)shifted - (Ints)splat(kRounder) + 127) << 23;
    const Floats r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
    // Taylor's series on |r| <= ln(2) / 2.
    Floats sum = r * (1.0f / 5040) + 1.0f / 720;
    sum = sum * r + 1.0f / 120;
    sum = sum * r + 1.0f / 24;
    sum = sum * r + 1.0f / 6;
    sum = sum * r + 0.5f;
    sum = sum * r * r + r + 1.0f;
    return sum * (Floats)exponent;
}

// Abramowitz and Stegun 7.1.26: off by at most 1.5e-7.
inline Floats error_function(Floats x) {
    const Floats magnitude = x < 0 ? -x : x;
    const Floats t = 1.0f / (1.0f + 0.3275911f * magnitude);
    Floats sum = 1.061405429f * t - 1.453152027f;
    sum = sum * t + 1.421413741f;
    sum = sum * t - 0.284496736f;
    sum = (sum * t + 0.254829592f) * t;
    const Floats value = 1.0f - sum * exponential(-magnitude * magnitude);
    return x < 0 ? -value : value;
}

inline Floats logistic(Floats x) { return 1.0f / (1.0f + exponential(-x)); }

inline Floats activated(Floats x, int32_t activation) {
    if (activation == OMNI_ACTIVATION_SILU) return x * logistic(x);
    return 0.5f * x * (1.0f + error_function(x * 0.70710678f));
}

void gated_activation(const float* gate, const float* up, int64_t count, int32_t activation, float* out) {
    int64_t i = 0;
    for (; i + OMNI_LANES <= count; i += OMNI_LANES) store(out + i, activated(load(gate + i), activation) * load(up + i));
    if (i == count) return;
    float tail[2][OMNI_LANES] = {};
    memcpy(tail[0], gate + i, sizeof(float) * (count - i));
    memcpy(tail[1], up + i, sizeof(float) * (count - i));
    store(tail[0], activated(load(tail[0]), activation) * load(tail[1]));
    memcpy(out + i, tail[0], sizeof(float) * (count - i));
}

void sigmoid(float* x, int64_t count) {
    for (int64_t i = 0; i < count; i += OMNI_LANES) {
        float lanes[OMNI_LANES] = {};
        const int64_t n = smaller(OMNI_LANES, count - i);
        memcpy(lanes, x + i, sizeof(float) * n);
        store(lanes, logistic(load(lanes)));
        memcpy(x + i, lanes, sizeof(float) * n);
    }
}

// One group of `group_size` numbers, a multiple of 32.
inline void quantize_group(const float* x, int32_t group_size, int8_t* p, float* a, float* s) {
    Floats largest_lanes = {};
    for (int32_t i = 0; i < group_size; i += OMNI_LANES) {
        const Floats v = load(x + i), magnitude = v < 0 ? -v : v;
        largest_lanes = magnitude > largest_lanes ? magnitude : largest_lanes;
    }
    float lanes[OMNI_LANES], largest = 0;
    store(lanes, largest_lanes);
    for (int i = 0; i < OMNI_LANES; ++i) largest = larger(largest, lanes[i]);
    const float scale = largest / 127.0f;
    const Floats divisor = splat(scale > 0 ? scale : 1.0f);
    Floats sum = {};
    for (int32_t i = 0; i < group_size; i += OMNI_LANES) {
        const Floats value = load(x + i) / divisor + kRounder - kRounder;
        sum += value;
        const Bytes bytes = __builtin_convertvector(__builtin_convertvector(value, Ints), Bytes);
        memcpy(p + i, &bytes, sizeof bytes);
    }
    *a = scale;
    *s = scale * sum_of(sum);
}

void quantize_row(const float* x, int64_t columns, int32_t group_size, int8_t* p, float* a, float* s) {
    const int64_t whole = columns / group_size;
    for (int64_t g = 0; g < whole; ++g) quantize_group(x + g * group_size, group_size, p + g * group_size, a + g, s + g);
    if (whole * group_size == columns) return;
    float rest[128] = {};
    memcpy(rest, x + whole * group_size, sizeof(float) * (columns - whole * group_size));
    quantize_group(rest, group_size, p + whole * group_size, a + whole, s + whole);
}

inline int32_t quantized_value(const uint8_t* chunks, int32_t bits, int64_t column, int64_t lane) {
    if (bits == 8) return chunks[column / 4 * 64 + 4 * lane + column % 4];
    const uint8_t byte = chunks[column / 8 * 64 + 4 * lane + column % 4];
    return column % 8 < 4 ? byte & 15 : byte >> 4;
}

void dequantize_row(const omni_matrix& m, int64_t row, float* out) {
    const int64_t groups = num_groups(m), bytes = cell_bytes(m), lane = row % kBlockRows;
    const uint8_t* cell = m.data + row / kBlockRows * groups * bytes;
    for (int64_t g = 0; g < groups; ++g, cell += bytes) {
        uint16_t half[2];
        memcpy(&half[0], cell + 2 * lane, 2);
        memcpy(&half[1], cell + 32 + 2 * lane, 2);
        const float scale = from_half(half[0]), minimum = from_half(half[1]);
        const int64_t n = smaller(m.group_size, m.columns - g * m.group_size);
        for (int64_t i = 0; i < n; ++i)
            out[g * m.group_size + i] = scale * float(quantized_value(cell + kCellHeaderBytes, m.bits, i, lane)) + minimum;
    }
}

void to_bfloat16(const float* x, int64_t count, uint16_t* out) {
    for (int64_t i = 0; i < count; ++i) out[i] = to_bfloat16_bits(x[i]);
}

float square_root(float x) { return __builtin_sqrtf(x); }

void rms_norm_row(const float* x, const float* weight, int64_t columns, float eps, float* out) {
    Floats squares[2] = {};
    int64_t i = 0;
    for (; i + 2 * OMNI_LANES <= columns; i += 2 * OMNI_LANES) {
        const Floats first = load(x + i), second = load(x + i + OMNI_LANES);
        squares[0] += first * first;
        squares[1] += second * second;
    }
    float sum = sum_of(squares[0] + squares[1]);
    for (; i < columns; ++i) sum += x[i] * x[i];
    const float factor = 1.0f / square_root(sum / float(columns) + eps);
    for (i = 0; i < columns; ++i) out[i] = x[i] * factor * weight[i];
}

void rope_head(float* x, const float* cos_sin, int32_t rotary_dim, int32_t style) {
    const int32_t half = rotary_dim / 2;
    const float *cosines = cos_sin, *sines = cos_sin + half;
    if (style == OMNI_ROPE_HALVES) {
#pragma omp simd
        for (int32_t i = 0; i < half; ++i) {
            const float first = x[i], second = x[i + half];
            x[i] = first * cosines[i] - second * sines[i];
            x[i + half] = second * cosines[i] + first * sines[i];
        }
        return;
    }
    for (int32_t i = 0; i < half; ++i) {
        const float first = x[2 * i], second = x[2 * i + 1];
        x[2 * i] = first * cosines[i] - second * sines[i];
        x[2 * i + 1] = second * cosines[i] + first * sines[i];
    }
}

float store_int8(int8_t* out, const float* x, int32_t count) {
    float largest = 0;
    for (int32_t i = 0; i < count; ++i) largest = larger(largest, x[i] < 0 ? -x[i] : x[i]);
    const float scale = largest / 127.0f, divisor = scale > 0 ? scale : 1.0f;
    for (int32_t i = 0; i < count; ++i) out[i] = int8_t(rounded(x[i] / divisor));
    return scale;
}

void store_cell(uint8_t* cell, const float* k, const float* v, int32_t head_dim, int32_t kind) {
    if (kind == OMNI_KV_BFLOAT16) {
        to_bfloat16(k, head_dim, reinterpret_cast<uint16_t*>(cell));
        to_bfloat16(v, head_dim, reinterpret_cast<uint16_t*>(cell) + head_dim);
        return;
    }
    int8_t* values = reinterpret_cast<int8_t*>(cell);
    const float scales[2] = {store_int8(values, k, head_dim), store_int8(values + head_dim, v, head_dim)};
    memcpy(cell + 2 * head_dim, scales, sizeof scales);
}

// Attention.

// Keys and values of one token's head as float32.
inline void load_cell(const uint8_t* cell, int32_t head_dim, int32_t kind, float* key, float* value) {
    if (kind == OMNI_KV_BFLOAT16) {
        const uint16_t* numbers = reinterpret_cast<const uint16_t*>(cell);
#pragma omp simd
        for (int32_t i = 0; i < head_dim; ++i) key[i] = from_bits(uint32_t(numbers[i]) << 16);
#pragma omp simd
        for (int32_t i = 0; i < head_dim; ++i) value[i] = from_bits(uint32_t(numbers[head_dim + i]) << 16);
        return;
    }
    const int8_t* numbers = reinterpret_cast<const int8_t*>(cell);
    float scales[2];
    memcpy(scales, cell + 2 * head_dim, sizeof scales);
#pragma omp simd
    for (int32_t i = 0; i < head_dim; ++i) key[i] = scales[0] * float(numbers[i]);
#pragma omp simd
    for (int32_t i = 0; i < head_dim; ++i) value[i] = scales[1] * float(numbers[head_dim + i]);
}

// c [Rows, columns] += or = a [Rows, depth] times b [depth, columns]; columns is a multiple of OMNI_LANES.
template <int Rows>
inline void multiply(const float* a, int64_t a_stride, const float* b, int64_t b_stride, int64_t depth, int64_t columns, float* c,
                     int64_t c_stride, bool accumulate) {
    int64_t j = 0;
    for (; j + 2 * OMNI_LANES <= columns; j += 2 * OMNI_LANES) {
        Floats sums[Rows][2];
        for (int r = 0; r < Rows; ++r)
            for (int h = 0; h < 2; ++h)
                sums[r][h] = accumulate ? load(c + r * c_stride + j + h * OMNI_LANES) : Floats{};
        for (int64_t d = 0; d < depth; ++d) {
            const Floats first = load(b + d * b_stride + j), second = load(b + d * b_stride + j + OMNI_LANES);
            for (int r = 0; r < Rows; ++r) {
                const float factor = a[r * a_stride + d];
                sums[r][0] += factor * first;
                sums[r][1] += factor * second;
            }
        }
        for (int r = 0; r < Rows; ++r)
            for (int h = 0; h < 2; ++h) store(c + r * c_stride + j + h * OMNI_LANES, sums[r][h]);
    }
    for (; j < columns; j += OMNI_LANES)
        for (int r = 0; r < Rows; ++r) {
            Floats sum = accumulate ? load(c + r * c_stride + j) : Floats{};
            for (int64_t d = 0; d < depth; ++d) sum += a[r * a_stride + d] * load(b + d * b_stride + j);
            store(c + r * c_stride + j, sum);
        }
}

void multiply_floats(const float* a, int64_t a_stride, int64_t rows, const float* b, int64_t b_stride, int64_t depth, int64_t columns,
                   float* c, int64_t c_stride, bool accumulate) {
    for (; rows >= 4; rows -= 4, a += 4 * a_stride, c += 4 * c_stride)
        multiply<4>(a, a_stride, b, b_stride, depth, columns, c, c_stride, accumulate);
    if (rows == 3) multiply<3>(a, a_stride, b, b_stride, depth, columns, c, c_stride, accumulate);
    if (rows == 2) multiply<2>(a, a_stride, b, b_stride, depth, columns, c, c_stride, accumulate);
    if (rows == 1) multiply<1>(a, a_stride, b, b_stride, depth, columns, c, c_stride, accumulate);
}

inline float dot(const float* x, const float* y, int64_t count) {
    Floats sums[2] = {};
    int64_t i = 0;
    for (; i + 2 * OMNI_LANES <= count; i += 2 * OMNI_LANES) {
        sums[0] += load(x + i) * load(y + i);
        sums[1] += load(x + i + OMNI_LANES) * load(y + i + OMNI_LANES);
    }
    float sum = sum_of(sums[0] + sums[1]);
    for (; i < count; ++i) sum += x[i] * y[i];
    return sum;
}

struct Tile {
    float* queries;     // [queries, padded head_dim], scaled
    float* sums;        // [queries, padded head_dim]
    float* scores;      // [queries, kAttentionTile]
    float* state;       // [queries, 2]: largest score, sum of exponentials
    float* keys;        // [kAttentionTile, padded head_dim], or transposed [padded head_dim, kAttentionTile]
    float* values;      // [kAttentionTile, padded head_dim]
    int64_t padded_dim;
    int64_t num_queries;
};

inline Tile tile_in(const AttentionTask& t) {
    Tile tile;
    tile.padded_dim = divide_up(t.head_dim, 16) * 16;
    tile.num_queries = t.num_rows * t.heads_per_kv;
    tile.queries = t.scratch;
    tile.sums = tile.queries + tile.num_queries * tile.padded_dim;
    tile.scores = tile.sums + tile.num_queries * tile.padded_dim;
    tile.state = tile.scores + tile.num_queries * kAttentionTile;
    tile.keys = tile.state + divide_up(2 * tile.num_queries, 16) * 16;
    tile.values = tile.keys + kAttentionTile * tile.padded_dim;
    return tile;
}

void begin_tile(const AttentionTask& t, Tile& tile) {
    memset(tile.queries, 0, sizeof(float) * 2 * tile.num_queries * tile.padded_dim);
    for (int64_t r = 0; r < t.num_rows; ++r)
        for (int32_t h = 0; h < t.heads_per_kv; ++h) {
            const int64_t query = r * t.heads_per_kv + h;
            const float* q = t.q + r * t.q_stride + h * t.head_dim;
            for (int32_t i = 0; i < t.head_dim; ++i) tile.queries[query * tile.padded_dim + i] = q[i] * t.scale;
            tile.state[2 * query] = -3.0e38f;
            tile.state[2 * query + 1] = 0;
        }
    memset(tile.values, 0, sizeof(float) * kAttentionTile * tile.padded_dim);
}

void load_keys(const AttentionTask& t, const Tile& tile, int64_t begin, int64_t count, bool transposed) {
    const omni_kv_cache& cache = *t.cache;
    float key[512];
    for (int64_t i = 0; i < count; ++i) {
        const int64_t index = begin + i;
        const uint8_t* cell = cell_in(cache, t.block_table[index / cache.block_size], t.kv_head, index % cache.block_size);
        float* target = transposed ? key : tile.keys + i * tile.padded_dim;
        load_cell(cell, t.head_dim, cache.kind, target, tile.values + i * tile.padded_dim);
        if (transposed)
            for (int32_t d = 0; d < t.head_dim; ++d) tile.keys[d * kAttentionTile + i] = key[d];
    }
}

void score(const AttentionTask& t, const Tile& tile, int64_t count, bool transposed) {
    if (transposed) {
        multiply_floats(tile.queries, tile.padded_dim, tile.num_queries, tile.keys, kAttentionTile, t.head_dim, kAttentionTile, tile.scores,
                      kAttentionTile, false);
        return;
    }
    for (int64_t i = 0; i < count; ++i)
        for (int64_t query = 0; query < tile.num_queries; ++query)
            tile.scores[query * kAttentionTile + i] =
                dot(tile.queries + query * tile.padded_dim, tile.keys + i * tile.padded_dim, t.head_dim);
}

// Turns one query's scores into exponentials, with what came before rescaled to the new largest score.
void soften(const AttentionTask& t, const Tile& tile, int64_t query, int64_t begin, int64_t count) {
    const int64_t index = t.first_index + query / t.heads_per_kv;
    const int64_t last = smaller(begin + count, index + 1) - begin;
    const int64_t first = t.window > 0 && index - t.window + 1 > begin ? index - t.window + 1 - begin : 0;
    float* scores = tile.scores + query * kAttentionTile;
    float* state = tile.state + 2 * query;
    float largest = state[0];
    for (int64_t i = first; i < last; ++i) largest = larger(largest, scores[i]);
    Floats total = {};
    for (int64_t i = 0; i < kAttentionTile; i += OMNI_LANES) store(scores + i, exponential(load(scores + i) - largest));
    for (int64_t i = 0; i < smaller(first, kAttentionTile); ++i) scores[i] = 0;
    for (int64_t i = last > 0 ? last : 0; i < kAttentionTile; ++i) scores[i] = 0;
    for (int64_t i = 0; i < kAttentionTile; i += OMNI_LANES) total += load(scores + i);
    float lanes[OMNI_LANES] = {state[0] - largest};
    store(lanes, exponential(load(lanes)));
    const float factor = state[1] > 0 ? lanes[0] : 0.0f;
    state[0] = largest;
    state[1] = state[1] * factor + sum_of(total);
    if (factor != 1.0f)
        for (int64_t d = 0; d < tile.padded_dim; ++d) tile.sums[query * tile.padded_dim + d] *= factor;
}

void attention(const AttentionTask& t) {
    Tile tile = tile_in(t);
    const bool transposed = tile.num_queries > 8;
    begin_tile(t, tile);
    for (int64_t begin = t.key_begin; begin < t.key_end; begin += kAttentionTile) {
        const int64_t count = smaller(kAttentionTile, t.key_end - begin);
        load_keys(t, tile, begin, count, transposed);
        score(t, tile, count, transposed);
        for (int64_t query = 0; query < tile.num_queries; ++query) soften(t, tile, query, begin, count);
        multiply_floats(tile.scores, kAttentionTile, tile.num_queries, tile.values, tile.padded_dim, count, tile.padded_dim, tile.sums,
                      tile.padded_dim, true);
    }
    for (int64_t r = 0; r < t.num_rows; ++r)
        for (int32_t h = 0; h < t.heads_per_kv; ++h) {
            const int64_t query = r * t.heads_per_kv + h;
            memcpy(t.out + r * t.out_stride + h * t.head_dim, tile.sums + query * tile.padded_dim, sizeof(float) * t.head_dim);
            memcpy(t.max_and_sum + r * t.max_and_sum_stride + 2 * h, tile.state + 2 * query, 2 * sizeof(float));
        }
}

void join_attention(const float* sums, int64_t part_stride, const float* max_and_sum, int64_t max_and_sum_stride, int64_t parts,
                    int32_t head_dim, float* out) {
    float largest = -3.0e38f, total = 0;
    for (int64_t i = 0; i < parts; ++i) largest = larger(largest, max_and_sum[i * max_and_sum_stride]);
    for (int32_t d = 0; d < head_dim; ++d) out[d] = 0;
    for (int64_t i = 0; i < parts; ++i) {
        float lanes[OMNI_LANES] = {max_and_sum[i * max_and_sum_stride] - largest};
        store(lanes, exponential(load(lanes)));
        const float part = max_and_sum[i * max_and_sum_stride + 1];
        const float factor = part > 0 ? lanes[0] : 0.0f;
        total += part * factor;
        for (int32_t d = 0; d < head_dim; ++d) out[d] += factor * sums[i * part_stride + d];
    }
    const float normaliser = 1.0f / total;
    for (int32_t d = 0; d < head_dim; ++d) out[d] *= normaliser;
}

// The arm's own part: a tile of at most kTileRows rows of activations times cells of one row block.
constexpr int kTileRows = 4;

// How a cell has its weights: 4 bits or 8 bits as README.md draws them, or 4 bits in the place that 8 bits have.
enum class Form { nibbles, bytes, unpacked };

// Consecutive cells of a row block, for the groups `first_group` and on of a row.
struct Cells {
    const uint8_t* data;
    int64_t bytes;  // of a cell
    int64_t first_group, num_groups;
    int32_t group_size;
};

// Adds to `sums`.
template <int Rows, Form F>
void multiply_cells(const Cells& cells, const Activations& x, int64_t row, float (*sums)[kBlockRows]);

template <Form F>
inline void multiply_tile(const Cells& cells, const Activations& x, int64_t row, int64_t rows, float (*sums)[kBlockRows]) {
    if (rows == 4) multiply_cells<4, F>(cells, x, row, sums);
    if (rows == 3) multiply_cells<3, F>(cells, x, row, sums);
    if (rows == 2) multiply_cells<2, F>(cells, x, row, sums);
    if (rows == 1) multiply_cells<1, F>(cells, x, row, sums);
}

template <Form F>
void multiply_tiles(const Cells& cells, const Activations& x, int64_t row, int64_t rows, float (*sums)[kBlockRows]) {
    for (int64_t r = 0; r < rows; r += kTileRows) multiply_tile<F>(cells, x, row + r, smaller(kTileRows, rows - r), sums + r);
}

// Unpacked weights that fit the first-level cache beside a tile of activations, and the rows from which unpacking pays.
constexpr int64_t kUnpackedBytes = 16 << 10;
constexpr int64_t kRowsToUnpack = 12;

void unpack_cell(const uint8_t* cell, int64_t bytes, uint8_t* out) {
    memcpy(out, cell, kCellHeaderBytes);
    out += kCellHeaderBytes;
    for (const uint8_t* chunk = cell + kCellHeaderBytes; chunk < cell + bytes; chunk += 64, out += 128) {
        for (int i = 0; i < 64; ++i) out[i] = chunk[i] & 15;
        for (int i = 0; i < 64; ++i) out[64 + i] = chunk[i] >> 4;
    }
}

// Cells of whole rows: groups that fit the cache are unpacked once for all rows. Sums are the same to the last bit.
void multiply_unpacked(const Cells& cells, const Activations& x, int64_t row, int64_t rows, float (*sums)[kBlockRows]) {
    alignas(64) uint8_t unpacked[kUnpackedBytes];
    Cells part = {unpacked, kCellHeaderBytes + kBlockRows * cells.group_size, 0, 0, cells.group_size};
    for (; part.first_group < cells.num_groups; part.first_group += part.num_groups) {
        part.num_groups = smaller(kUnpackedBytes / part.bytes, cells.num_groups - part.first_group);
        for (int64_t i = 0; i < part.num_groups; ++i)
            unpack_cell(cells.data + (part.first_group + i) * cells.bytes, cells.bytes, unpacked + i * part.bytes);
        multiply_tiles<Form::unpacked>(part, x, row, rows, sums);
    }
}

void multiply_rows(const Cells& cells, int32_t bits, const Activations& x, int64_t row, int64_t rows, float (*sums)[kBlockRows]) {
    memset(sums, 0, sizeof(float) * kBlockRows * rows);
    if (bits == 8)
        multiply_tiles<Form::bytes>(cells, x, row, rows, sums);
    else if (rows < kRowsToUnpack)
        multiply_tiles<Form::nibbles>(cells, x, row, rows, sums);
    else
        multiply_unpacked(cells, x, row, rows, sums);
}

// Rows whose sums are kept while a row block's weights pass.
constexpr int64_t kRowsAtOnce = 128;

void gemm(const omni_matrix& matrix, const Activations& x, int64_t row_begin, int64_t row_end, int64_t block_begin, int64_t block_end,
          float* out, int64_t out_stride, bool accumulate) {
    alignas(64) float sums[kRowsAtOnce][kBlockRows];
    Cells cells = {nullptr, cell_bytes(matrix), 0, num_groups(matrix), matrix.group_size};
    for (int64_t block = block_begin; block < block_end; ++block) {
        cells.data = matrix.data + block * cells.num_groups * cells.bytes;
        const int64_t columns = smaller(kBlockRows, matrix.rows - block * kBlockRows);
        float* results = out + block * kBlockRows;
        for (int64_t row = row_begin; row < row_end; row += kRowsAtOnce) {
            const int64_t rows = smaller(kRowsAtOnce, row_end - row);
            multiply_rows(cells, matrix.bits, x, row, rows, sums);
            for (int64_t r = 0; r < rows; ++r, results += out_stride)
                for (int64_t i = 0; i < columns; ++i) results[i] = (accumulate ? results[i] : 0.0f) + sums[r][i];
        }
    }
}

constexpr Kernels table(const char* name) {
    return {name,      gemm,     quantize_row,     dequantize_row, to_bfloat16, rms_norm_row,
            rope_head, gated_activation, sigmoid, store_cell,     attention,   join_attention};
}

}  // namespace
}  // namespace OMNI_ARM
}  // namespace omni
