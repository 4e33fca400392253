// AVX2, FMA and F16C. Eight rows of a block in a register, four columns of each in a lane.
#include <immintrin.h>

#define OMNI_ARM avx2
#define OMNI_LANES 8
#define OMNI_FUSED(a, b, c) ((Floats)_mm256_fmadd_ps((__m256)(a), (__m256)(b), (__m256)(c)))
#define OMNI_LARGER(x, y) ((Floats)_mm256_max_ps((__m256)(x), (__m256)(y)))
#define OMNI_WIDENED_BYTES(bytes) ((Ints)_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(bytes))))
#define OMNI_WIDENED_HALVES(halves) _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(halves)))
#include "sampling.inl"

namespace omni {
namespace avx2 {
namespace {

// Columns whose products of 4-bit weights a 16-bit sum can hold: 8 times 2 x 15 x 127.
constexpr int32_t kColumnsPerSum = 32;
// How far ahead of its use a weight is asked for: with so much arithmetic between them, the processor itself sees too few loads ahead.
constexpr int64_t kPrefetchBytes = 2048;

inline __m256i broadcast4(const int8_t* p) {
    int32_t four;
    memcpy(&four, p, sizeof four);
    return _mm256_set1_epi32(four);
}

inline void ask_for(const uint8_t* bytes) { _mm_prefetch(reinterpret_cast<const char*>(bytes), _MM_HINT_T0); }

inline __m256i load_bytes(const uint8_t* bytes) { return _mm256_load_si256(reinterpret_cast<const __m256i*>(bytes)); }

inline __m256 load_halves(const uint8_t* bytes) {
    return _mm256_cvtph_ps(_mm_load_si128(reinterpret_cast<const __m128i*>(bytes)));
}

// The sum stays in its register and in this order: compilers rearrange chains of additions into trees that need more registers than
// there are.
inline __m256i in_place(__m256i sum) {
    __asm__("" : "+x"(sum));
    return sum;
}

// Bytes of kColumnsPerSum columns of a row block.
template <Form F>
constexpr int64_t kPieceBytes = kBlockRows * kColumnsPerSum / (F == Form::nibbles ? 2 : 1);

// Weights of four columns, half a block.
template <Form F>
inline __m256i four_columns(const uint8_t* piece, int quad, int half) {
    if (F != Form::nibbles) return load_bytes(piece + 64 * quad + 32 * half);
    const __m256i bytes = load_bytes(piece + 64 * (quad / 2) + 32 * half);
    return _mm256_and_si256(quad % 2 ? _mm256_srli_epi16(bytes, 4) : bytes, _mm256_set1_epi8(15));
}

// q * p of a piece for two times eight rows of the block: of weights up to 15, summed in 16 bits.
template <int Rows, Form F>
inline void multiply_small(const uint8_t* piece, const int8_t* const (&p)[Rows], int32_t begin, __m256i (&products)[Rows][2]) {
    const __m256i ones = _mm256_set1_epi16(1);
    __m256i sums[Rows][2];
#pragma GCC unroll 8
    for (int quad = 0; quad < kColumnsPerSum / 4; ++quad) {
        if (F == Form::nibbles && quad % 2 == 0) ask_for(piece + 32 * quad + kPrefetchBytes);
        const __m256i q[2] = {four_columns<F>(piece, quad, 0), four_columns<F>(piece, quad, 1)};
#pragma GCC unroll 4
        for (int r = 0; r < Rows; ++r) {
            const __m256i x = broadcast4(p[r] + begin + 4 * quad);
            for (int half = 0; half < 2; ++half) {
                const __m256i y = _mm256_maddubs_epi16(q[half], x);
                sums[r][half] = in_place(quad ? _mm256_add_epi16(sums[r][half], y) : y);
            }
        }
    }
    for (int r = 0; r < Rows; ++r)
        for (int half = 0; half < 2; ++half) products[r][half] = _mm256_madd_epi16(sums[r][half], ones);
}

// The same for 8 bits, of q - 127: signs move to the activations, so that the weights are unsigned bytes.
template <int Rows>
inline void multiply_signed(const uint8_t* piece, const int8_t* const (&p)[Rows], int32_t begin, __m256i (&products)[Rows][2]) {
    const __m256i middle = _mm256_set1_epi8(127), ones = _mm256_set1_epi16(1);
#pragma GCC unroll 8
    for (int quad = 0; quad < kColumnsPerSum / 4; ++quad) {
        ask_for(piece + 64 * quad + kPrefetchBytes);
        __m256i q[2], magnitude[2];
        for (int half = 0; half < 2; ++half) {
            q[half] = _mm256_sub_epi8(four_columns<Form::bytes>(piece, quad, half), middle);
            magnitude[half] = _mm256_abs_epi8(q[half]);
        }
#pragma GCC unroll 4
        for (int r = 0; r < Rows; ++r) {
            const __m256i x = broadcast4(p[r] + begin + 4 * quad);
            for (int half = 0; half < 2; ++half) {
                const __m256i pairs = _mm256_maddubs_epi16(magnitude[half], _mm256_sign_epi8(x, q[half]));
                const __m256i product = _mm256_madd_epi16(pairs, ones);
                products[r][half] = in_place(quad ? _mm256_add_epi32(products[r][half], product) : product);
            }
        }
    }
}

template <int Rows, Form F>
inline void multiply_piece(const uint8_t* piece, const int8_t* const (&p)[Rows], int32_t begin, __m256i (&products)[Rows][2]) {
    if (F == Form::bytes)
        multiply_signed<Rows>(piece, p, begin, products);
    else
        multiply_small<Rows, F>(piece, p, begin, products);
}

template <int Rows, Form F>
inline void multiply_group(const uint8_t* piece, int32_t group_size, const int8_t* const (&p)[Rows], __m256i (&products)[Rows][2]) {
    multiply_piece<Rows, F>(piece, p, 0, products);
    for (int32_t begin = kColumnsPerSum; begin < group_size; begin += kColumnsPerSum) {
        __m256i more[Rows][2];
        multiply_piece<Rows, F>(piece + begin / kColumnsPerSum * kPieceBytes<F>, p, begin, more);
        for (int r = 0; r < Rows; ++r)
            for (int half = 0; half < 2; ++half) products[r][half] = _mm256_add_epi32(products[r][half], more[r][half]);
    }
}

template <int Rows, Form F>
void multiply_cells(const Cells& cells, const Activations& x, int64_t row, float (*sums)[kBlockRows]) {
    const uint8_t* cell = cells.data;
    const int8_t* p[Rows];
    const float *a[Rows], *s[Rows];
    __m256 totals[Rows][2];
    for (int r = 0; r < Rows; ++r) {
        p[r] = x.p + (row + r) * x.padded_columns + cells.first_group * cells.group_size;
        a[r] = x.a + (row + r) * x.groups;
        s[r] = x.s + (row + r) * x.groups;
        for (int half = 0; half < 2; ++half) totals[r][half] = _mm256_load_ps(sums[r] + 8 * half);
    }
    for (int64_t g = cells.first_group; g < cells.first_group + cells.num_groups; ++g, cell += cells.bytes) {
        if (F != Form::unpacked) ask_for(cell + kPrefetchBytes);
        __m256i products[Rows][2];
        multiply_group<Rows, F>(cell + kCellHeaderBytes, cells.group_size, p, products);
        for (int half = 0; half < 2; ++half) {
            const __m256 scale = load_halves(cell + 16 * half);
            const __m256 minimum = load_halves(cell + 32 + 16 * half);
            for (int r = 0; r < Rows; ++r) {
                __m256i sum = products[r][half];
                // The products are of q - 127.
                if (F == Form::bytes) sum = _mm256_add_epi32(sum, _mm256_set1_epi32(127 * x.sums[(row + r) * x.groups + g]));
                const __m256 product = _mm256_mul_ps(_mm256_cvtepi32_ps(sum), scale);
                const __m256 with_minimum = _mm256_fmadd_ps(minimum, _mm256_set1_ps(s[r][g]), totals[r][half]);
                totals[r][half] = _mm256_fmadd_ps(product, _mm256_set1_ps(a[r][g]), with_minimum);
            }
        }
        for (int r = 0; r < Rows; ++r) p[r] += cells.group_size;
    }
    for (int r = 0; r < Rows; ++r)
        for (int half = 0; half < 2; ++half) _mm256_store_ps(sums[r] + 8 * half, totals[r][half]);
}

template <int Rows>
void multiply_codes(const uint8_t* codes, int32_t head_dim, const int8_t* q, int64_t q_stride, const int32_t*,
                    int32_t (*out)[kChunkKeys]) {
    const __m256i middle = _mm256_set1_epi8(127), ones = _mm256_set1_epi16(1);
    __m256i products[Rows][2] = {};
    for (int32_t d = 0; d < head_dim; d += 4, codes += 64)
        for (int half = 0; half < 2; ++half) {
            const __m256i keys = _mm256_sub_epi8(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes + 32 * half)), middle);
            const __m256i magnitude = _mm256_abs_epi8(keys);
            for (int r = 0; r < Rows; ++r) {
                const __m256i pairs = _mm256_maddubs_epi16(magnitude, _mm256_sign_epi8(broadcast4(q + r * q_stride + d), keys));
                products[r][half] = _mm256_add_epi32(products[r][half], _mm256_madd_epi16(pairs, ones));
            }
        }
    for (int r = 0; r < Rows; ++r)
        for (int half = 0; half < 2; ++half)
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(out[r] + 8 * half), products[r][half]);
}

}  // namespace
}  // namespace avx2

const Kernels* avx2_kernels() {
    static const Kernels kernels = avx2::table("avx2");
    return &kernels;
}

}  // namespace omni
