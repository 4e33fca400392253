// The C ABI: checks what is passed, turns exceptions into codes, and calls the rest.
#include <algorithm>
#include <cstring>
#include <new>
#include <string>
#include <system_error>

#include "include/checks.h"
#include "include/rope.h"
#include "include/sampling.h"

#define OMNI_EXPORT extern "C" __attribute__((visibility("default")))

struct omni_team {
    omni_team(int num_threads, const omni::Kernels& kernels, int spin_us) : team(num_threads, kernels, spin_us) {}
    omni::Team team;
    // Of omni_linear; a decoder has its own.
    omni::QuantizedInput input;
};

struct omni_decoder {
    omni_decoder(omni::Team& team, const omni_decoder_spec& spec, const omni_layer* layers) : decoder(team, spec, layers) {}
    omni::Decoder decoder;
};

namespace {

using omni::Kernels;
using omni::Range;
using omni::Refused;
using omni::Team;

thread_local std::string last_error;

struct Arm {
    const char* name;
    const Kernels* (*kernels)();
    bool (*can_run)();
};

bool always() { return true; }

// Best first.
const Arm arms[] = {
#if defined(__x86_64__)
    {"avx512_vnni", omni::avx512_vnni_kernels, omni::can_run_avx512_vnni},
    {"avx2", omni::avx2_kernels, omni::can_run_avx2},
#elif defined(__aarch64__)
    {"neon_dotprod", omni::neon_dotprod_kernels, omni::can_run_neon_dotprod},
#endif
    {"generic", omni::generic_kernels, always},
};

bool can_run(const Arm& arm) {
#if defined(OMNI_SIMDE)
    // The emulated arm needs what the compiler was told to use for the emulation.
    if (std::strcmp(arm.name, "avx512_vnni") == 0) return true;
#endif
    return arm.can_run();
}

std::string names(bool runnable_only) {
    std::string list;
    for (const Arm& arm : arms)
        if (!runnable_only || can_run(arm)) list += (list.empty() ? "" : ",") + std::string(arm.name);
    return list;
}

const Kernels& choose(const char* isa) {
    for (const Arm& arm : arms)
        if ((!isa || std::strcmp(isa, arm.name) == 0) && can_run(arm)) return *arm.kernels();
    omni::refuse("isa", isa, names(true));
}

// The text of an error may itself find no memory.
int32_t failed(const char* text, int32_t code) noexcept {
    try {
        last_error = text;
    } catch (...) {
        last_error.clear();
    }
    return code;
}

template <typename Body>
int32_t guarded(const Body& body) noexcept {
    try {
        body();
        return OMNI_OK;
    } catch (const Refused& error) {
        return failed(error.what(), OMNI_ERROR_ARGUMENT);
    } catch (const std::bad_alloc&) {
        return failed("out of memory", OMNI_ERROR_MEMORY);
    } catch (const std::exception& error) {
        return failed(error.what(), OMNI_ERROR_INTERNAL);
    } catch (...) {
        return failed("an exception of no known kind", OMNI_ERROR_INTERNAL);
    }
}

// Runs body(kernels, begin, end) on each thread's part of 0..count.
template <typename Body>
void split(omni_team* handle, int64_t count, const Body& body) {
    Team& team = handle->team;
    team.run([&](int thread) {
        const Range part = omni::share(count, thread, team.size());
        if (part.begin < part.end) body(team.kernels(), part.begin, part.end);
    });
}

}  // namespace

OMNI_EXPORT int32_t omni_abi_version(void) { return OMNI_ABI_VERSION; }

OMNI_EXPORT int32_t omni_numerics_version(void) { return OMNI_NUMERICS_VERSION; }

OMNI_EXPORT const char* omni_last_error(void) { return last_error.c_str(); }

OMNI_EXPORT const char* omni_compiled_isas(void) {
    static const std::string list = names(false);
    return list.c_str();
}

OMNI_EXPORT const char* omni_runnable_isas(void) {
    static const std::string list = names(true);
    return list.c_str();
}

OMNI_EXPORT omni_team* omni_team_create(int32_t num_threads, const char* isa, int32_t spin_us) {
    omni_team* team = nullptr;
    const int32_t code = guarded([&] {
        if (num_threads < 1 || num_threads > 256) omni::refuse("num_threads", std::to_string(num_threads), "1 to 256");
        omni::check_not_negative("spin_us", spin_us);
        const Kernels& kernels = choose(isa);
        try {
            team = new omni_team(num_threads, kernels, spin_us);
        } catch (const std::system_error& error) {
            throw Refused(std::string("threads cannot be started: ") + error.what());
        }
    });
    return code == OMNI_OK ? team : nullptr;
}

