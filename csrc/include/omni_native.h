// The C ABI of the native core. Arrays are row-major and belong to the caller unless stated.
// Functions return 0, or a negative code with a text in omni_last_error() of the calling thread.
#pragma once

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define OMNI_ABI_VERSION 2
// Changes whenever the bits of a result do.
#define OMNI_NUMERICS_VERSION 2

enum { OMNI_OK = 0, OMNI_ERROR_ARGUMENT = -1, OMNI_ERROR_ISA = -2, OMNI_ERROR_MEMORY = -3, OMNI_ERROR_INTERNAL = -4 };
enum { OMNI_ACTIVATION_SILU = 0, OMNI_ACTIVATION_GELU = 1 };       // GELU: exact, with erf
enum { OMNI_KV_BFLOAT16 = 0, OMNI_KV_INT8 = 1 };
enum { OMNI_ROPE_HALVES = 0, OMNI_ROPE_PAIRS = 1 };                // partners: i and i + dim/2, or 2i and 2i + 1

// A packed matrix, as README.md draws it. `data` is aligned to 64 bytes and outlives its use; NULL: there is none.
typedef struct {
    const uint8_t* data;
    int64_t rows;
    int64_t columns;
    int32_t bits;        // 4 or 8
    int32_t group_size;  // 32, 64 or 128
} omni_matrix;

// One decoder layer. Vectors are float32; NULL where the family has none.
typedef struct {
    omni_matrix q, k, v, o;           // [heads * head_dim, hidden], [kv_heads * head_dim, hidden] twice, [hidden, heads * head_dim]
    omni_matrix gate, up, down;       // [intermediate, hidden] twice, [hidden, intermediate]
    omni_matrix head_gate;            // [heads, hidden]: sigmoid scales each head's output; or absent
    const float* input_norm;          // [hidden]
    const float* post_norm;           // [hidden], before the MLP
    const float* q_norm;              // [head_dim] or NULL
    const float* k_norm;              // [head_dim] or NULL
    const float* q_bias;              // [heads * head_dim] or NULL
    const float* k_bias;              // [kv_heads * head_dim] or NULL
    const float* v_bias;              // [kv_heads * head_dim] or NULL
    const float* o_bias;              // [hidden] or NULL
    const float* rope;                // [max_position, rotary_dim]: cosines, then sines, rotary_dim / 2 each
    int32_t rotary_dim;               // rotated leading dimensions of a head, even, at most head_dim
    int32_t window;                   // keys a query sees, itself included; 0: all before it
    int32_t kv_group;                 // which block table of a batch this layer uses
} omni_layer;

// What all layers share.
typedef struct {
    int32_t num_layers;
    int32_t hidden_size;
    int32_t intermediate_size;
    int32_t num_heads;
    int32_t num_kv_heads;
    int32_t head_dim;
    int32_t activation;
    int32_t rope_style;
    int32_t num_kv_groups;
    int32_t max_position;
    float norm_eps;
    float attention_scale;
    const float* final_norm;          // [hidden]
    omni_matrix embedding;            // [vocabulary, hidden] or absent: rows are looked up
} omni_decoder_spec;

// Where one layer's pages lie, as README.md draws them; strides in bytes.
typedef struct {
    uint8_t* data;
    int64_t num_blocks;
    int64_t block_stride;
    int64_t head_stride;
    int32_t block_size;               // tokens, a multiple of 16
    int32_t kind;                     // OMNI_KV_*
} omni_kv_cache;

// The rows of one step. Rows of a sequence are consecutive and in order of position.
typedef struct {
    int32_t num_rows;
    int32_t num_seqs;
    int32_t num_groups;                   // KV groups that slots and tables are given for
    const int32_t* token_ids;             // [num_rows], looked up in the packed embedding; or NULL
    const float* inputs;                  // [num_rows, hidden] where token_ids is NULL
    const int64_t* positions;             // [num_rows], index into the rope table
    const int32_t* query_start;           // [num_seqs + 1]: first row of each sequence, then num_rows
    const int32_t* seq_lens;              // [num_seqs]: tokens in the cache after this step
    const int64_t* const* slots;          // [kv groups][num_rows]: block * block_size + offset; negative: not stored
    const int32_t* const* block_tables;   // [kv groups][num_seqs, block_table_stride]
    const int64_t* block_table_strides;   // [kv groups], elements
    float* hidden;                        // out [num_rows, hidden], after the final norm
} omni_batch;

// How one row of logits becomes a token: divided by the temperature, then of the tokens at least min_p as likely as the likeliest the
// top_k likeliest, then the fewest of these that are at least top_p of their sum. Equal logits: the lower id first.
typedef struct {
    float temperature;                    // below 1e-5: the largest logit
    float top_p;                          // 1: all
    float min_p;                          // 0: all
    int32_t top_k;                        // 0 or less: all
    uint64_t seed;                        // with `step` it determines the draw
    uint64_t step;                        // tokens that the request has already
} omni_sampling;

