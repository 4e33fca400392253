#include "include/products.h"

#include <algorithm>

namespace omni {

namespace {

// Quantized activations that one pass over a matrix keeps in the second-level cache.
constexpr int64_t kPassBytes = 192 << 10;

// A thread takes blocks in turns: on a shared machine one core may be slower than the other. A turn is long enough to read ahead.
constexpr int64_t kTurnBytes = 16 << 10;
constexpr int64_t kTurnsPerThread = 8;

int64_t rows_per_pass(const Activations& x) { return std::max<int64_t>(32, kPassBytes / x.padded_columns); }

int64_t num_bytes(const omni_matrix& m) { return num_blocks(m) * num_groups(m) * cell_bytes(m); }

int64_t blocks_per_turn(int num_threads, int64_t total, int64_t bytes) {
    if (num_threads == 1) return total;
    const int64_t long_enough = (kTurnBytes * total + bytes - 1) / bytes, short_enough = total / (kTurnsPerThread * num_threads);
    return std::max<int64_t>(1, std::min(std::max(long_enough, short_enough), (total + num_threads - 1) / num_threads));
}

void multiply_blocks(const Kernels& kernels, const QuantizedInput& input, const Product& product, int64_t rows, int64_t begin,
                     int64_t end) {
    if (begin >= end) return;
    const Activations x = input.with(product.matrix->group_size);
    const int64_t step = rows_per_pass(x);
    for (int64_t row = 0; row < rows; row += step)
        kernels.gemm(*product.matrix, x, row, std::min(rows, row + step), begin, end, product.out + row * product.out_stride,
                     product.out_stride, product.accumulate);
}

}  // namespace

void QuantizedInput::serve(const omni_matrix& matrix) {
    if (!matrix.data) return;
    columns_ = matrix.columns;
    for (int i = 0; i < num_variants_; ++i)
        if (variants_[i].group_size == matrix.group_size) return;
    Variant& variant = variants_[num_variants_++];
    variant.group_size = matrix.group_size;
    variant.groups = num_groups(matrix);
}

void QuantizedInput::resize(int64_t rows) {
    for (int i = 0; i < num_variants_; ++i) {
        Variant& v = variants_[i];
        v.p = v.p_scratch.reserve<int8_t>(rows * v.groups * v.group_size);
        v.a = v.a_scratch.reserve<float>(rows * v.groups);
        v.s = v.s_scratch.reserve<float>(rows * v.groups);
    }
}

void QuantizedInput::quantize_row(const Kernels& kernels, const float* x, int64_t row) {
    for (int i = 0; i < num_variants_; ++i) {
        Variant& v = variants_[i];
        kernels.quantize_row(x, columns_, v.group_size, v.p + row * v.groups * v.group_size, v.a + row * v.groups, v.s + row * v.groups);
    }
}

Activations QuantizedInput::with(int32_t group_size) const {
    for (int i = 0; i < num_variants_; ++i)
        if (variants_[i].group_size == group_size) {
            const Variant& v = variants_[i];
            return {v.p, v.a, v.s, v.groups * v.group_size, v.groups};
        }
    return {};
}

void multiply_share(const Team& team, const QuantizedInput& input, const Product* products, int count, int64_t rows,
                    std::atomic<int64_t>& next_block) {
    int64_t total = 0, bytes = 0;
    for (int i = 0; i < count; ++i) {
        total += num_blocks(*products[i].matrix);
        bytes += num_bytes(*products[i].matrix);
    }
    const int64_t step = blocks_per_turn(team.size(), total, bytes);
    for (int64_t begin; (begin = next_block.fetch_add(step, std::memory_order_relaxed)) < total;) {
        const int64_t end = std::min(begin + step, total);
        int64_t first = 0;
        for (int i = 0; i < count; ++i) {
            const int64_t blocks = num_blocks(*products[i].matrix);
            multiply_blocks(team.kernels(), input, products[i], rows, std::max<int64_t>(begin - first, 0), std::min(end - first, blocks));
            first += blocks;
        }
    }
}

}  // namespace omni