OMNI_EXPORT void omni_team_destroy(omni_team* team) {
    if (team && !team->team.is_forked()) delete team;
}

OMNI_EXPORT const char* omni_team_isa(const omni_team* team) { return team->team.kernels().name; }

OMNI_EXPORT int32_t omni_linear(omni_team* handle, const omni_matrix* matrix, const float* x, int64_t num_rows, float* out) {
    return guarded([&] {
        omni::check_pointers({{"team", handle}, {"matrix", matrix}, {"x", x}, {"out", out}});
        omni::check_matrix("matrix", *matrix);
        omni::check_positive("num_rows", num_rows);
        Team& team = handle->team;
        omni::QuantizedInput& input = handle->input;
        input.serve_only(*matrix);
        input.resize(num_rows);
        const omni::Products products = {{{matrix, out, matrix->rows, false}}, 1};
        std::vector<std::atomic<int64_t>> taken(size_t(team.size()));
        team.run([&](int thread) {
            const Range rows = omni::share(num_rows, thread, team.size());
            for (int64_t row = rows.begin; row < rows.end; ++row) input.quantize_row(team.kernels(), x + row * matrix->columns, row);
            omni::Ahead ahead = omni::first_weights(team, thread, products);
            team.barrier(ahead);
            omni::multiply_share(team, thread, input, products, num_rows, taken.data());
        });
    });
}

OMNI_EXPORT int32_t omni_dequantize_rows(omni_team* team, const omni_matrix* matrix, const int32_t* ids, int64_t count, float* out) {
    return guarded([&] {
        omni::check_pointers({{"team", team}, {"matrix", matrix}, {"ids", ids}, {"out", out}});
        omni::check_matrix("matrix", *matrix);
        for (int64_t i = 0; i < count; ++i)
            if (ids[i] < 0 || ids[i] >= matrix->rows)
                omni::refuse("row", std::to_string(ids[i]), "0 to " + std::to_string(matrix->rows) + " exclusive");
        split(team, count, [&](const Kernels& kernels, int64_t begin, int64_t end) {
            for (int64_t i = begin; i < end; ++i) kernels.dequantize_row(*matrix, ids[i], out + i * matrix->columns);
        });
    });
}

OMNI_EXPORT int32_t omni_dequantize_panel(omni_team* team, const omni_matrix* matrix, int64_t first, int64_t count, uint16_t* out) {
    return guarded([&] {
        omni::check_pointers({{"team", team}, {"matrix", matrix}, {"out", out}});
        omni::check_matrix("matrix", *matrix);
        if (first < 0 || count < 0 || first + count > matrix->rows)
            omni::refuse("rows", std::to_string(first) + " + " + std::to_string(count), "within " + std::to_string(matrix->rows));
        // One row for each thread; nothing may throw within a job.
        std::vector<float> rows(size_t(matrix->columns) * size_t(team->team.size()));
        team->team.run([&](int thread) {
            const Kernels& kernels = team->team.kernels();
            float* row = rows.data() + thread * matrix->columns;
            const Range part = omni::share(count, thread, team->team.size());
            for (int64_t i = part.begin; i < part.end; ++i) {
                kernels.dequantize_row(*matrix, first + i, row);
                kernels.to_bfloat16(row, matrix->columns, out + i * matrix->columns);
            }
        });
    });
}

OMNI_EXPORT int32_t omni_quantize_rows(omni_team* team, const float* x, int64_t num_rows, int64_t columns, int32_t group_size, int8_t* p,
                                       float* a, float* s) {
    return guarded([&] {
        omni::check_pointers({{"team", team}, {"x", x}, {"p", p}, {"a", a}, {"s", s}});
        omni::check_positive("columns", columns);
        omni::check_group_size(group_size);
        omni::check_not_negative("num_rows", num_rows);
        const int64_t groups = (columns + group_size - 1) / group_size;
        std::vector<int32_t> sums(size_t(num_rows * groups));
        split(team, num_rows, [&](const Kernels& kernels, int64_t begin, int64_t end) {
            for (int64_t i = begin; i < end; ++i)
                kernels.quantize_row(x + i * columns, columns, group_size,
                                     {p + i * groups * group_size, a + i * groups, s + i * groups, sums.data() + i * groups});
        });
    });
}

OMNI_EXPORT int32_t omni_rms_norm(omni_team* team, const float* x, const float* weight, int64_t num_rows, int64_t columns, float eps,
                                  float* out) {
    return guarded([&] {
        omni::check_pointers({{"team", team}, {"x", x}, {"weight", weight}, {"out", out}});
        omni::check_positive("columns", columns);
        split(team, num_rows, [&](const Kernels& kernels, int64_t begin, int64_t end) {
            for (int64_t i = begin; i < end; ++i) kernels.rms_norm_row(x + i * columns, weight, columns, eps, out + i * columns);
        });
    });
}

