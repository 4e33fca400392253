// Operations written once with the compiler's vector types and compiled for each arm; lanes.inl says what an arm defines before.
#include "lanes.inl"

namespace omni {
namespace OMNI_ARM {
namespace {

// Abramowitz and Stegun 7.1.26: off by at most 1.5e-7.
inline Floats error_function(Floats x) {
    const Floats magnitude = x < 0 ? -x : x;
    const Floats t = 1.0f / fused(splat(0.3275911f), magnitude, splat(1.0f));
    Floats sum = fused(splat(1.061405429f), t, splat(-1.453152027f));
    sum = fused(sum, t, splat(1.421413741f));
    sum = fused(sum, t, splat(-0.284496736f));
    sum = fused(sum, t, splat(0.254829592f)) * t;
    const Floats value = fused(-sum, exponential(-magnitude * magnitude), splat(1.0f));
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
    memcpy(tail[0], gate + i, sizeof(float) * size_t(count - i));
    memcpy(tail[1], up + i, sizeof(float) * size_t(count - i));
    store(tail[0], activated(load(tail[0]), activation) * load(tail[1]));
    memcpy(out + i, tail[0], sizeof(float) * size_t(count - i));
}

void sigmoid(float* x, int64_t count) {
    for (int64_t i = 0; i < count; i += OMNI_LANES) {
        float lanes[OMNI_LANES] = {};
        const int64_t n = smaller(OMNI_LANES, count - i);
        memcpy(lanes, x + i, sizeof(float) * size_t(n));
        store(lanes, logistic(load(lanes)));
        memcpy(x + i, lanes, sizeof(float) * size_t(n));
    }
}

// Of `count` numbers, a multiple of OMNI_LANES. Compared as integers, so that one that is not a number is the largest.
inline float largest_magnitude(const float* x, int64_t count) {
    Ints most = {};
    for (int64_t i = 0; i < count; i += OMNI_LANES) {
        const Ints magnitude = (Ints)load(x + i) & 0x7fffffff;
        most = magnitude > most ? magnitude : most;
    }
    int32_t lanes[OMNI_LANES], largest = 0;
    memcpy(lanes, &most, sizeof lanes);
    for (int i = 0; i < OMNI_LANES; ++i) largest = lanes[i] > largest ? lanes[i] : largest;
    return from_bits(uint32_t(largest));
}

// p = x / step, rounded, in -127..127; returns the sum of p. `count` is a multiple of OMNI_LANES.
inline int32_t divide_rounded(const float* x, int64_t count, float step, int8_t* p) {
    const Floats divisor = splat(step > 0 ? step : 1.0f);
    Ints sums = {};
    for (int64_t i = 0; i < count; i += OMNI_LANES) {
        const Ints value = rounded_to_int(load(x + i) / divisor);
        const Bytes bytes = __builtin_convertvector(value, Bytes);
        sums += __builtin_convertvector(bytes, Ints);
        memcpy(p + i, &bytes, sizeof bytes);
    }
    int32_t lanes[OMNI_LANES], sum = 0;
    memcpy(lanes, &sums, sizeof lanes);
    for (int i = 0; i < OMNI_LANES; ++i) sum += lanes[i];
    return sum;
}

// What one unit of p stands for. A step below float32's normal numbers is too coarse to divide by: such groups are zero.
inline float step_for(float largest) {
    const float step = largest / 127.0f;
    return step < 1.17549435e-38f ? 0.0f : step;
}

// One group of `group_size` numbers, a multiple of 32.
inline void quantize_group(const float* x, int32_t group_size, int8_t* p, float* a, float* s, int32_t* sum) {
    *a = step_for(largest_magnitude(x, group_size));
    *sum = divide_rounded(x, group_size, *a, p);
    *s = *a * float(*sum);
}

void quantize_row(const float* x, int64_t columns, int32_t group_size, const QuantizedRow& out) {
    const int64_t whole = columns / group_size;
    for (int64_t g = 0; g < whole; ++g)
        quantize_group(x + g * group_size, group_size, out.p + g * group_size, out.a + g, out.s + g, out.sums + g);
    if (whole * group_size == columns) return;
    float rest[128] = {};
    memcpy(rest, x + whole * group_size, sizeof(float) * size_t(columns - whole * group_size));
    quantize_group(rest, group_size, out.p + whole * group_size, out.a + whole, out.s + whole, out.sums + whole);
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

inline Lanes add_squares(const Lanes& x, const Lanes& sums) {
    return map([](Floats v, Floats sum) { return fused(v, v, sum); }, x, sums);
}

inline float sum_of_squares(const float* x, int64_t count) {
    Lanes sums[2] = {};
    int64_t i = 0;
    for (; i + 32 <= count; i += 32)
        for (int half = 0; half < 2; ++half) sums[half] = add_squares(load16(x + i + 16 * half), sums[half]);
    for (int half = 0; i < count; i += 16, ++half) sums[half] = add_squares(load_some(x + i, smaller(16, count - i)), sums[half]);
    return sum_of(add(sums[0], sums[1]));
}

void rms_norm_row(const float* x, const float* weight, int64_t columns, float eps, float* out) {
    const float factor = 1.0f / square_root(sum_of_squares(x, columns) / float(columns) + eps);
    for (int64_t i = 0; i < columns; ++i) out[i] = x[i] * factor * weight[i];
}

// Turns the pair (first, second).
inline void turn(float& first, float& second, float cosine, float sine) {
    const float x = first, y = second;
    first = fused(x, cosine, -(y * sine));
    second = fused(y, cosine, x * sine);
}

void rope_head(float* x, const float* cos_sin, int32_t rotary_dim, int32_t style) {
    const int32_t half = rotary_dim / 2;
    const float *cosines = cos_sin, *sines = cos_sin + half;
    if (style == OMNI_ROPE_HALVES) {
        int32_t i = 0;
        for (; i + OMNI_LANES <= half; i += OMNI_LANES) {
            const Floats first = load(x + i), second = load(x + half + i), cosine = load(cosines + i), sine = load(sines + i);
            store(x + i, fused(first, cosine, -(second * sine)));
            store(x + half + i, fused(second, cosine, first * sine));
        }
        for (; i < half; ++i) turn(x[i], x[i + half], cosines[i], sines[i]);
        return;
    }
    for (int32_t i = 0; i < half; ++i) turn(x[2 * i], x[2 * i + 1], cosines[i], sines[i]);
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

}  // namespace
}  // namespace OMNI_ARM
}  // namespace omni
