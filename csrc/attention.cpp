#include "include/attention.h"

#include <algorithm>

namespace omni {

namespace {

// Queries (rows times heads of a group) that share one pass over keys and values.
constexpr int64_t kQueriesPerTask = 48;
// Queries up to which every part of a context is a task of its own; with more, where there are too few tasks for the threads.
constexpr int64_t kQueriesToSplit = 16;
constexpr int64_t kTasksPerThread = 6;

}  // namespace

void AttentionPlan::make(const omni_batch& batch, int64_t row_begin, int64_t row_end, const AttentionShape& shape, int num_threads) {
    spans_.clear();
    parts_.assign(size_t(row_end - row_begin), Parts{});
    num_slots_ = 0;
    const int64_t rows_per_task = std::max<int64_t>(1, kQueriesPerTask / shape.heads_per_kv());
    const int64_t tasks = (row_end - row_begin) * shape.num_kv_heads / std::min(rows_per_task, row_end - row_begin);
    const int64_t wanted_tasks = kTasksPerThread * num_threads;
    const auto for_each_span = [&](const auto& use) {
        for (int32_t sequence = 0; sequence < batch.num_seqs; ++sequence) {
            const int64_t begin = std::max<int64_t>(row_begin, batch.query_start[sequence]);
            const int64_t end = std::min<int64_t>(row_end, batch.query_start[sequence + 1]);
            // A row's place: the last row of the sequence has the last place.
            const int64_t offset = batch.seq_lens[sequence] - batch.query_start[sequence + 1];
            for (int64_t row = begin; row < end; row += rows_per_task) {
                const int64_t num_rows = std::min(rows_per_task, end - row);
                const bool is_split = tasks < wanted_tasks || num_rows * shape.heads_per_kv() <= kQueriesToSplit;
                use(Span{sequence, row - row_begin, num_rows, row + offset, 0, 0, 0, is_split});
            }
        }
    };
    int64_t parts = 0;
    for_each_span([&](const Span& rows) {
        const Range keys = keys_of(rows, shape);
        if (rows.is_split) parts += (keys.end - 1) / kPartKeys - keys.begin / kPartKeys + 1;
    });
    parts_per_task_ = std::max<int64_t>(1, parts * shape.num_kv_heads / wanted_tasks);
    for_each_span([&](const Span& rows) { add_rows(rows, shape); });
    tile_floats_ = attention_layout(rows_per_task * shape.heads_per_kv(), shape.head_dim).floats;
    tiles_ = tiles_scratch_.reserve<float>(tile_floats_ * num_threads);
    sums_ = sums_scratch_.reserve<float>(num_slots_ * shape.width());
    states_ = states_scratch_.reserve<float>(num_slots_ * 2 * shape.num_heads);
}

// Keys that at least one of the rows sees.
Range AttentionPlan::keys_of(const Span& rows, const AttentionShape& shape) {
    return {shape.window > 0 ? std::max<int64_t>(0, rows.first_index - shape.window + 1) : 0, rows.first_index + rows.num_rows};
}

// Cuts the keys of some rows into tasks. Without a split one task folds its parts itself, and has one slot for each row.
void AttentionPlan::add_rows(const Span& rows, const AttentionShape& shape) {
    const Range keys = keys_of(rows, shape);
    const int64_t first_part = keys.begin / kPartKeys;
    const int64_t count = rows.is_split ? (keys.end - 1) / kPartKeys - first_part + 1 : 1;
    const int64_t step = rows.is_split ? parts_per_task_ : count;
    for (int64_t part = 0; part < count; part += step) {
        Span span = rows;
        span.key_begin = part ? (first_part + part) * kPartKeys : keys.begin;
        span.key_end = part + step < count ? (first_part + part + step) * kPartKeys : keys.end;
        span.slot = num_slots_ + part * rows.num_rows;
        spans_.push_back(span);
    }
    for (int64_t i = 0; i < rows.num_rows; ++i) parts_[size_t(rows.row + i)] = {num_slots_ + i, rows.num_rows, count};
    num_slots_ += count * rows.num_rows;
}

void AttentionPlan::attend(const Kernels& kernels, int thread, const omni_kv_cache& cache, const omni_batch& batch,
                           const AttentionShape& shape, const float* q, int64_t q_stride, std::atomic<int64_t>& counter) {
    const int64_t tasks = int64_t(spans_.size()) * shape.num_kv_heads;
    const int64_t group_floats = int64_t(shape.heads_per_kv()) * shape.head_dim;
    // Last spans first: they have the most keys, and a long task at the end would leave the others waiting.
    for (int64_t i; (i = counter.fetch_add(1, std::memory_order_relaxed)) < tasks;) {
        const Span& span = spans_[spans_.size() - 1 - size_t(i / shape.num_kv_heads)];
        const int32_t kv_head = int32_t(i % shape.num_kv_heads);
        AttentionTask task;
        task.cache = &cache;
        task.block_table = batch.block_tables[shape.kv_group] + span.sequence * batch.block_table_strides[shape.kv_group];
        task.kv_head = kv_head;
        task.head_dim = shape.head_dim;
        task.heads_per_kv = shape.heads_per_kv();
        task.window = shape.window;
        task.first_index = span.first_index;
        task.num_rows = span.num_rows;
        task.key_begin = span.key_begin;
        task.key_end = span.key_end;
        task.scale = shape.scale;
        task.is_split = span.is_split;
        task.q = q + span.row * q_stride + kv_head * group_floats;
        task.q_stride = q_stride;
        task.out = sums_ + span.slot * shape.width() + kv_head * group_floats;
        task.out_stride = shape.width();
        task.state = states_ + 2 * (span.slot * shape.num_heads + int64_t(kv_head) * shape.heads_per_kv());
        task.state_stride = 2 * shape.num_heads;
        task.scratch = tiles_ + thread * tile_floats_;
        kernels.attention(task);
    }
}

void AttentionPlan::join_row(const Kernels& kernels, const AttentionShape& shape, int64_t row, float* out) const {
    const Parts& parts = parts_[size_t(row)];
    for (int32_t head = 0; head < shape.num_heads; ++head)
        kernels.join_attention(sums_ + parts.slot * shape.width() + head * shape.head_dim, parts.stride * shape.width(),
                               states_ + 2 * (parts.slot * shape.num_heads + head), 2 * parts.stride * shape.num_heads, parts.count,
                               shape.head_dim, out + head * shape.head_dim);
}

}  // namespace omni