OMNI_EXPORT int32_t omni_rope_table(omni_team* team, const double* frequencies, int64_t count, int64_t num_positions, float magnitude,
                                    float* out) {
    return guarded([&] {
        omni::check_pointers({{"team", team}, {"frequencies", frequencies}, {"out", out}});
        omni::check_positive("count", count);
        omni::check_positive("num_positions", num_positions);
        for (int64_t i = 0; i < count; ++i)
            if (!(frequencies[i] >= 0 && frequencies[i] * double(num_positions) <= omni::kMaxAngle))
                omni::refuse("frequency", std::to_string(frequencies[i]), "0 or more, and at most 2^23 over num_positions");
        split(team, num_positions, [&](const Kernels&, int64_t begin, int64_t end) {
            for (int64_t i = begin; i < end; ++i) omni::rope_row(frequencies, count, double(i), magnitude, out + i * 2 * count);
        });
    });
}

OMNI_EXPORT int32_t omni_rope(omni_team* team, float* x, const int64_t* positions, const float* table, int64_t num_positions,
                              int64_t num_rows, int32_t num_heads, int32_t head_dim, int32_t rotary_dim, int32_t style) {
    return guarded([&] {
        omni::check_pointers({{"team", team}, {"x", x}, {"positions", positions}, {"table", table}});
        omni::check_positive("num_heads", num_heads);
        omni::check_range("style", style, 2);
        for (int64_t i = 0; i < num_rows; ++i) omni::check_range("position", positions[i], num_positions);
        if (rotary_dim < 2 || rotary_dim > head_dim || rotary_dim % 2)
            omni::refuse("rotary_dim", std::to_string(rotary_dim), "an even number from 2 to head_dim " + std::to_string(head_dim));
        split(team, num_rows * num_heads, [&](const Kernels& kernels, int64_t begin, int64_t end) {
            for (int64_t i = begin; i < end; ++i)
                kernels.rope_head(x + i * head_dim, table + positions[i / num_heads] * rotary_dim, rotary_dim, style);
        });
    });
}

OMNI_EXPORT int32_t omni_gated_activation(omni_team* team, const float* gate, const float* up, int64_t count, int32_t activation,
                                          float* out) {
    return guarded([&] {
        omni::check_pointers({{"team", team}, {"gate", gate}, {"up", up}, {"out", out}});
        omni::check_range("activation", activation, 2);
        split(team, count, [&](const Kernels& kernels, int64_t begin, int64_t end) {
            kernels.gated_activation(gate + begin, up + begin, end - begin, activation, out + begin);
        });
    });
}

OMNI_EXPORT int32_t omni_store_kv(omni_team* team, const omni_kv_cache* cache, const float* k, const float* v, const int64_t* slots,
                                  int64_t num_rows, int32_t num_kv_heads, int32_t head_dim) {
    return guarded([&] {
        omni::check_pointers({{"team", team}, {"cache", cache}, {"k", k}, {"v", v}, {"slots", slots}});
        omni::check_heads(num_kv_heads, num_kv_heads, head_dim);
        omni::check_cache(*cache, num_kv_heads, head_dim);
        omni::check_slots(*cache, slots, num_rows);
        split(team, num_rows * num_kv_heads, [&](const Kernels& kernels, int64_t begin, int64_t end) {
            for (int64_t i = begin; i < end; ++i) {
                const int64_t slot = slots[i / num_kv_heads];
                if (slot < 0) continue;
                const omni::CacheCell cell =
                    omni::cell_in(*cache, head_dim, slot / cache->block_size, i % num_kv_heads, slot % cache->block_size);
                kernels.store_cell(cell, k + i * head_dim, v + i * head_dim, head_dim, cache->kind);
            }
        });
    });
}

OMNI_EXPORT int32_t omni_attention(omni_team* handle, const omni_kv_cache* cache, const omni_batch* batch, int32_t kv_group,
                                   const float* q, int32_t num_heads, int32_t num_kv_heads, int32_t head_dim, int32_t window, float scale,
                                   float* out) {
    return guarded([&] {
        omni::check_pointers({{"team", handle}, {"cache", cache}, {"batch", batch}, {"q", q}, {"out", out}});
        omni::check_positive("num_rows", batch->num_rows);
        omni::check_positive("num_seqs", batch->num_seqs);
        omni::check_heads(num_heads, num_kv_heads, head_dim);
        omni::check_cache(*cache, num_kv_heads, head_dim);
        omni::check_range("kv_group", kv_group, batch->num_groups);
        omni::check_not_negative("window", window);
        omni::check_sequences(*batch, *cache, kv_group, window);
        Team& team = handle->team;
        const omni::AttentionShape shape = {num_heads, num_kv_heads, head_dim, window, kv_group, scale};
        omni::AttentionPlan plan;
        plan.make(*batch, 0, batch->num_rows, shape, team.size());
        std::atomic<int64_t> counter{0};
        team.run([&](int thread) {
            plan.attend(team.kernels(), thread, *cache, *batch, shape, q, shape.width(), counter);
            team.barrier();
            const Range rows = omni::share(batch->num_rows, thread, team.size());
            for (int64_t row = rows.begin; row < rows.end; ++row) plan.join_row(team.kernels(), shape, row, out + row * shape.width());
        });
    });
}

