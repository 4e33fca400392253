// Plain C++: the arm of every machine that has no other, and the one that is easiest to check.
#define OMNI_ARM generic
#define OMNI_LANES 4
#define OMNI_FUSED(a, b, c) \
    (Floats{__builtin_fmaf(a[0], b[0], c[0]), __builtin_fmaf(a[1], b[1], c[1]), __builtin_fmaf(a[2], b[2], c[2]), \
            __builtin_fmaf(a[3], b[3], c[3])})
#define OMNI_LARGER(x, y) ((x) > (y) ? (x) : (y))
#define OMNI_WIDENED_BYTES(bytes) (Ints{bytes[0], bytes[1], bytes[2], bytes[3]})
#define OMNI_WIDENED_HALVES(halves) (Words{halves[0], halves[1], halves[2], halves[3]})
#include "sampling.inl"

namespace omni {
namespace generic {
namespace {

template <int Rows, Form F>
void multiply_cells(const Cells& cells, const Activations& x, int64_t row, float (*sums)[kBlockRows]) {
    const uint8_t* cell = cells.data;
    for (int64_t g = cells.first_group; g < cells.first_group + cells.num_groups; ++g, cell += cells.bytes) {
        int32_t products[Rows][kBlockRows] = {};
        for (int32_t column = 0; column < cells.group_size; ++column)
            for (int64_t lane = 0; lane < kBlockRows; ++lane) {
                const int32_t q = quantized_value(cell + kCellHeaderBytes, F == Form::nibbles ? 4 : 8, column, lane);
                for (int r = 0; r < Rows; ++r)
                    products[r][lane] += q * x.p[(row + r) * x.padded_columns + g * cells.group_size + column];
            }
        uint16_t halves[2 * kBlockRows];
        memcpy(halves, cell, sizeof halves);
        for (int r = 0; r < Rows; ++r) {
            const float a = x.a[(row + r) * x.groups + g], s = x.s[(row + r) * x.groups + g];
            for (int64_t lane = 0; lane < kBlockRows; ++lane)
                sums[r][lane] = fused(float(products[r][lane]) * from_half(halves[lane]), a,
                                      fused(from_half(halves[kBlockRows + lane]), s, sums[r][lane]));
        }
    }
}

template <int Rows>
void multiply_codes(const uint8_t* codes, int32_t head_dim, const int8_t* q, int64_t q_stride, const int32_t*,
                    int32_t (*out)[kChunkKeys]) {
    memset(out, 0, sizeof(int32_t) * Rows * kChunkKeys);
    for (int32_t d = 0; d < head_dim; ++d)
        for (int64_t key = 0; key < kChunkKeys; ++key)
            for (int r = 0; r < Rows; ++r) out[r][key] += (codes[d / 4 * 64 + 4 * key + d % 4] - 127) * q[r * q_stride + d];
}

}  // namespace
}  // namespace generic

const Kernels* generic_kernels() {
    static const Kernels kernels = generic::table("generic");
    return &kernels;
}

}  // namespace omni
