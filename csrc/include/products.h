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
        Scratch p_scratch, a_scratch, s_scratch;
        int8_t* p;
        float *a, *s;
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

// Within a job: this thread's part of all products over the first `rows` rows of the input. `next_block` starts at zero.
void multiply_share(const Team& team, const QuantizedInput& input, const Product* products, int count, int64_t rows,
                    std::atomic<int64_t>& next_block);

}  // namespace omni