OMNI_EXPORT int32_t omni_log_softmax(omni_team* team, const float* logits, int64_t num_rows, int64_t columns, float* out) {
    return guarded([&] {
        omni::check_pointers({{"team", team}, {"logits", logits}, {"out", out}});
        omni::check_positive("columns", columns);
        split(team, num_rows, [&](const Kernels& kernels, int64_t begin, int64_t end) {
            for (int64_t i = begin; i < end; ++i) omni::log_softmax_row(kernels, logits + i * columns, columns, out + i * columns);
        });
    });
}

OMNI_EXPORT int32_t omni_top(omni_team* team, const float* values, int64_t num_rows, int64_t columns, int64_t count, int64_t* ids) {
    return guarded([&] {
        omni::check_pointers({{"team", team}, {"values", values}, {"ids", ids}});
        omni::check_positive("columns", columns);
        omni::check_range("count", count, columns + 1);
        // One row of ids for each thread; nothing may throw within a job.
        std::vector<int64_t> rows(size_t(columns) * size_t(team->team.size()));
        team->team.run([&](int thread) {
            int64_t* row = rows.data() + thread * columns;
            const Range part = omni::share(num_rows, thread, team->team.size());
            for (int64_t i = part.begin; i < part.end; ++i) {
                omni::top_row(values + i * columns, columns, count, row);
                std::memcpy(ids + i * count, row, sizeof(int64_t) * size_t(count));
            }
        });
    });
}

OMNI_EXPORT int32_t omni_sample(omni_team* team, const float* logits, int64_t num_rows, int64_t columns, const omni_sampling* settings,
                                int64_t* ids) {
    return guarded([&] {
        omni::check_pointers({{"team", team}, {"logits", logits}, {"settings", settings}, {"ids", ids}});
        omni::check_positive("columns", columns);
        omni::check_not_negative("num_rows", num_rows);
        for (int64_t i = 0; i < num_rows; ++i) omni::check_sampling(settings[i]);
        // Greedy rows need no memory. With it nothing is allocated within the job.
        const bool draws = std::any_of(settings, settings + num_rows, [](const omni_sampling& each) { return each.temperature > 0; });
        std::vector<omni::SamplingScratch> scratch(size_t(team->team.size()), omni::SamplingScratch(0));
        if (draws)
            for (omni::SamplingScratch& each : scratch) each = omni::SamplingScratch(columns);
        team->team.run([&](int thread) {
            const Range part = omni::share(num_rows, thread, team->team.size());
            for (int64_t i = part.begin; i < part.end; ++i)
                ids[i] = omni::sample_row(team->team.kernels(), logits + i * columns, columns, settings[i], scratch[size_t(thread)]);
        });
    });
}

OMNI_EXPORT omni_decoder* omni_decoder_create(omni_team* team, const omni_decoder_spec* spec, const omni_layer* layers) {
    omni_decoder* decoder = nullptr;
    const int32_t code = guarded([&] {
        omni::check_pointers({{"team", team}, {"spec", spec}});
        omni::check_decoder(*spec, layers);
        decoder = new omni_decoder(team->team, *spec, layers);
    });
    return code == OMNI_OK ? decoder : nullptr;
}

OMNI_EXPORT void omni_decoder_destroy(omni_decoder* decoder) { delete decoder; }

OMNI_EXPORT int32_t omni_decoder_bind_cache(omni_decoder* handle, const omni_kv_cache* caches) {
    return guarded([&] {
        omni::check_pointers({{"decoder", handle}, {"caches", caches}});
        omni::Decoder& decoder = handle->decoder;
        for (int32_t i = 0; i < decoder.spec().num_layers; ++i)
            omni::check_cache(caches[i], decoder.spec().num_kv_heads, decoder.spec().head_dim);
        decoder.bind_cache(caches);
    });
}

OMNI_EXPORT int32_t omni_decoder_step(omni_decoder* handle, const omni_batch* batch) {
    return guarded([&] {
        omni::check_pointers({{"decoder", handle}, {"batch", batch}});
        omni::check_batch(handle->decoder, *batch);
        handle->decoder.step(*batch);
    });
}
