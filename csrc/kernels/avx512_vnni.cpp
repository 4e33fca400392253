// AVX-512 with VNNI: sixteen rows in a register, four columns of each in a lane, one instruction for 64 products.
#ifdef OMNI_SIMDE
#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx512.h>
#include <simde/x86/f16c.h>
// Operations that not every version of SIMDe has, or rounds once.
static inline simde__m512 emulated_cvtepi32_ps(simde__m512i x) {
    simde__m512_private out;
    for (int i = 0; i < 16; ++i) out.f32[i] = float(simde__m512i_to_private(x).i32[i]);
    return simde__m512_from_private(out);
}
static inline simde__m512 emulated_cvtph_ps(simde__m256i x) {
    simde__m512_private out;
    for (int i = 0; i < 16; ++i) out.f32[i] = simde_float16_to_float32(simde_uint16_as_float16(simde__m256i_to_private(x).u16[i]));
    return simde__m512_from_private(out);
}
static inline simde__m512 emulated_fmadd_ps(simde__m512 a, simde__m512 b, simde__m512 c) {
    simde__m512_private out, x = simde__m512_to_private(a), y = simde__m512_to_private(b), z = simde__m512_to_private(c);
    for (int i = 0; i < 16; ++i) out.f32[i] = __builtin_fmaf(x.f32[i], y.f32[i], z.f32[i]);
    return simde__m512_from_private(out);
}
static inline simde__m512i emulated_cvtepi8_epi32(simde__m128i x) {
    simde__m512i_private out;
    for (int i = 0; i < 16; ++i) out.i32[i] = simde__m128i_to_private(x).i8[i];
    return simde__m512i_from_private(out);
}
static inline simde__m512i emulated_cvtepu16_epi32(simde__m256i x) {
    simde__m512i_private out;
    for (int i = 0; i < 16; ++i) out.i32[i] = simde__m256i_to_private(x).u16[i];
    return simde__m512i_from_private(out);
}
#undef _mm512_cvtepi32_ps
#undef _mm512_cvtepu16_epi32
#undef _mm512_cvtepi8_epi32
#undef _mm512_cvtph_ps
#undef _mm512_fmadd_ps
#define _mm512_cvtepi32_ps emulated_cvtepi32_ps
#define _mm512_cvtph_ps emulated_cvtph_ps
#define _mm512_fmadd_ps emulated_fmadd_ps
#define _mm512_cvtepu16_epi32 emulated_cvtepu16_epi32
#define _mm512_cvtepi8_epi32 emulated_cvtepi8_epi32
#else
#include <immintrin.h>
#endif
// GCC 12 warns of undefined values in its own header.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"

#define OMNI_ARM avx512_vnni
#define OMNI_LANES 16
#define OMNI_FUSED(a, b, c) ((Floats)_mm512_fmadd_ps((__m512)(a), (__m512)(b), (__m512)(c)))
#define OMNI_LARGER(x, y) ((Floats)_mm512_max_ps((__m512)(x), (__m512)(y)))
#define OMNI_WIDENED_BYTES(bytes) ((Ints)_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes))))
#define OMNI_WIDENED_HALVES(halves) _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(halves)))
#include "sampling.inl"

namespace omni {
namespace avx512_vnni {
namespace {

inline __m512i broadcast4(const int8_t* p) {
    int32_t four;
    memcpy(&four, p, sizeof four);
    return _mm512_set1_epi32(four);
}

inline __m512 load_halves(const uint8_t* bytes) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(bytes)));
}

template <int Rows, Form F>
void multiply_cells(const Cells& cells, const Activations& x, int64_t row, float (*sums)[kBlockRows]) {
    constexpr int32_t kColumns = F == Form::nibbles ? 8 : 4;  // of 64 bytes
    const uint8_t* cell = cells.data;
    const __m512i low = _mm512_set1_epi8(15);
    const int8_t* p[Rows];
    __m512 totals[Rows];
    for (int r = 0; r < Rows; ++r) {
        p[r] = x.p + (row + r) * x.padded_columns + cells.first_group * cells.group_size;
        totals[r] = _mm512_loadu_ps(sums[r]);
    }
    for (int64_t g = cells.first_group; g < cells.first_group + cells.num_groups; ++g, cell += cells.bytes) {
        __m512i products[Rows];
        for (int r = 0; r < Rows; ++r) products[r] = _mm512_setzero_si512();
        const uint8_t* chunks = cell + kCellHeaderBytes;
        for (int32_t column = 0; column < cells.group_size; column += kColumns, chunks += 64) {
            const __m512i weights = _mm512_loadu_si512(chunks);
            if (F != Form::nibbles) {
                for (int r = 0; r < Rows; ++r) products[r] = _mm512_dpbusd_epi32(products[r], weights, broadcast4(p[r] + column));
                continue;
            }
            const __m512i first = _mm512_and_si512(weights, low);
            const __m512i second = _mm512_and_si512(_mm512_srli_epi16(weights, 4), low);
            for (int r = 0; r < Rows; ++r) {
                products[r] = _mm512_dpbusd_epi32(products[r], first, broadcast4(p[r] + column));
                products[r] = _mm512_dpbusd_epi32(products[r], second, broadcast4(p[r] + column + 4));
            }
        }
        const __m512 scale = load_halves(cell), minimum = load_halves(cell + 32);
        for (int r = 0; r < Rows; ++r) {
            const __m512 a = _mm512_set1_ps(x.a[(row + r) * x.groups + g]), s = _mm512_set1_ps(x.s[(row + r) * x.groups + g]);
            const __m512 product = _mm512_mul_ps(_mm512_cvtepi32_ps(products[r]), scale);
            totals[r] = _mm512_fmadd_ps(product, a, _mm512_fmadd_ps(minimum, s, totals[r]));
            p[r] += cells.group_size;
        }
    }
    for (int r = 0; r < Rows; ++r) _mm512_storeu_ps(sums[r], totals[r]);
}

template <int Rows>
void multiply_codes(const uint8_t* codes, int32_t head_dim, const int8_t* q, int64_t q_stride, const int32_t* q_sums,
                    int32_t (*out)[kChunkKeys]) {
    __m512i products[Rows];
    for (int r = 0; r < Rows; ++r) products[r] = _mm512_set1_epi32(-127 * q_sums[r]);
    for (int32_t d = 0; d < head_dim; d += 4, codes += 64) {
        const __m512i keys = _mm512_loadu_si512(codes);
        for (int r = 0; r < Rows; ++r) products[r] = _mm512_dpbusd_epi32(products[r], keys, broadcast4(q + r * q_stride + d));
    }
    for (int r = 0; r < Rows; ++r) _mm512_storeu_si512(out[r], products[r]);
}

}  // namespace
}  // namespace avx512_vnni

const Kernels* avx512_vnni_kernels() {
    static const Kernels kernels = avx512_vnni::table("avx512_vnni");
    return &kernels;
}

}  // namespace omni
