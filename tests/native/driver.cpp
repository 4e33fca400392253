// Runs operations of the native core for a process that cannot load it: other processors, sanitizers. `arms.py` talks to it.
//
//   driver <isa> <threads>
//
//   request | name: u32 length, text | ints: u32 count, i64 each | floats: u32 count, f64 each | arrays: u32 count, each u64 bytes, data |
//   answer  | code: i32 | 0: arrays, as above; else: u32 length, text |
//
// Bytes of 2^64 - 1 stand for NULL. Every array has memory of exactly its size, so that a sanitizer sees a step beyond it. It ends
// with the input.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "omni_native.h"

namespace {

constexpr uint64_t kNull = UINT64_MAX;

struct Buffer {
    explicit Buffer(uint64_t size) : bytes(size) {
        if (posix_memalign(&data, 64, size ? size : 1)) throw std::bad_alloc();
    }
    ~Buffer() { free(data); }
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;

    void* data = nullptr;
    uint64_t bytes;
};

bool read_exactly(void* data, size_t bytes) { return fread(data, 1, bytes, stdin) == bytes; }

void write_exactly(const void* data, size_t bytes) {
    if (fwrite(data, 1, bytes, stdout) != bytes) exit(3);
}

template <typename T>
T read_number() {
    T value;
    if (!read_exactly(&value, sizeof value)) exit(2);
    return value;
}

template <typename T>
void write_number(T value) {
    write_exactly(&value, sizeof value);
}

// What a batch points to.
struct BatchTables {
    omni_batch batch = {};
    std::vector<const int64_t*> slots;
    std::vector<const int32_t*> tables;
    std::vector<int64_t> strides;
};

// A request, taken apart from front to back.
class Request {
public:
    bool read() {
        uint32_t length;
        if (!read_exactly(&length, sizeof length)) return false;
        name.resize(length);
        if (!read_exactly(&name[0], length)) exit(2);
        for (uint32_t i = read_number<uint32_t>(); i > 0; --i) ints_.push_back(read_number<int64_t>());
        for (uint32_t i = read_number<uint32_t>(); i > 0; --i) floats_.push_back(read_number<double>());
        for (uint32_t i = read_number<uint32_t>(); i > 0; --i) read_array();
        return true;
    }

    int64_t next_int() { return ints_.at(next_int_++); }
    float next_float() { return float(floats_.at(next_float_++)); }

    Buffer* next_buffer() { return arrays_.at(next_array_++).get(); }

    template <typename T>
    T* next_array() {
        Buffer* buffer = next_buffer();
        return buffer ? static_cast<T*>(buffer->data) : nullptr;
    }

    omni_matrix next_matrix() {
        omni_matrix m = {};
        m.rows = next_int();
        m.columns = next_int();
        m.bits = int32_t(next_int());
        m.group_size = int32_t(next_int());
        m.data = next_array<uint8_t>();
        return m;
    }

    omni_kv_cache next_cache() {
        omni_kv_cache cache = {};
        cache.num_blocks = next_int();
        cache.block_stride = next_int();
        cache.head_stride = next_int();
        cache.block_size = int32_t(next_int());
        cache.kind = int32_t(next_int());
        Buffer* buffer = next_buffer();
        cache.data = static_cast<uint8_t*>(buffer->data);
        answer.push_back(buffer);
        return cache;
    }

    void next_batch(BatchTables& tables) {
        omni_batch& batch = tables.batch;
        batch.num_rows = int32_t(next_int());
        batch.num_seqs = int32_t(next_int());
        batch.token_ids = next_array<int32_t>();
        batch.inputs = next_array<float>();
        batch.positions = next_array<int64_t>();
        batch.query_start = next_array<int32_t>();
        batch.seq_lens = next_array<int32_t>();
        batch.num_groups = int32_t(next_int());
        for (int32_t group = 0; group < batch.num_groups; ++group) {
            tables.strides.push_back(next_int());
            tables.slots.push_back(next_array<int64_t>());
            tables.tables.push_back(next_array<int32_t>());
        }
        batch.slots = tables.slots.data();
        batch.block_tables = tables.tables.data();
        batch.block_table_strides = tables.strides.data();
    }

    omni_layer next_layer() {
        omni_layer layer = {};
        for (omni_matrix* m : {&layer.q, &layer.k, &layer.v, &layer.o, &layer.gate, &layer.up, &layer.down, &layer.head_gate})
            *m = next_matrix();
        for (const float** vector : {&layer.input_norm, &layer.post_norm, &layer.q_norm, &layer.k_norm, &layer.q_bias, &layer.k_bias,
                                     &layer.v_bias, &layer.o_bias, &layer.rope})
            *vector = next_array<float>();
        layer.rotary_dim = int32_t(next_int());
        layer.window = int32_t(next_int());
        layer.kv_group = int32_t(next_int());
        return layer;
    }

