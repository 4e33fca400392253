// Plain C++: the arm of every machine that has no other, and the one that is easiest to check.
#define OMNI_ARM generic
#define OMNI_LANES 4
#include "portable.inl"

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
                sums[r][lane] += from_half(halves[lane]) * a * float(products[r][lane]) + from_half(halves[kBlockRows + lane]) * s;
        }
    }
}

}  // namespace
}  // namespace generic

const Kernels* generic_kernels() {
    static const Kernels kernels = generic::table("generic");
    return &kernels;
}

}  // namespace omni
