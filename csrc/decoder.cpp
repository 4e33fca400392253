#include "include/decoder.h"

#include <algorithm>
#include <cstring>

namespace omni {

namespace {

// Rows that go through the stack together; more would only take more scratch.
constexpr int64_t kRowsPerPass = 512;

}  // namespace

Decoder::Decoder(Team& team, const omni_decoder_spec& spec, const omni_layer* layers)
    : team_(team),
      kernels_(team.kernels()),
      spec_(spec),
      layers_(layers, layers + spec.num_layers),
      taken_(new std::atomic<int64_t>[size_t(spec.num_layers) * kStages * size_t(team.size())]),
      q_width_(int64_t(spec.num_heads) * spec.head_dim),
      kv_width_(int64_t(spec.num_kv_heads) * spec.head_dim),
      qkv_width_(q_width_ + 2 * kv_width_) {
    for (const omni_layer& layer : layers_) {
        for (const omni_matrix* m : {&layer.q, &layer.k, &layer.v, &layer.head_gate, &layer.gate, &layer.up}) hidden_input_.serve(*m);
        attention_input_.serve(layer.o);
        mlp_input_.serve(layer.down);
        if (std::find(windows_.begin(), windows_.end(), layer.window) == windows_.end()) {
            windows_.push_back(layer.window);
            plans_.emplace_back(new AttentionPlan);
        }
    }
}

void Decoder::step(const omni_batch& batch) {
    for (int64_t row = 0; row < batch.num_rows; row += kRowsPerPass) {
        prepare(batch, row, std::min<int64_t>(batch.num_rows, row + kRowsPerPass));
        team_.run([&](int thread) { run_rows(batch, thread); });
    }
}

void Decoder::prepare(const omni_batch& batch, int64_t row_begin, int64_t row_end) {
    first_row_ = row_begin;
    num_rows_ = row_end - row_begin;
    reserve();
    for (size_t i = 0; i < windows_.size(); ++i) {
        AttentionShape shape = shape_of(layers_[0]);
        shape.window = windows_[i];
        plans_[i]->make(batch, row_begin, row_end, shape, team_.size());
    }
    for (size_t i = 0; i < size_t(spec_.num_layers) * kStages * size_t(team_.size()); ++i) taken_[i].store(0, std::memory_order_relaxed);
}

void Decoder::reserve() {
    hidden_input_.resize(num_rows_);
    attention_input_.resize(num_rows_);
    mlp_input_.resize(num_rows_);
    residual_ = residual_scratch_.reserve<float>(num_rows_ * spec_.hidden_size);
    normed_ = normed_scratch_.reserve<float>(num_rows_ * spec_.hidden_size);
    qkv_ = qkv_scratch_.reserve<float>(num_rows_ * qkv_width_);
    gates_ = gates_scratch_.reserve<float>(num_rows_ * spec_.num_heads);
    attention_ = attention_scratch_.reserve<float>(num_rows_ * q_width_);
    mlp_ = mlp_scratch_.reserve<float>(num_rows_ * 2 * spec_.intermediate_size);
}

void Decoder::run_rows(const omni_batch& batch, int thread) {
    embed_rows(batch, thread);
    for (int32_t i = 0; i < spec_.num_layers; ++i) run_layer(batch, i, thread);
    finish_rows(batch, thread);
}

// Rows belong to threads in the same way in every stage by rows, so such stages need no barrier between them.
// Who waits at a barrier fetches the weights of the next products.
void Decoder::run_layer(const omni_batch& batch, int32_t index, int thread) {
    const omni_layer& layer = layers_[size_t(index)];
    const Products projected = projections(layer), output = output_of(layer), gate_up = gate_and_up(layer), down = down_of(layer);
    Ahead ahead = first_weights(team_, thread, projected);
    normalize_rows(layer.input_norm, hidden_input_, thread);
    team_.barrier(ahead);
    multiply(index, kProject, hidden_input_, projected, thread);
    ahead = first_weights(team_, thread, output);
    team_.barrier(ahead);
    attend(batch, index, thread, ahead);
    multiply(index, kOutput, attention_input_, output, thread);
    ahead = first_weights(team_, thread, gate_up);
    team_.barrier(ahead);
    add_bias(layer.o_bias, spec_.hidden_size, residual_, thread);
    normalize_rows(layer.post_norm, hidden_input_, thread);
    team_.barrier(ahead);
    multiply(index, kGateUp, hidden_input_, gate_up, thread);
    ahead = first_weights(team_, thread, down);
    team_.barrier(ahead);
    activate_rows(thread);
    team_.barrier(ahead);
    multiply(index, kDown, mlp_input_, down, thread);
    if (index + 1 < spec_.num_layers) ahead = first_weights(team_, thread, projections(layers_[size_t(index) + 1]));
    team_.barrier(ahead);
}

void Decoder::multiply(int32_t layer, Stage stage, const QuantizedInput& input, const Products& products, int thread) {
    multiply_share(team_, thread, input, products, num_rows_, taken(layer, stage));
}

void Decoder::attend(const omni_batch& batch, int32_t index, int thread, Ahead& ahead) {
    const omni_layer& layer = layers_[size_t(index)];
    const omni_kv_cache& cache = caches_[size_t(index)];
    place_heads(batch, layer, cache, thread);
    team_.barrier(ahead);
    plan_of(layer).attend(kernels_, thread, cache, batch, shape_of(layer), qkv_, qkv_width_, *taken(index, kAttend));
    team_.barrier(ahead);
    join_rows(layer, thread);
    team_.barrier(ahead);
}

void Decoder::embed_rows(const omni_batch& batch, int thread) {
    const Range rows = rows_of(thread);
    for (int64_t row = rows.begin; row < rows.end; ++row) {
        float* out = residual_ + row * spec_.hidden_size;
        if (batch.token_ids)
            kernels_.dequantize_row(spec_.embedding, batch.token_ids[first_row_ + row], out);
        else
            std::memcpy(out, batch.inputs + (first_row_ + row) * spec_.hidden_size, sizeof(float) * size_t(spec_.hidden_size));
    }
}

void Decoder::normalize_rows(const float* weight, QuantizedInput& input, int thread) {
    const Range rows = rows_of(thread);
    for (int64_t row = rows.begin; row < rows.end; ++row) {
        float* normed = normed_ + row * spec_.hidden_size;
        kernels_.rms_norm_row(residual_ + row * spec_.hidden_size, weight, spec_.hidden_size, spec_.norm_eps, normed);
        input.quantize_row(kernels_, normed, row);
    }
}

Products Decoder::projections(const omni_layer& layer) const {
    return {{{&layer.q, qkv_, qkv_width_, false},
             {&layer.k, qkv_ + q_width_, qkv_width_, false},
             {&layer.v, qkv_ + q_width_ + kv_width_, qkv_width_, false},
             {&layer.head_gate, gates_, spec_.num_heads, false}},
            layer.head_gate.data ? 4 : 3};
}

Products Decoder::output_of(const omni_layer& layer) const { return {{{&layer.o, residual_, spec_.hidden_size, true}}, 1}; }

Products Decoder::gate_and_up(const omni_layer& layer) const {
    const int64_t width = 2 * int64_t(spec_.intermediate_size);
    return {{{&layer.gate, mlp_, width, false}, {&layer.up, mlp_ + spec_.intermediate_size, width, false}}, 2};
}

Products Decoder::down_of(const omni_layer& layer) const { return {{{&layer.down, residual_, spec_.hidden_size, true}}, 1}; }

// Heads of all rows are dealt out one by one: a single row keeps every thread busy.
void Decoder::place_heads(const omni_batch& batch, const omni_layer& layer, const omni_kv_cache& cache, int thread) {
    const int64_t per_row = spec_.num_heads + spec_.num_kv_heads;
    const Range items = share(num_rows_ * per_row, thread, team_.size());
    for (int64_t item = items.begin; item < items.end; ++item) {
        const int64_t row = item / per_row;
        const int32_t head = int32_t(item % per_row);
        if (head < spec_.num_heads)
            place_query(batch, layer, row, head);
        else
            place_key_value(batch, layer, cache, row, head - spec_.num_heads);
    }
}

void Decoder::place_query(const omni_batch& batch, const omni_layer& layer, int64_t row, int32_t head) {
    const float* bias = layer.q_bias ? layer.q_bias + head * spec_.head_dim : nullptr;
    turn(batch, layer, row, layer.q_norm, bias, qkv_ + row * qkv_width_ + head * spec_.head_dim);
}

void Decoder::place_key_value(const omni_batch& batch, const omni_layer& layer, const omni_kv_cache& cache, int64_t row, int32_t head) {
    float* key = qkv_ + row * qkv_width_ + q_width_ + head * spec_.head_dim;
    float* value = key + kv_width_;
    turn(batch, layer, row, layer.k_norm, layer.k_bias ? layer.k_bias + head * spec_.head_dim : nullptr, key);
    if (layer.v_bias)
        for (int32_t i = 0; i < spec_.head_dim; ++i) value[i] += layer.v_bias[head * spec_.head_dim + i];
    const int64_t slot = batch.slots[layer.kv_group][first_row_ + row];
    if (slot < 0) return;
    const CacheCell cell = cell_in(cache, spec_.head_dim, slot / cache.block_size, head, slot % cache.block_size);
    kernels_.store_cell(cell, key, value, spec_.head_dim, cache.kind);
}

void Decoder::turn(const omni_batch& batch, const omni_layer& layer, int64_t row, const float* norm, const float* bias, float* head) {
    if (bias)
        for (int32_t i = 0; i < spec_.head_dim; ++i) head[i] += bias[i];
    if (norm) kernels_.rms_norm_row(head, norm, spec_.head_dim, spec_.norm_eps, head);
    const float* cos_sin = layer.rope + batch.positions[first_row_ + row] * layer.rotary_dim;
    kernels_.rope_head(head, cos_sin, layer.rotary_dim, spec_.rope_style);
}

void Decoder::join_rows(const omni_layer& layer, int thread) {
    const AttentionShape shape = shape_of(layer);
    const AttentionPlan& plan = plan_of(layer);
    const Range rows = rows_of(thread);
    for (int64_t row = rows.begin; row < rows.end; ++row) {
        float* out = attention_ + row * q_width_;
        plan.join_row(kernels_, shape, row, out);
        if (layer.head_gate.data) {
            float* gates = gates_ + row * spec_.num_heads;
            kernels_.sigmoid(gates, spec_.num_heads);
            for (int64_t i = 0; i < q_width_; ++i) out[i] *= gates[i / spec_.head_dim];
        }
        attention_input_.quantize_row(kernels_, out, row);
    }
}

void Decoder::activate_rows(int thread) {
    const Range rows = rows_of(thread);
    const int64_t count = spec_.intermediate_size;
    for (int64_t row = rows.begin; row < rows.end; ++row) {
        float* gate = mlp_ + row * 2 * count;
        kernels_.gated_activation(gate, gate + count, count, spec_.activation, gate);
        mlp_input_.quantize_row(kernels_, gate, row);
    }
}

void Decoder::finish_rows(const omni_batch& batch, int thread) {
    const Range rows = rows_of(thread);
    for (int64_t row = rows.begin; row < rows.end; ++row)
        kernels_.rms_norm_row(residual_ + row * spec_.hidden_size, spec_.final_norm, spec_.hidden_size, spec_.norm_eps,
                              batch.hidden + (first_row_ + row) * spec_.hidden_size);
}

void Decoder::add_bias(const float* bias, int64_t width, float* rows_data, int thread) {
    if (!bias) return;
    const Range rows = rows_of(thread);
    for (int64_t row = rows.begin; row < rows.end; ++row)
        for (int64_t i = 0; i < width; ++i) rows_data[row * width + i] += bias[i];
}

AttentionShape Decoder::shape_of(const omni_layer& layer) const {
    return {spec_.num_heads, spec_.num_kv_heads, spec_.head_dim, layer.window, layer.kv_group, spec_.attention_scale};
}

AttentionPlan& Decoder::plan_of(const omni_layer& layer) {
    const auto found = std::find(windows_.begin(), windows_.end(), layer.window);
    return *plans_[size_t(found - windows_.begin())];
}

}  // namespace omni
