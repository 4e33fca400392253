#include "include/checks.h"

#include <algorithm>

namespace omni {

namespace {

// Bounds that keep products of sizes within 64 bits.
constexpr int64_t kMaxBlockSize = 1 << 16, kMaxHeads = 1 << 16, kMaxBytes = int64_t(1) << 62;

std::string text(int64_t value) { return std::to_string(value); }

int64_t cell_size(const omni_kv_cache& cache, int32_t head_dim) {
    return cache.kind == OMNI_KV_BFLOAT16 ? 4 * int64_t(head_dim) : 2 * int64_t(head_dim) + 8;
}

void check_layer(const omni_decoder_spec& spec, const omni_layer& layer) {
    const int64_t q_width = int64_t(spec.num_heads) * spec.head_dim, kv_width = int64_t(spec.num_kv_heads) * spec.head_dim;
    check_matrix_shape("q", layer.q, q_width, spec.hidden_size);
    check_matrix_shape("k", layer.k, kv_width, spec.hidden_size);
    check_matrix_shape("v", layer.v, kv_width, spec.hidden_size);
    check_matrix_shape("o", layer.o, spec.hidden_size, q_width);
    check_matrix_shape("gate", layer.gate, spec.intermediate_size, spec.hidden_size);
    check_matrix_shape("up", layer.up, spec.intermediate_size, spec.hidden_size);
    check_matrix_shape("down", layer.down, spec.hidden_size, spec.intermediate_size);
    check_matrix_shape("head_gate", layer.head_gate, spec.num_heads, spec.hidden_size, true);
    check_pointer("input_norm", layer.input_norm);
    check_pointer("post_norm", layer.post_norm);
    check_pointer("rope", layer.rope);
    if (layer.rotary_dim < 2 || layer.rotary_dim > spec.head_dim || layer.rotary_dim % 2)
        refuse("rotary_dim", text(layer.rotary_dim), "an even number from 2 to head_dim " + text(spec.head_dim));
    check_not_negative("window", layer.window);
    if (layer.kv_group < 0 || layer.kv_group >= spec.num_kv_groups)
        refuse("kv_group", text(layer.kv_group), "0 to num_kv_groups " + text(spec.num_kv_groups) + " exclusive");
}

}  // namespace

void refuse(const char* argument, const std::string& given, const std::string& accepted) {
    throw Refused(std::string(argument) + " is " + given + ", accepted: " + accepted);
}

void check_positive(const char* argument, int64_t value) {
    if (value < 1) refuse(argument, text(value), "1 or more");
}

void check_not_negative(const char* argument, int64_t value) {
    if (value < 0) refuse(argument, text(value), "0 or more");
}

void check_range(const char* argument, int64_t value, int64_t limit) {
    if (value < 0 || value >= limit) refuse(argument, text(value), "0 to " + text(limit) + " exclusive");
}

void check_pointers(std::initializer_list<NamedPointer> pointers) {
    for (const NamedPointer& each : pointers) check_pointer(each.name, each.pointer);
}

void check_pointer(const char* argument, const void* pointer) {
    if (!pointer) refuse(argument, "NULL", "an address");
}

void check_group_size(int32_t group_size) {
    if (group_size != 32 && group_size != 64 && group_size != 128) refuse("group_size", text(group_size), "32, 64 or 128");
}

void check_matrix(const char* argument, const omni_matrix& matrix) {
    check_pointer(argument, matrix.data);
    if (reinterpret_cast<uintptr_t>(matrix.data) % 64) refuse(argument, "not aligned", "an address that is a multiple of 64");
    check_positive("rows", matrix.rows);
    check_positive("columns", matrix.columns);
    if (matrix.bits != 4 && matrix.bits != 8) refuse("bits", text(matrix.bits), "4 or 8");
    check_group_size(matrix.group_size);
}

void check_matrix_shape(const char* argument, const omni_matrix& matrix, int64_t rows, int64_t columns, bool optional) {
    if (optional && !matrix.data) return;
    check_matrix(argument, matrix);
    if (matrix.rows != rows || matrix.columns != columns)
        refuse(argument, text(matrix.rows) + " x " + text(matrix.columns), text(rows) + " x " + text(columns));
}

void check_heads(int32_t num_heads, int32_t num_kv_heads, int32_t head_dim) {
    check_positive("num_heads", num_heads);
    check_positive("num_kv_heads", num_kv_heads);
    if (num_heads > kMaxHeads) refuse("num_heads", text(num_heads), "at most " + text(kMaxHeads));
    if (num_heads % num_kv_heads) refuse("num_heads", text(num_heads), "a multiple of num_kv_heads " + text(num_kv_heads));
    if (head_dim < 8 || head_dim > 512 || head_dim % 8) refuse("head_dim", text(head_dim), "a multiple of 8, at most 512");
}

void check_cache(const omni_kv_cache& cache, int32_t num_kv_heads, int32_t head_dim) {
    check_pointer("cache data", cache.data);
    check_positive("num_blocks", cache.num_blocks);
    check_positive("block_size", cache.block_size);
    if (cache.block_size > kMaxBlockSize) refuse("block_size", text(cache.block_size), "at most " + text(kMaxBlockSize));
    if (cache.head_stride < 0 || cache.head_stride > kMaxBytes / num_kv_heads || cache.block_stride < 0 ||
        cache.block_stride > kMaxBytes / cache.num_blocks)
        refuse("head_stride, block_stride", text(cache.head_stride) + ", " + text(cache.block_stride), "a cache of at most 2^62 bytes");
    if (cache.kind != OMNI_KV_BFLOAT16 && cache.kind != OMNI_KV_INT8) refuse("cache kind", text(cache.kind), "0 (bfloat16) or 1 (int8)");
    if (cache.block_size % kChunkKeys) refuse("block_size", text(cache.block_size), "a multiple of 16");
    const int64_t page = cell_size(cache, head_dim) * cache.block_size;
    if (cache.head_stride < page) refuse("head_stride", text(cache.head_stride), "at least a head's " + text(page) + " bytes of a page");
    if (cache.block_stride < cache.head_stride * (num_kv_heads - 1) + page)
        refuse("block_stride", text(cache.block_stride), "at least a page's bytes for " + text(num_kv_heads) + " heads");
    // bfloat16 is read two bytes at a time, scales of int8 four; every other read takes any address.
    if (reinterpret_cast<uintptr_t>(cache.data) % 4 || cache.head_stride % 4 || cache.block_stride % 4)
        refuse("cache data", "not aligned", "addresses and strides that are multiples of 4");
}

void check_slots(const omni_kv_cache& cache, const int64_t* slots, int64_t count) {
    const int64_t limit = cache.num_blocks * cache.block_size;
    for (int64_t i = 0; i < count; ++i)
        if (slots[i] >= limit) refuse("slot", text(slots[i]), "below num_blocks * block_size " + text(limit));
}

void check_sampling(const omni_sampling& settings) {
    // Written so that what is not a number is refused too.
    if (!(settings.temperature >= 0)) refuse("temperature", std::to_string(settings.temperature), "0 or more");
    if (!(settings.top_p > 0 && settings.top_p <= 1)) refuse("top_p", std::to_string(settings.top_p), "above 0, at most 1");
    if (!(settings.min_p >= 0 && settings.min_p <= 1)) refuse("min_p", std::to_string(settings.min_p), "0 to 1");
}

void check_decoder(const omni_decoder_spec& spec, const omni_layer* layers) {
    check_positive("num_layers", spec.num_layers);
    check_positive("hidden_size", spec.hidden_size);
    check_positive("intermediate_size", spec.intermediate_size);
    check_positive("num_kv_groups", spec.num_kv_groups);
    check_positive("max_position", spec.max_position);
    check_heads(spec.num_heads, spec.num_kv_heads, spec.head_dim);
    check_pointer("final_norm", spec.final_norm);
    check_range("activation", spec.activation, 2);
    check_range("rope_style", spec.rope_style, 2);
    if (spec.embedding.data) check_matrix_shape("embedding", spec.embedding, spec.embedding.rows, spec.hidden_size);
    check_pointer("layers", layers);
    for (int32_t i = 0; i < spec.num_layers; ++i) try {
            check_layer(spec, layers[i]);
        } catch (const Refused& error) {
            throw Refused("layer " + text(i) + ": " + error.what());
        }
}

void check_sequences(const omni_batch& batch, const omni_kv_cache& cache, int32_t kv_group, int32_t window) {
    check_pointer("query_start", batch.query_start);
    check_pointer("seq_lens", batch.seq_lens);
    check_pointer("block_tables", batch.block_tables);
    check_pointer("block_table_strides", batch.block_table_strides);
    check_pointer("block table", batch.block_tables[kv_group]);
    if (batch.query_start[0] != 0 || batch.query_start[batch.num_seqs] != batch.num_rows)
        refuse("query_start", text(batch.query_start[0]) + " to " + text(batch.query_start[batch.num_seqs]), "0 to num_rows");
    for (int32_t i = 0; i < batch.num_seqs; ++i) {
        const int64_t rows = int64_t(batch.query_start[i + 1]) - batch.query_start[i], length = batch.seq_lens[i];
        if (rows < 0) refuse("query_start", "falling", "a rising sequence");
        if (rows == 0) continue;
        if (length < rows) refuse("seq_lens", text(length), "at least the sequence's " + text(rows) + " rows");
        if ((length - 1) / cache.block_size >= batch.block_table_strides[kv_group])
            refuse("seq_lens", text(length), "at most what the block table's " + text(batch.block_table_strides[kv_group]) + " blocks hold");
        // Blocks that no row of the window reaches may have been given back.
        const int64_t first = window > 0 ? std::max<int64_t>(0, length - rows - window + 1) : 0;
        const int32_t* table = batch.block_tables[kv_group] + i * batch.block_table_strides[kv_group];
        for (int64_t block = first / cache.block_size; block <= (length - 1) / cache.block_size; ++block)
            check_range("block table entry", table[block], cache.num_blocks);
    }
}

void check_batch(const Decoder& decoder, const omni_batch& batch) {
    const omni_decoder_spec& spec = decoder.spec();
    if (decoder.caches().empty()) refuse("cache", "not bound", "omni_decoder_bind_cache before a step");
    check_positive("num_rows", batch.num_rows);
    check_positive("num_seqs", batch.num_seqs);
    check_pointer("positions", batch.positions);
    check_pointer("slots", batch.slots);
    if (batch.num_groups < spec.num_kv_groups)
        refuse("num_groups", text(batch.num_groups), "at least the decoder's " + text(spec.num_kv_groups) + " KV groups");
    check_pointer("hidden", batch.hidden);
    if (batch.token_ids)
        check_pointer("embedding", spec.embedding.data);
    else
        check_pointer("inputs", batch.inputs);
    for (int32_t row = 0; row < batch.num_rows; ++row) {
        check_range("position", batch.positions[row], spec.max_position);
        if (batch.token_ids) check_range("token id", batch.token_ids[row], spec.embedding.rows);
    }
    // Layers of one group and window are alike; the first of each stands for them.
    std::vector<std::pair<int32_t, int32_t>> seen;
    for (size_t i = 0; i < decoder.layers().size(); ++i) {
        const std::pair<int32_t, int32_t> kind(decoder.layers()[i].kv_group, decoder.layers()[i].window);
        if (std::find(seen.begin(), seen.end(), kind) != seen.end()) continue;
        seen.push_back(kind);
        check_pointer("slots of a group", batch.slots[kind.first]);
        check_slots(decoder.caches()[i], batch.slots[kind.first], batch.num_rows);
        check_sequences(batch, decoder.caches()[i], kind.first, kind.second);
    }
}

}  // namespace omni
