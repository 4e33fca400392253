// Attention of a batch over the paged cache, cut into tasks that the threads of a team take one by one. How it is cut changes no bit of
// the result.
#pragma once

#include <vector>

#include "team.h"

namespace omni {

struct AttentionShape {
    int32_t num_heads, num_kv_heads, head_dim;
    int32_t window;
    int32_t kv_group;
    float scale;

    int64_t width() const { return int64_t(num_heads) * head_dim; }
    int32_t heads_per_kv() const { return num_heads / num_kv_heads; }
};

// How the rows [row_begin, row_end) of a batch are cut. Depends on the window, so layers of one window share a plan.
class AttentionPlan {
public:
    void make(const omni_batch& batch, int64_t row_begin, int64_t row_end, const AttentionShape& shape, int num_threads);

    // Within a job of the team. `q` has the rows of the plan; `counter` starts at zero for each use.
    void attend(const Kernels& kernels, int thread, const omni_kv_cache& cache, const omni_batch& batch, const AttentionShape& shape,
                const float* q, int64_t q_stride, std::atomic<int64_t>& counter);
    // After a barrier: the finished heads of one row of the plan, out [heads * head_dim].
    void join_row(const Kernels& kernels, const AttentionShape& shape, int64_t row, float* out) const;

private:
    // Consecutive rows of one sequence and a part of the keys that they see.
    struct Span {
        int32_t sequence;
        int64_t row, num_rows;  // row of the plan
        int64_t first_index;    // place of the first row's token in the sequence
        int64_t key_begin, key_end;
        int64_t slot;           // of its first row in sums_ and states_
        bool is_split;          // has a slot for each row and part, else for each row
    };
    // Where a row's partial results are.
    struct Parts {
        int64_t slot, stride, count;
    };

    static Range keys_of(const Span& rows, const AttentionShape& shape);
    void add_rows(const Span& rows, const AttentionShape& shape);

    std::vector<Span> spans_;
    std::vector<Parts> parts_;
    int64_t num_slots_ = 0, tile_floats_ = 0, parts_per_task_ = 1;
    Scratch sums_scratch_, states_scratch_, tiles_scratch_;
    float *sums_ = nullptr, *states_ = nullptr, *tiles_ = nullptr;
};

}  // namespace omni