typedef struct omni_team omni_team;
typedef struct omni_decoder omni_decoder;

int32_t omni_abi_version(void);
int32_t omni_numerics_version(void);
const char* omni_last_error(void);

// Names of the arms compiled in, comma-separated, best first; and of those this machine can run.
const char* omni_compiled_isas(void);
const char* omni_runnable_isas(void);

// A team of threads on one arm. The calling thread is one of `num_threads`; the others spin for `spin_us` after the last work and then
// park. `isa`: one of omni_runnable_isas(), or NULL for the best. One call at a time may use a team.
omni_team* omni_team_create(int32_t num_threads, const char* isa, int32_t spin_us);
void omni_team_destroy(omni_team* team);
const char* omni_team_isa(const omni_team* team);

// out [num_rows, matrix.rows] = x [num_rows, matrix.columns] times the matrix, transposed. Any num_rows.
int32_t omni_linear(omni_team* team, const omni_matrix* matrix, const float* x, int64_t num_rows, float* out);
// out [count, matrix.columns] = rows `ids` of the matrix, as float32.
int32_t omni_dequantize_rows(omni_team* team, const omni_matrix* matrix, const int32_t* ids, int64_t count, float* out);
// The same for the rows [begin, begin + count), as bfloat16.
int32_t omni_dequantize_panel(omni_team* team, const omni_matrix* matrix, int64_t begin, int64_t count, uint16_t* out);

// Single operations, for tests and for models that assemble their own stack.
// x [num_rows, columns] as p [num_rows, groups * group_size] with a and s [num_rows, groups], as README.md says; groups = ceil(columns /
// group_size), and p past `columns` is 0.
int32_t omni_quantize_rows(omni_team* team, const float* x, int64_t num_rows, int64_t columns, int32_t group_size, int8_t* p, float* a,
                           float* s);
int32_t omni_rms_norm(omni_team* team, const float* x, const float* weight, int64_t num_rows, int64_t columns, float eps, float* out);
// out [num_positions, 2 * count]: cosines, then sines, of each position times frequencies [count], times `magnitude`.
int32_t omni_rope_table(omni_team* team, const double* frequencies, int64_t count, int64_t num_positions, float magnitude, float* out);
// x [num_rows, num_heads, head_dim], in place; table [num_positions, rotary_dim].
int32_t omni_rope(omni_team* team, float* x, const int64_t* positions, const float* table, int64_t num_positions, int64_t num_rows,
                  int32_t num_heads, int32_t head_dim, int32_t rotary_dim, int32_t style);
// out = activation(gate) * up, each [count].
int32_t omni_gated_activation(omni_team* team, const float* gate, const float* up, int64_t count, int32_t activation, float* out);
// k, v [num_rows, kv_heads, head_dim] into the cache.
int32_t omni_store_kv(omni_team* team, const omni_kv_cache* cache, const float* k, const float* v, const int64_t* slots, int64_t num_rows,
                      int32_t num_kv_heads, int32_t head_dim);
// q, out [num_rows, heads, head_dim]; the batch's slots, token ids and hidden are not looked at. Group `kv_group` of its tables.
int32_t omni_attention(omni_team* team, const omni_kv_cache* cache, const omni_batch* batch, int32_t kv_group, const float* q,
                       int32_t num_heads, int32_t num_kv_heads, int32_t head_dim, int32_t window, float scale, float* out);

// Rows of logits [num_rows, columns]. out [num_rows, columns]: log-probabilities.
int32_t omni_log_softmax(omni_team* team, const float* logits, int64_t num_rows, int64_t columns, float* out);
// ids [num_rows, count]: the largest, the lower id first among equal ones.
int32_t omni_top(omni_team* team, const float* values, int64_t num_rows, int64_t columns, int64_t count, int64_t* ids);
// ids [num_rows]: a token for each row, by its own settings.
int32_t omni_sample(omni_team* team, const float* logits, int64_t num_rows, int64_t columns, const omni_sampling* settings, int64_t* ids);

// A decoder keeps copies of the structures, not of what they point to.
omni_decoder* omni_decoder_create(omni_team* team, const omni_decoder_spec* spec, const omni_layer* layers);
void omni_decoder_destroy(omni_decoder* decoder);
// caches [num_layers]; again after the cache was moved.
int32_t omni_decoder_bind_cache(omni_decoder* decoder, const omni_kv_cache* caches);
// All layers and the final norm, for any number of rows.
int32_t omni_decoder_step(omni_decoder* decoder, const omni_batch* batch);

#ifdef __cplusplus
}
#endif
