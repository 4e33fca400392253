// The layer stack of a decoder over a batch of rows.
#pragma once

#include <memory>
#include <vector>

#include "attention.h"
#include "products.h"

namespace omni {

class Decoder {
public:
    Decoder(Team& team, const omni_decoder_spec& spec, const omni_layer* layers);

    void bind_cache(const omni_kv_cache* caches) { caches_.assign(caches, caches + spec_.num_layers); }
    // The batch has been checked.
    void step(const omni_batch& batch);

    const omni_decoder_spec& spec() const { return spec_; }
    const std::vector<omni_layer>& layers() const { return layers_; }
    const std::vector<omni_kv_cache>& caches() const { return caches_; }  // empty until bound

private:
    // Stages whose work the threads take bit by bit.
    enum Stage { kProject, kAttend, kOutput, kGateUp, kDown, kStages };

    void prepare(const omni_batch& batch, int64_t row_begin, int64_t row_end);
    void reserve();
    void run_rows(const omni_batch& batch, int thread);
    void run_layer(const omni_batch& batch, int32_t index, int thread);
    void multiply(int32_t layer, Stage stage, const QuantizedInput& input, const Products& products, int thread);
    void attend(const omni_batch& batch, int32_t layer, int thread, Ahead& ahead);
    void embed_rows(const omni_batch& batch, int thread);
    void normalize_rows(const float* weight, QuantizedInput& input, int thread);
    void place_heads(const omni_batch& batch, const omni_layer& layer, const omni_kv_cache& cache, int thread);
    void place_query(const omni_batch& batch, const omni_layer& layer, int64_t row, int32_t head);
    void place_key_value(const omni_batch& batch, const omni_layer& layer, const omni_kv_cache& cache, int64_t row, int32_t head);
    void turn(const omni_batch& batch, const omni_layer& layer, int64_t row, const float* norm, const float* bias, float* head);
    void join_rows(const omni_layer& layer, int thread);
    void activate_rows(int thread);
    void finish_rows(const omni_batch& batch, int thread);
    void add_bias(const float* bias, int64_t width, float* rows, int thread);

    Products projections(const omni_layer& layer) const;
    Products output_of(const omni_layer& layer) const;
    Products gate_and_up(const omni_layer& layer) const;
    Products down_of(const omni_layer& layer) const;
    std::atomic<int64_t>* taken(int32_t layer, Stage stage) { return &taken_[(size_t(layer) * kStages + stage) * size_t(team_.size())]; }
    AttentionShape shape_of(const omni_layer& layer) const;
    AttentionPlan& plan_of(const omni_layer& layer);
    Range rows_of(int thread) const { return share(num_rows_, thread, team_.size()); }

    Team& team_;
    const Kernels& kernels_;
    const omni_decoder_spec spec_;
    const std::vector<omni_layer> layers_;
    std::vector<omni_kv_cache> caches_;
    std::vector<int32_t> windows_;  // distinct, each with its plan
    std::vector<std::unique_ptr<AttentionPlan>> plans_;
    std::unique_ptr<std::atomic<int64_t>[]> taken_;  // [num_layers, kStages, threads]

    const int64_t q_width_, kv_width_, qkv_width_;
    int64_t first_row_ = 0, num_rows_ = 0;
    QuantizedInput hidden_input_, attention_input_, mlp_input_;
    Scratch residual_scratch_, normed_scratch_, qkv_scratch_, gates_scratch_, attention_scratch_, mlp_scratch_;
    float *residual_ = nullptr, *normed_ = nullptr;  // [rows, hidden]
    float* qkv_ = nullptr;                           // [rows, q_width + 2 kv_width]
    float* gates_ = nullptr;                         // [rows, heads]
    float* attention_ = nullptr;                     // [rows, q_width]
    float* mlp_ = nullptr;                           // [rows, 2 intermediate]: gate, then up
};

}  // namespace omni
