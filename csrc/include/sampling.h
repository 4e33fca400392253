// Choosing tokens: largest logits, log-probabilities, and draws whose bits depend on nothing but logits, settings, seed and step.
#pragma once

#include <vector>

#include "kernel_table.h"

namespace omni {

// Memory of one thread, for rows of up to `columns` logits.
struct SamplingScratch {
    explicit SamplingScratch(int64_t columns) : scaled(size_t(columns)), weights(size_t(columns)) { kept.reserve(size_t(columns)); }

    std::vector<float> scaled, weights;
    std::vector<int64_t> kept;
};

// 53 random bits as a number in [0, 1), of the counter (seed, step) alone.
double uniform(uint64_t seed, uint64_t step);

void log_softmax_row(const Kernels& kernels, const float* logits, int64_t columns, float* out);
// Ids of the `count` largest, the lower id first among equals; `ids` has room for `columns`.
void top_row(const float* values, int64_t columns, int64_t count, int64_t* ids);
int64_t sample_row(const Kernels& kernels, const float* logits, int64_t columns, const omni_sampling& settings, SamplingScratch& scratch);

}  // namespace omni
