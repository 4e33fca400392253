// What callers may pass. Each function throws Refused, whose text names the argument, what was given and what is accepted.
#pragma once

#include <initializer_list>
#include <stdexcept>
#include <string>

#include "decoder.h"

namespace omni {

struct Refused : std::runtime_error {
    using std::runtime_error::runtime_error;
};

[[noreturn]] void refuse(const char* argument, const std::string& given, const std::string& accepted);

struct NamedPointer {
    const char* name;
    const void* pointer;
};

void check_pointers(std::initializer_list<NamedPointer> pointers);
// 0 to `limit`, exclusive.
void check_range(const char* argument, int64_t value, int64_t limit);
void check_positive(const char* argument, int64_t value);
void check_not_negative(const char* argument, int64_t value);
void check_pointer(const char* argument, const void* pointer);
void check_matrix(const char* argument, const omni_matrix& matrix);
// As above, and of this shape; an absent matrix is accepted where `optional`.
void check_matrix_shape(const char* argument, const omni_matrix& matrix, int64_t rows, int64_t columns, bool optional = false);
void check_group_size(int32_t group_size);
void check_heads(int32_t num_heads, int32_t num_kv_heads, int32_t head_dim);
// The heads have been checked.
void check_cache(const omni_kv_cache& cache, int32_t num_kv_heads, int32_t head_dim);
void check_slots(const omni_kv_cache& cache, const int64_t* slots, int64_t count);
void check_sampling(const omni_sampling& settings);
void check_decoder(const omni_decoder_spec& spec, const omni_layer* layers);
// Sequences, their lengths and the blocks that hold them.
void check_sequences(const omni_batch& batch, const omni_kv_cache& cache, int32_t kv_group, int32_t window);
void check_batch(const Decoder& decoder, const omni_batch& batch);

}  // namespace omni
