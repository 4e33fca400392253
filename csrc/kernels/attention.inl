// Attention over the paged cache, and storing into it. README.md draws a page.
//
// For a query: scores = (scale log2 e q) k, a sum over the dimensions from the first to the last; p = 2^(score - largest);
// out = sum over keys, from the first to the last, of p v. Keys are cut into tiles of 64 and parts of 256, both at absolute multiples:
// a part starts from nothing, and parts are folded from the first to the last. So it is the same for one query or many, in one
// task or several, and for a context that was stored at once or bit by bit.
#include "portable.inl"

namespace omni {
namespace OMNI_ARM {
namespace {

constexpr int64_t kChunksPerTile = kTileKeys / kChunkKeys;
constexpr int64_t kMaxHeadDim = 512;
// What an empty state has as its largest score.
constexpr float kLeast = -3.0e38f;

// Storing.

// p = round(x / step); returns the step. Keys are stored as p + 127.
inline float quantize_head(const float* x, int32_t head_dim, int8_t* p) {
    float padded[kMaxHeadDim + 16];
    const int64_t count = divide_up(head_dim, 16) * 16;
    memcpy(padded, x, sizeof(float) * size_t(head_dim));
    memset(padded + head_dim, 0, sizeof(float) * size_t(count - head_dim));
    const float step = step_for(largest_magnitude(padded, count));
    divide_rounded(padded, count, step, p);
    return step;
}

void store_int8(const CacheCell& cell, const float* k, const float* v, int32_t head_dim) {
    int8_t p[kMaxHeadDim + 16];
    const float key_step = quantize_head(k, head_dim, p);
    for (int32_t d = 0; d < head_dim; ++d) cell.keys[d / 4 * 64 + d % 4] = uint8_t(p[d] + 127);
    const float value_step = quantize_head(v, head_dim, p);
    memcpy(cell.values, p, size_t(head_dim));
    memcpy(cell.key_scale, &key_step, sizeof(float));
    memcpy(cell.value_scale, &value_step, sizeof(float));
}

void store_cell(const CacheCell& cell, const float* k, const float* v, int32_t head_dim, int32_t kind) {
    if (kind == OMNI_KV_INT8) return store_int8(cell, k, v, head_dim);
    uint16_t* keys = reinterpret_cast<uint16_t*>(cell.keys);
    for (int32_t d = 0; d < head_dim; ++d) keys[d * kChunkKeys] = to_bfloat16_bits(k[d]);
    to_bfloat16(v, head_dim, reinterpret_cast<uint16_t*>(cell.values));
}

// Products of a few rows with columns that lie side by side.

// The arm's own numbers: queries that share what is read, and registers of keys or values beside them.
constexpr int kQueryRows = OMNI_LANES == 16 ? 6 : 3, kColumnRegisters = 4;

// out[r][.] += or = sum over i in [begin, end) of a[r][i] * right(i)[.], for `Registers` registers.
template <int Rows, int Registers, typename Right>
inline void multiply_block(const float* a, int64_t a_stride, int64_t begin, int64_t end, const Right& right, float* out,
                           int64_t out_stride, bool accumulate) {
    Floats sums[Rows][Registers];
    for (int r = 0; r < Rows; ++r)
        for (int c = 0; c < Registers; ++c) sums[r][c] = accumulate ? load(out + r * out_stride + c * OMNI_LANES) : Floats{};
    for (int64_t i = begin; i < end; ++i) {
        Floats columns[Registers];
        for (int c = 0; c < Registers; ++c) columns[c] = right(i, c);
        for (int r = 0; r < Rows; ++r) {
            const Floats factor = splat(a[r * a_stride + i]);
            for (int c = 0; c < Registers; ++c) sums[r][c] = fused(factor, columns[c], sums[r][c]);
        }
    }
    for (int r = 0; r < Rows; ++r)
        for (int c = 0; c < Registers; ++c) store(out + r * out_stride + c * OMNI_LANES, sums[r][c]);
}

template <int Rows, int Registers, typename Right>
inline void multiply_rows_down_to(int64_t rows, const float* a, int64_t a_stride, int64_t begin, int64_t end, const Right& right,
                                  float* out, int64_t out_stride, bool accumulate) {
    for (; rows >= Rows; rows -= Rows, a += Rows * a_stride, out += Rows * out_stride)
        multiply_block<Rows, Registers>(a, a_stride, begin, end, right, out, out_stride, accumulate);
    if constexpr (Rows > 1) {
        if (rows > 0)
            multiply_rows_down_to<Rows - 1, Registers>(rows, a, a_stride, begin, end, right, out, out_stride, accumulate);
    }
}

// `right(i, column)` is the register of columns from `column`; `columns` is a multiple of OMNI_LANES.
template <typename Right>
inline void multiply_columns(int64_t rows, const float* a, int64_t a_stride, int64_t begin, int64_t end, int64_t columns,
                             const Right& right, float* out, int64_t out_stride, bool accumulate) {
    constexpr int64_t kStep = kColumnRegisters * OMNI_LANES;
    int64_t j = 0;
    for (; j + kStep <= columns; j += kStep)
        multiply_rows_down_to<kQueryRows, kColumnRegisters>(
            rows, a, a_stride, begin, end, [&](int64_t i, int c) { return right(i, j + c * OMNI_LANES); }, out + j, out_stride,
            accumulate);
    for (; j < columns; j += OMNI_LANES)
        multiply_rows_down_to<kQueryRows, 1>(
            rows, a, a_stride, begin, end, [&](int64_t i, int) { return right(i, j); }, out + j, out_stride, accumulate);
}

// One task's numbers.

struct Tile {
    int64_t num_queries, padded_dim;
    float* queries;       // [queries, padded_dim], scaled; what an integer score multiplies is in `codes`
    float* sums;          // [queries, padded_dim]: of the part
    float* total_sums;    // the same: of the parts before
    float* scores;        // [queries, kTileKeys]
    float* state;         // [queries, 2]: largest score and sum of exponentials, of the part
    float* total_state;   // the same: of the parts before
    float* unpacked;      // keys [head_dim, kTileKeys] or values [kTileKeys, padded_dim] as float32, where many queries share them
    float* code_steps;    // [queries]: what a unit of a query's codes stands for
    int32_t* code_sums;   // [queries]
    int8_t* codes;        // [queries, padded_dim]
};

// Keys of a tile where they lie: chunks of sixteen, of which the first `first_chunk` and those from `end_chunk` on are not read.
struct TileKeys {
    int64_t begin;  // of the tile, in the sequence
    int64_t first_chunk, end_chunk;
    int64_t count;  // keys to the end of what is stored
    const uint8_t *keys[kChunksPerTile], *values[kChunksPerTile];
    const uint8_t *key_scales[kChunksPerTile], *value_scales[kChunksPerTile];
};

// A tile and the one after it, whose keys and values memory is asked for meanwhile: pages lie apart, and a processor looks ahead only
// within one. After the last tile it is that tile again.
struct TilePair {
    TileKeys now, next;
};

inline void ask_memory(const void* bytes) { __builtin_prefetch(bytes); }

inline Tile tile_in(const AttentionTask& t) {
    const int64_t num_queries = t.num_rows * t.heads_per_kv;
    const AttentionLayout layout = attention_layout(num_queries, t.head_dim);
    Tile tile;
    tile.num_queries = num_queries;
    tile.padded_dim = layout.width;
    tile.queries = t.scratch + layout.queries;
    tile.sums = t.scratch + layout.sums;
    tile.total_sums = t.scratch + layout.total_sums;
    tile.scores = t.scratch + layout.scores;
    tile.state = t.scratch + layout.state;
    tile.total_state = t.scratch + layout.total_state;
    tile.unpacked = t.scratch + layout.unpacked;
    tile.code_steps = t.scratch + layout.code_steps;
    tile.code_sums = reinterpret_cast<int32_t*>(t.scratch + layout.code_sums);
    tile.codes = reinterpret_cast<int8_t*>(t.scratch + layout.codes);
    return tile;
}

void load_queries(const AttentionTask& t, const Tile& tile) {
    memset(tile.queries, 0, sizeof(float) * size_t(tile.num_queries * tile.padded_dim));
    for (int64_t r = 0; r < t.num_rows; ++r)
        for (int32_t h = 0; h < t.heads_per_kv; ++h) {
            const int64_t query = r * t.heads_per_kv + h;
            const float* q = t.q + r * t.q_stride + h * t.head_dim;
            float* out = tile.queries + query * tile.padded_dim;
            for (int32_t d = 0; d < t.head_dim; ++d) out[d] = q[d] * (t.scale * kLog2E);
            if (t.cache->kind == OMNI_KV_BFLOAT16) continue;
            int8_t* codes = tile.codes + query * tile.padded_dim;
            tile.code_steps[query] = step_for(largest_magnitude(out, tile.padded_dim));
            tile.code_sums[query] = divide_rounded(out, tile.padded_dim, tile.code_steps[query], codes);
        }
}

inline CacheCell chunk_at(const AttentionTask& t, int64_t index) {
    const int64_t size = t.cache->block_size;
    return cell_in(*t.cache, t.head_dim, t.block_table[index / size], t.kv_head, index % size);
}

// Chunks past the end are where the last one is, so that asking for them is harmless.
TileKeys find_keys(const AttentionTask& t, int64_t begin) {
    TileKeys keys = {};
    keys.begin = begin;
    keys.count = smaller(kTileKeys, t.key_end - begin);
    keys.first_chunk = later(t.key_begin - begin, 0) / kChunkKeys;
    keys.end_chunk = divide_up(keys.count, kChunkKeys);
    CacheCell cell = {};
    for (int64_t chunk = keys.first_chunk; chunk < kChunksPerTile; ++chunk) {
        if (chunk < keys.end_chunk) cell = chunk_at(t, begin + chunk * kChunkKeys);
        keys.keys[chunk] = cell.keys;
        keys.values[chunk] = cell.values;
        keys.key_scales[chunk] = cell.key_scale;
        keys.value_scales[chunk] = cell.value_scale;
    }
    return keys;
}

// Scores.

// From this many queries on, keys and values are widened into memory once instead of in registers each time.
constexpr int64_t kQueriesToUnpack = 2 * kQueryRows + 1;

inline const uint16_t* bfloat16_of(const uint8_t* bytes) { return reinterpret_cast<const uint16_t*>(bytes); }

// Keys of the chunks from `chunk` on, for the dimension d.
template <int Chunks>
inline void score_chunks(const Tile& tile, const TilePair& keys, int64_t chunk, int32_t head_dim) {
    const auto right = [&](int64_t d, int c) {
        const int64_t at = d * kChunkKeys + c % kRegisters * OMNI_LANES;
        // Two dimensions of a chunk are a cache line.
        if (c % kRegisters == 0 && d % 2 == 0) ask_memory(bfloat16_of(keys.next.keys[chunk + c / kRegisters]) + at);
        return widened(bfloat16_of(keys.now.keys[chunk + c / kRegisters]) + at);
    };
    multiply_rows_down_to<kQueryRows, Chunks * kRegisters>(tile.num_queries, tile.queries, tile.padded_dim, 0, head_dim, right,
                                                          tile.scores + chunk * kChunkKeys, kTileKeys, false);
}

// Chunks whose keys fill the registers beside the sums.
constexpr int kChunksAtOnce = kColumnRegisters / kRegisters;

void score_in_place(const AttentionTask& t, const Tile& tile, const TilePair& keys) {
    int64_t chunk = keys.now.first_chunk;
    for (; chunk + kChunksAtOnce <= keys.now.end_chunk; chunk += kChunksAtOnce)
        score_chunks<kChunksAtOnce>(tile, keys, chunk, t.head_dim);
    for (; chunk < keys.now.end_chunk; ++chunk) score_chunks<1>(tile, keys, chunk, t.head_dim);
}

void unpack_keys(const uint16_t* keys, const uint16_t* next, int32_t head_dim, float* out) {
    for (int32_t d = 0; d < head_dim; ++d, keys += kChunkKeys, next += kChunkKeys, out += kTileKeys) {
        ask_memory(next);
        for (int c = 0; c < kRegisters; ++c) store(out + c * OMNI_LANES, widened(keys + c * OMNI_LANES));
    }
}

void score_unpacked(const AttentionTask& t, const Tile& tile, const TilePair& keys) {
    const int64_t first = keys.now.first_chunk * kChunkKeys, end = keys.now.end_chunk * kChunkKeys;
    for (int64_t chunk = keys.now.first_chunk; chunk < keys.now.end_chunk; ++chunk)
        unpack_keys(bfloat16_of(keys.now.keys[chunk]), bfloat16_of(keys.next.keys[chunk]), t.head_dim, tile.unpacked + chunk * kChunkKeys);
    multiply_columns(
        tile.num_queries, tile.queries, tile.padded_dim, 0, t.head_dim, end - first,
        [&](int64_t d, int64_t key) { return load(tile.unpacked + d * kTileKeys + first + key); }, tile.scores + first, kTileKeys,
        false);
}

// out[r][key] = sum over d of (codes - 127)[d][key] * q[r][d], for sixteen keys; the arm's own.
template <int Rows>
void multiply_codes(const uint8_t* codes, int32_t head_dim, const int8_t* q, int64_t q_stride, const int32_t* q_sums,
                    int32_t (*out)[kChunkKeys]);

template <int Rows>
void score_codes(const AttentionTask& t, const Tile& tile, const TilePair& keys, int64_t query) {
    int32_t products[Rows][kChunkKeys];
    for (int64_t chunk = keys.now.first_chunk; chunk < keys.now.end_chunk; ++chunk) {
        for (int32_t d = 0; d < t.head_dim; d += 4) ask_memory(keys.next.keys[chunk] + d * kChunkKeys);
        multiply_codes<Rows>(keys.now.keys[chunk], t.head_dim, tile.codes + query * tile.padded_dim, tile.padded_dim, tile.code_sums + query,
                             products);
        float steps[kChunkKeys];
        memcpy(steps, keys.now.key_scales[chunk], sizeof steps);
        for (int r = 0; r < Rows; ++r)
            for (int c = 0; c < kRegisters; ++c) {
                Ints product;
                memcpy(&product, products[r] + c * OMNI_LANES, sizeof product);
                const Floats score = __builtin_convertvector(product, Floats) * load(steps + c * OMNI_LANES);
                store(tile.scores + (query + r) * kTileKeys + chunk * kChunkKeys + c * OMNI_LANES,
                      score * tile.code_steps[query + r]);
            }
    }
}

void score_integers(const AttentionTask& t, const Tile& tile, const TilePair& keys) {
    int64_t query = 0;
    for (; query + 4 <= tile.num_queries; query += 4) score_codes<4>(t, tile, keys, query);
    if (tile.num_queries - query == 3) score_codes<3>(t, tile, keys, query);
    if (tile.num_queries - query == 2) score_codes<2>(t, tile, keys, query);
    if (tile.num_queries - query == 1) score_codes<1>(t, tile, keys, query);
}

void score(const AttentionTask& t, const Tile& tile, const TilePair& keys) {
    if (t.cache->kind == OMNI_KV_INT8) return score_integers(t, tile, keys);
    if (tile.num_queries < kQueriesToUnpack) return score_in_place(t, tile, keys);
    score_unpacked(t, tile, keys);
}

// Exponentials.

// Leaves the lanes from `first` to `last`, exclusive, of the tile's register that starts at lane `lane`; others become `other`.
inline Floats visible(Floats x, int64_t lane, int64_t first, int64_t last, float other) {
    int32_t numbers[OMNI_LANES];
    for (int i = 0; i < OMNI_LANES; ++i) numbers[i] = int32_t(lane) + i;
    Ints place;
    memcpy(&place, numbers, sizeof place);
    const Ints seen = (place >= int32_t(first)) & (place < int32_t(last));
    return seen ? x : splat(other);
}

template <bool All>
inline void soften_visible(float* scores, float* state, float* sums, int64_t width, int64_t first, int64_t last) {
    constexpr int64_t kCount = kTileKeys / OMNI_LANES;
    const auto seen = [&](Floats x, int64_t i, float other) { return All ? x : visible(x, i * OMNI_LANES, first, last, other); };
    Lanes most;
    for (int i = 0; i < kRegisters; ++i) most.part[i] = seen(load(scores + i * OMNI_LANES), i, kLeast);
    for (int64_t i = kRegisters; i < kCount; ++i)
        most.part[i % kRegisters] = larger(most.part[i % kRegisters], seen(load(scores + i * OMNI_LANES), i, kLeast));
    const float largest = larger(state[0], largest_of(most));
    Floats e[kCount];
    for (int64_t i = 0; i < kCount; ++i) {
        e[i] = seen(power_of_two(load(scores + i * OMNI_LANES) - largest), i, 0.0f);
        store(scores + i * OMNI_LANES, e[i]);
    }
    Lanes total;
    for (int i = 0; i < kRegisters; ++i)
        total.part[i] = (e[i] + e[i + kRegisters]) + (e[i + 2 * kRegisters] + e[i + 3 * kRegisters]);
    // Exactly 1 where the largest stays, as it mostly does; a branch would often be foreseen wrongly.
    const float factor = power_of_two(state[0] - largest);
    state[1] = fused(state[1], factor, sum_of(total));
    state[0] = largest;
    for (int64_t d = 0; d < width; d += OMNI_LANES) store(sums + d, load(sums + d) * factor);
}

// Turns one query's scores into exponentials, with what came before in the part rescaled to the new largest score.
void soften(const AttentionTask& t, const Tile& tile, const TileKeys& keys, int64_t query) {
    const int64_t index = t.first_index + query / t.heads_per_kv;
    const int64_t last = smaller(keys.count, index + 1 - keys.begin);
    const int64_t first = t.window > 0 ? later(index - t.window + 1 - keys.begin, 0) : 0;
    float *scores = tile.scores + query * kTileKeys, *state = tile.state + 2 * query, *sums = tile.sums + query * tile.padded_dim;
    if (first >= last)
        memset(scores, 0, sizeof(float) * kTileKeys);
    else if (first == 0 && last == kTileKeys)
        soften_visible<true>(scores, state, sums, tile.padded_dim, first, last);
    else
        soften_visible<false>(scores, state, sums, tile.padded_dim, first, last);
}

// Values.

template <typename T>
inline const T* value_row(const uint8_t* const* values, int64_t key, int32_t head_dim) {
    return reinterpret_cast<const T*>(values[key / kChunkKeys]) + key % kChunkKeys * head_dim;
}

// Rows of head_dim numbers as rows of padded_dim.
template <typename T>
void unpack_values(const T* rows, const T* next, int64_t count, int32_t head_dim, float* out, int64_t padded_dim) {
    for (; count > 0; --count, rows += head_dim, next += head_dim, out += padded_dim) {
        int32_t d = 0;
        for (; d + OMNI_LANES <= head_dim; d += OMNI_LANES) {
            if (d * sizeof(T) % 64 == 0) ask_memory(next + d);
            store(out + d, widened(rows + d));
        }
        if (d == head_dim) continue;
        T rest[OMNI_LANES] = {};
        memcpy(rest, rows + d, sizeof(T) * size_t(head_dim - d));
        store(out + d, widened(rest));
    }
}

template <typename T>
void add_values_of(const AttentionTask& t, const Tile& tile, const TilePair& keys) {
    const int64_t first = keys.now.first_chunk * kChunkKeys;
    if (tile.num_queries < kQueriesToUnpack && t.head_dim % OMNI_LANES == 0) {
        multiply_columns(
            tile.num_queries, tile.scores, kTileKeys, first, keys.now.count, tile.padded_dim,
            [&](int64_t key, int64_t d) {
                if (d * int64_t(sizeof(T)) % 64 == 0) ask_memory(value_row<T>(keys.next.values, key, t.head_dim) + d);
                return widened(value_row<T>(keys.now.values, key, t.head_dim) + d);
            },
            tile.sums, tile.padded_dim, true);
        return;
    }
    for (int64_t key = first; key < keys.now.count; key += kChunkKeys)
        unpack_values(value_row<T>(keys.now.values, key, t.head_dim), value_row<T>(keys.next.values, key, t.head_dim),
                      smaller(kChunkKeys, keys.now.count - key), t.head_dim, tile.unpacked + key * tile.padded_dim, tile.padded_dim);
    multiply_columns(
        tile.num_queries, tile.scores, kTileKeys, first, keys.now.count, tile.padded_dim,
        [&](int64_t key, int64_t d) { return load(tile.unpacked + key * tile.padded_dim + d); }, tile.sums, tile.padded_dim, true);
}

// Values of an int8 cache count by their own step.
void scale_exponentials(const Tile& tile, const TileKeys& keys) {
    for (int64_t chunk = keys.first_chunk; chunk < keys.end_chunk; ++chunk) {
        float steps[kChunkKeys];
        memcpy(steps, keys.value_scales[chunk], sizeof steps);
        // Steps of keys that are not stored yet may be anything.
        for (int64_t key = later(keys.count - chunk * kChunkKeys, 0); key < kChunkKeys; ++key) steps[key] = 0;
        for (int64_t query = 0; query < tile.num_queries; ++query)
            for (int c = 0; c < kRegisters; ++c) {
                float* scores = tile.scores + query * kTileKeys + chunk * kChunkKeys + c * OMNI_LANES;
                store(scores, load(scores) * load(steps + c * OMNI_LANES));
            }
    }
}

void add_values(const AttentionTask& t, const Tile& tile, const TilePair& keys) {
    if (t.cache->kind == OMNI_KV_BFLOAT16) return add_values_of<uint16_t>(t, tile, keys);
    scale_exponentials(tile, keys.now);
    add_values_of<int8_t>(t, tile, keys);
}

// Parts.

void empty_state(float* sums, int64_t width, float* state) {
    memset(sums, 0, sizeof(float) * size_t(width));
    state[0] = kLeast;
    state[1] = 0;
}

// Adds a part to those before it. A part in which a query sees nothing changes nothing.
void fold(const float* part_sums, const float* part_state, int64_t width, float* sums, float* state) {
    if (part_state[1] == 0) return;
    if (state[1] == 0) {
        memcpy(sums, part_sums, sizeof(float) * size_t(width));
        memcpy(state, part_state, 2 * sizeof(float));
        return;
    }
    const float largest = larger(state[0], part_state[0]);
    const float factor = power_of_two(state[0] - largest), part_factor = power_of_two(part_state[0] - largest);
    state[0] = largest;
    state[1] = fused(state[1], factor, part_state[1] * part_factor);
    int64_t d = 0;
    for (; d + OMNI_LANES <= width; d += OMNI_LANES)
        store(sums + d, fused(load(sums + d), splat(factor), load(part_sums + d) * part_factor));
    for (; d < width; ++d) sums[d] = fused(sums[d], factor, part_sums[d] * part_factor);
}

// Leaves in `keys` the first tile after the part.
void attend_part(const AttentionTask& t, const Tile& tile, int64_t end, TilePair& keys) {
    for (int64_t query = 0; query < tile.num_queries; ++query)
        empty_state(tile.sums + query * tile.padded_dim, tile.padded_dim, tile.state + 2 * query);
    for (; keys.now.begin < end; keys.now = keys.next) {
        const int64_t next = keys.now.begin + kTileKeys;
        keys.next = next < t.key_end ? find_keys(t, next) : keys.now;
        score(t, tile, keys);
        for (int64_t query = 0; query < tile.num_queries; ++query) soften(t, tile, keys.now, query);
        add_values(t, tile, keys);
        if (next >= t.key_end) return;
    }
}

// Hands over what has come of the queries: the sums of one part, or of all.
void write_results(const AttentionTask& t, const Tile& tile, const float* sums, const float* states, int64_t part) {
    for (int64_t r = 0; r < t.num_rows; ++r)
        for (int32_t h = 0; h < t.heads_per_kv; ++h) {
            const int64_t query = r * t.heads_per_kv + h, row = part * t.num_rows + r;
            memcpy(t.out + row * t.out_stride + h * t.head_dim, sums + query * tile.padded_dim, sizeof(float) * size_t(t.head_dim));
            memcpy(t.state + row * t.state_stride + 2 * h, states + 2 * query, 2 * sizeof(float));
        }
}

void attention(const AttentionTask& t) {
    const Tile tile = tile_in(t);
    load_queries(t, tile);
    for (int64_t query = 0; query < tile.num_queries; ++query)
        empty_state(tile.total_sums + query * tile.padded_dim, tile.padded_dim, tile.total_state + 2 * query);
    const int64_t first_part = t.key_begin / kPartKeys;
    TilePair keys;
    keys.now = find_keys(t, t.key_begin / kTileKeys * kTileKeys);
    for (int64_t part = first_part; part * kPartKeys < t.key_end; ++part) {
        attend_part(t, tile, (part + 1) * kPartKeys, keys);
        if (t.is_split) {
            write_results(t, tile, tile.sums, tile.state, part - first_part);
            continue;
        }
        for (int64_t query = 0; query < tile.num_queries; ++query)
            fold(tile.sums + query * tile.padded_dim, tile.state + 2 * query, tile.padded_dim,
                 tile.total_sums + query * tile.padded_dim, tile.total_state + 2 * query);
    }
    if (!t.is_split) write_results(t, tile, tile.total_sums, tile.total_state, 0);
}

void join_attention(const float* sums, int64_t part_stride, const float* states, int64_t state_stride, int64_t parts, int32_t head_dim,
                    float* out) {
    float state[2];
    empty_state(out, head_dim, state);
    for (int64_t i = 0; i < parts; ++i) fold(sums + i * part_stride, states + i * state_stride, head_dim, out, state);
    const float normaliser = 1.0f / state[1];
    // Adding zero turns a negative zero, which depends on what was skipped, into zero.
    for (int32_t d = 0; d < head_dim; ++d) out[d] = out[d] * normaliser + 0.0f;
}

}  // namespace
}  // namespace OMNI_ARM
}  // namespace omni
