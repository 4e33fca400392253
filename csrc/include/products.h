// Matrix products of a stage: an input that is quantized once, and matrices whose row blocks the threads share.
#pragma once

#include <vector>

#include "team.h"

namespace omni {

// Rows of activations, quantized once for each group size that the matrices of this input have.
class QuantizedInput {
public:
    // Adds a matrix that may be multiplied with it; absent ones are skipped.
    void serve(const omni_matrix& matrix);
    // Forgets all others.
    void serve_only(const omni_matrix& matrix) {
        num_variants_ = 0;
        serve(matrix);
    }
    void resize(int64_t rows);
    void quantize_row(const Kernels& kernels, const float* x, int64_t row);
    Activations with(int32_t group_size) const;

private:
    struct Variant {
        int32_t group_size;
        int64_t groups;
        Scratch p_scratch, a_scratch, s_scratch, sums_scratch;
        int8_t* p;
        float *a, *s;
        int32_t* sums;
    };
    int64_t columns_ = 0;
    Variant variants_[3];
    int num_variants_ = 0;
};

struct Product {
    const omni_matrix* matrix;
    float* out;
    int64_t out_stride;
    bool accumulate;
};

// Products of one input, whose row blocks are shared as if they were one matrix.
struct Products {
    Product items[4];
    int count;

    const Product* begin() const { return items; }
    const Product* end() const { return items + count; }
};

// Weights that a thread reads first in multiply_share, as much as a cache holds until then.
Ahead first_weights(const Team& team, int thread, const Products& products);

// Within a job: this thread's part of all products over the first `rows` rows of the input, and then what others have left of theirs: on
// a shared machine one core may be slower than the other. Each thread reads a part from end to end, which memory serves best.
// `taken` [threads] starts at zero.
void multiply_share(const Team& team, int thread, const QuantizedInput& input, const Products& products, int64_t rows,
                    std::atomic<int64_t>* taken);

}  // namespace omni
