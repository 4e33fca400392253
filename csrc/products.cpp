#include "include/products.h"

#include <algorithm>

namespace omni {

namespace {

// Quantized activations that one pass over a matrix keeps in the second-level cache.
constexpr int64_t kPassBytes = 192 << 10;

// What a thread takes of a part at a time: long turns read well, and some must be left to share when one thread is slower.
constexpr int64_t kTurnBytes = 128 << 10;
constexpr int64_t kTurnsPerPart = 4;

// What a thread asks for ahead of a stage: a part of the second-level cache.
constexpr int64_t kAheadBytes = 128 << 10;

int64_t rows_per_pass(const Activations& x) { return std::max<int64_t>(32, kPassBytes / x.padded_columns); }

int64_t block_bytes(const omni_matrix& m) { return num_groups(m) * cell_bytes(m); }

void multiply_blocks(const Kernels& kernels, const QuantizedInput& input, const Product& product, int64_t rows, int64_t begin,
                     int64_t end) {
    if (begin >= end) return;
    const Activations x = input.with(product.matrix->group_size);
    const int64_t step = rows_per_pass(x);
    for (int64_t row = 0; row < rows; row += step)
        kernels.gemm(*product.matrix, x, row, std::min(rows, row + step), begin, end, product.out + row * product.out_stride,
                     product.out_stride, product.accumulate);
}

// Blocks of the products one behind the other.
void multiply_range(const Kernels& kernels, const QuantizedInput& input, const Products& products, int64_t rows, Range blocks) {
    int64_t first = 0;
    for (const Product& product : products) {
        const int64_t count = num_blocks(*product.matrix);
        multiply_blocks(kernels, input, product, rows, std::max<int64_t>(blocks.begin - first, 0), std::min(blocks.end - first, count));
        first += count;
    }
}

int64_t total_blocks(const Products& products) {
    int64_t total = 0;
    for (const Product& product : products) total += num_blocks(*product.matrix);
    return total;
}

int64_t blocks_per_turn(const Products& products, Range part) {
    const int64_t most = kTurnBytes / block_bytes(*products.items[0].matrix);
    return std::max<int64_t>(1, std::min(most, (part.end - part.begin) / kTurnsPerPart));
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
        v.sums = v.sums_scratch.reserve<int32_t>(rows * v.groups);
    }
}

void QuantizedInput::quantize_row(const Kernels& kernels, const float* x, int64_t row) {
    for (int i = 0; i < num_variants_; ++i) {
        Variant& v = variants_[i];
        const int64_t first = row * v.groups;
        kernels.quantize_row(x, columns_, v.group_size, {v.p + first * v.group_size, v.a + first, v.s + first, v.sums + first});
    }
}

Activations QuantizedInput::with(int32_t group_size) const {
    for (int i = 0; i < num_variants_; ++i)
        if (variants_[i].group_size == group_size) {
            const Variant& v = variants_[i];
            return {v.p, v.a, v.s, v.sums, v.groups * v.group_size, v.groups};
        }
    return {};
}

Ahead first_weights(const Team& team, int thread, const Products& products) {
    int64_t block = share(total_blocks(products), thread, team.size()).begin;
    for (const Product& product : products) {
        const omni_matrix& m = *product.matrix;
        const int64_t bytes = (num_blocks(m) - block) * block_bytes(m);
        if (bytes > 0) {
            const uint8_t* begin = m.data + block * block_bytes(m);
            return {begin, begin + std::min(bytes, kAheadBytes)};
        }
        block -= num_blocks(m);
    }
    return {};
}

void multiply_share(const Team& team, int thread, const QuantizedInput& input, const Products& products, int64_t rows,
                    std::atomic<int64_t>* taken) {
    const int64_t total = total_blocks(products);
    for (int i = 0; i < team.size(); ++i) {
        const int owner = (thread + i) % team.size();
        const Range part = share(total, owner, team.size());
        const int64_t step = blocks_per_turn(products, part);
        // Reading first leaves the counter of a finished part where it is.
        while (part.begin + taken[owner].load(std::memory_order_relaxed) < part.end) {
            const int64_t begin = part.begin + taken[owner].fetch_add(step, std::memory_order_relaxed);
            if (begin < part.end) multiply_range(team.kernels(), input, products, rows, {begin, std::min(begin + step, part.end)});
        }
    }
}

}  // namespace omni