    // Memory of the answer, sent back after the operation.
    template <typename T>
    T* result(int64_t count) {
        results_.emplace_back(new Buffer(sizeof(T) * uint64_t(count)));
        answer.push_back(results_.back().get());
        return static_cast<T*>(results_.back()->data);
    }

    std::string name;
    std::vector<Buffer*> answer;

private:
    void read_array() {
        const uint64_t bytes = read_number<uint64_t>();
        if (bytes == kNull) {
            arrays_.emplace_back();
            return;
        }
        arrays_.emplace_back(new Buffer(bytes));
        if (!read_exactly(arrays_.back()->data, bytes)) exit(2);
    }

    std::vector<int64_t> ints_;
    std::vector<double> floats_;
    std::vector<std::unique_ptr<Buffer>> arrays_;
    std::vector<std::unique_ptr<Buffer>> results_;
    size_t next_int_ = 0, next_float_ = 0, next_array_ = 0;
};

int32_t quantize_rows(omni_team* team, Request& r) {
    const int64_t rows = r.next_int(), columns = r.next_int(), group_size = r.next_int();
    const int64_t groups = (columns + group_size - 1) / group_size;
    int8_t* p = r.result<int8_t>(rows * groups * group_size);
    float *a = r.result<float>(rows * groups), *s = r.result<float>(rows * groups);
    return omni_quantize_rows(team, r.next_array<float>(), rows, columns, int32_t(group_size), p, a, s);
}

int32_t linear(omni_team* team, Request& r) {
    const omni_matrix matrix = r.next_matrix();
    const int64_t rows = r.next_int();
    return omni_linear(team, &matrix, r.next_array<float>(), rows, r.result<float>(rows * matrix.rows));
}

int32_t dequantize_rows(omni_team* team, Request& r) {
    const omni_matrix matrix = r.next_matrix();
    const int64_t count = r.next_int();
    return omni_dequantize_rows(team, &matrix, r.next_array<int32_t>(), count, r.result<float>(count * matrix.columns));
}

int32_t dequantize_panel(omni_team* team, Request& r) {
    const omni_matrix matrix = r.next_matrix();
    const int64_t begin = r.next_int(), count = r.next_int();
    return omni_dequantize_panel(team, &matrix, begin, count, r.result<uint16_t>(count * matrix.columns));
}

int32_t rms_norm(omni_team* team, Request& r) {
    const int64_t rows = r.next_int(), columns = r.next_int();
    const float *x = r.next_array<float>(), *weight = r.next_array<float>();
    return omni_rms_norm(team, x, weight, rows, columns, r.next_float(), r.result<float>(rows * columns));
}

int32_t rope_table(omni_team* team, Request& r) {
    const int64_t count = r.next_int(), positions = r.next_int();
    const double* frequencies = r.next_array<double>();
    return omni_rope_table(team, frequencies, count, positions, r.next_float(), r.result<float>(positions * 2 * count));
}

int32_t rope(omni_team* team, Request& r) {
    const int64_t rows = r.next_int();
    const int32_t heads = int32_t(r.next_int()), head_dim = int32_t(r.next_int()), rotary_dim = int32_t(r.next_int());
    const int32_t style = int32_t(r.next_int());
    const int64_t num_positions = r.next_int();
    Buffer* x = r.next_buffer();
    r.answer.push_back(x);
    const int64_t* positions = r.next_array<int64_t>();
    return omni_rope(team, static_cast<float*>(x->data), positions, r.next_array<float>(), num_positions, rows, heads, head_dim, rotary_dim,
                     style);
}

int32_t gated_activation(omni_team* team, Request& r) {
    const int64_t count = r.next_int();
    const int32_t activation = int32_t(r.next_int());
    const float *gate = r.next_array<float>(), *up = r.next_array<float>();
    return omni_gated_activation(team, gate, up, count, activation, r.result<float>(count));
}

int32_t store_kv(omni_team* team, Request& r) {
    const omni_kv_cache cache = r.next_cache();
    const int64_t rows = r.next_int();
    const int32_t heads = int32_t(r.next_int()), head_dim = int32_t(r.next_int());
    const float *k = r.next_array<float>(), *v = r.next_array<float>();
    return omni_store_kv(team, &cache, k, v, r.next_array<int64_t>(), rows, heads, head_dim);
}

int32_t attention(omni_team* team, Request& r) {
    const omni_kv_cache cache = r.next_cache();
    BatchTables tables;
    r.next_batch(tables);
    const int32_t kv_group = int32_t(r.next_int()), heads = int32_t(r.next_int()), kv_heads = int32_t(r.next_int());
    const int32_t head_dim = int32_t(r.next_int()), window = int32_t(r.next_int());
    float* out = r.result<float>(int64_t(tables.batch.num_rows) * heads * head_dim);
    return omni_attention(team, &cache, &tables.batch, kv_group, r.next_array<float>(), heads, kv_heads, head_dim, window, r.next_float(),
                          out);
}

omni_decoder_spec next_spec(Request& r) {
    omni_decoder_spec spec = {};
    for (int32_t* field : {&spec.num_layers, &spec.hidden_size, &spec.intermediate_size, &spec.num_heads, &spec.num_kv_heads,
                           &spec.head_dim, &spec.activation, &spec.rope_style, &spec.num_kv_groups, &spec.max_position})
        *field = int32_t(r.next_int());
    spec.norm_eps = r.next_float();
    spec.attention_scale = r.next_float();
    spec.final_norm = r.next_array<float>();
    spec.embedding = r.next_matrix();
    return spec;
}

int32_t decoder_steps(omni_team* team, Request& r) {
    const omni_decoder_spec spec = next_spec(r);
    std::vector<omni_layer> layers;
    std::vector<omni_kv_cache> caches;
    for (int32_t i = 0; i < spec.num_layers; ++i) layers.push_back(r.next_layer());
    for (int32_t i = 0; i < spec.num_layers; ++i) caches.push_back(r.next_cache());
    omni_decoder* decoder = omni_decoder_create(team, &spec, layers.data());
    if (!decoder) return OMNI_ERROR_ARGUMENT;
    int32_t code = omni_decoder_bind_cache(decoder, caches.data());
    for (int64_t steps = r.next_int(); steps > 0 && code == OMNI_OK; --steps) {
        BatchTables tables;
        r.next_batch(tables);
        tables.batch.hidden = r.result<float>(int64_t(tables.batch.num_rows) * spec.hidden_size);
        code = omni_decoder_step(decoder, &tables.batch);
    }
    omni_decoder_destroy(decoder);
    return code;
}

int32_t log_softmax(omni_team* team, Request& r) {
    const int64_t rows = r.next_int(), columns = r.next_int();
    return omni_log_softmax(team, r.next_array<float>(), rows, columns, r.result<float>(rows * columns));
}

int32_t top(omni_team* team, Request& r) {
    const int64_t rows = r.next_int(), columns = r.next_int(), count = r.next_int();
    return omni_top(team, r.next_array<float>(), rows, columns, count, r.result<int64_t>(rows * count));
}

int32_t sample(omni_team* team, Request& r) {
    const int64_t rows = r.next_int(), columns = r.next_int();
    const float* logits = r.next_array<float>();
    return omni_sample(team, logits, rows, columns, r.next_array<omni_sampling>(), r.result<int64_t>(rows));
}

const std::map<std::string, std::function<int32_t(omni_team*, Request&)>> operations = {
    {"quantize_rows", quantize_rows},
    {"linear", linear},
    {"dequantize_rows", dequantize_rows},
    {"dequantize_panel", dequantize_panel},
    {"rms_norm", rms_norm},
    {"rope_table", rope_table},
    {"rope", rope},
    {"gated_activation", gated_activation},
    {"store_kv", store_kv},
    {"attention", attention},
    {"decoder_steps", decoder_steps},
    {"log_softmax", log_softmax},
    {"top", top},
    {"sample", sample},
};

void answer(int32_t code, const Request& request) {
    write_number(code);
    if (code == OMNI_OK) {
        write_number(uint32_t(request.answer.size()));
        for (const Buffer* buffer : request.answer) {
            write_number(buffer->bytes);
            write_exactly(buffer->data, buffer->bytes);
        }
    } else {
        const std::string text = omni_last_error();
        write_number(uint32_t(text.size()));
        write_exactly(text.data(), text.size());
    }
    fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
    if (argc != 3) return 2;
    omni_team* team = omni_team_create(atoi(argv[2]), argv[1], 100);
    if (!team) {
        fprintf(stderr, "%s\n", omni_last_error());
        return 2;
    }
    for (;;) {
        Request request;
        if (!request.read()) break;
        const int32_t code = operations.at(request.name)(team, request);
        answer(code, request);
    }
    omni_team_destroy(team);
    return 0;
}
