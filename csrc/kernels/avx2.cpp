// AVX2, FMA and F16C. Eight rows of a block in a register, four columns of each in a lane.
#include <immintrin.h>

#define OMNI_ARM avx2
#define OMNI_LANES 8
#include "portable.inl"

namespace omni {
namespace avx2 {
namespace {

// Columns whose products of 4-bit weights a 16-bit sum can hold: 8 chunks' halves of 2 x 15 x 127.
constexpr int32_t kColumnsPerSum = 32;
// How far ahead of its use a weight is asked for; the arithmetic between two loads hides too few of them from the processor.
constexpr int64_t kPrefetchBytes = 2048;

inline __m256i broadcast4(const int8_t* p) {
    int32_t four;
    memcpy(&four, p, sizeof four);
    return _mm256_set1_epi32(four);
}

inline __m256i load_bytes(const uint8_t* bytes) { return _mm256_load_si256(reinterpret_cast<const __m256i*>(bytes)); }

inline __m256 load_halves(const uint8_t* bytes) {
    return _mm256_cvtph_ps(_mm_load_si128(reinterpret_cast<const __m128i*>(bytes)));
}

// Adds q * p of one group to `products`: two registers of eight rows for each row of activations.
template <int Rows>
inline void add_group_4bit(const uint8_t* chunks, int32_t group_size, const int8_t* const (&p)[Rows], __m256i (&products)[Rows][2]) {
    const __m256i low = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1);
    for (int r = 0; r < Rows; ++r) products[r][0] = products[r][1] = _mm256_setzero_si256();
    for (int32_t begin = 0; begin < group_size; begin += kColumnsPerSum) {
        __m256i sums[Rows][2];
        for (int r = 0; r < Rows; ++r) sums[r][0] = sums[r][1] = _mm256_setzero_si256();
#pragma GCC unroll 4
        for (int32_t column = begin; column < begin + kColumnsPerSum; column += 8, chunks += 64) {
            _mm_prefetch(reinterpret_cast<const char*>(chunks + kPrefetchBytes), _MM_HINT_T0);
            const __m256i bytes[2] = {load_bytes(chunks), load_bytes(chunks + 32)};
            const __m256i first[2] = {_mm256_and_si256(bytes[0], low), _mm256_and_si256(bytes[1], low)};
            const __m256i second[2] = {_mm256_and_si256(_mm256_srli_epi16(bytes[0], 4), low),
                                       _mm256_and_si256(_mm256_srli_epi16(bytes[1], 4), low)};
#pragma GCC unroll 4
            for (int r = 0; r < Rows; ++r) {
                const __m256i x0 = broadcast4(p[r] + column), x1 = broadcast4(p[r] + column + 4);
                for (int half = 0; half < 2; ++half) {
                    const __m256i y0 = _mm256_maddubs_epi16(first[half], x0), y1 = _mm256_maddubs_epi16(second[half], x1);
                    sums[r][half] = _mm256_add_epi16(sums[r][half], _mm256_add_epi16(y0, y1));
                }
            }
        }
        for (int r = 0; r < Rows; ++r)
            for (int half = 0; half < 2; ++half)
                products[r][half] = _mm256_add_epi32(products[r][half], _mm256_madd_epi16(sums[r][half], ones));
    }
}

// The same for 8 bits, of q - 127: signs move to the activations, so that the weights are unsigned bytes.
template <int Rows>
inline void add_group_8bit(const uint8_t* chunks, int32_t group_size, const int8_t* const (&p)[Rows], __m256i (&products)[Rows][2]) {
    const __m256i middle = _mm256_set1_epi8(127), ones = _mm256_set1_epi16(1);
    for (int r = 0; r < Rows; ++r) products[r][0] = products[r][1] = _mm256_setzero_si256();
    for (int32_t column = 0; column < group_size; column += 4, chunks += 64) {
        _mm_prefetch(reinterpret_cast<const char*>(chunks + kPrefetchBytes), _MM_HINT_T0);
        for (int half = 0; half < 2; ++half) {
            const __m256i q = _mm256_sub_epi8(load_bytes(chunks + 32 * half), middle);
            const __m256i magnitude = _mm256_abs_epi8(q);
            for (int r = 0; r < Rows; ++r) {
                const __m256i pairs = _mm256_maddubs_epi16(magnitude, _mm256_sign_epi8(broadcast4(p[r] + column), q));
                products[r][half] = _mm256_add_epi32(products[r][half], _mm256_madd_epi16(pairs, ones));
            }
        }
    }
}

template <int Rows, int Bits>
void multiply_cells(const omni_matrix& matrix, const uint8_t* cell, const Activations& x, int64_t row, float (*sums)[kBlockRows]) {
    const int64_t bytes = cell_bytes(matrix);
    const int8_t* p[Rows];
    __m256 totals[Rows][2];
    for (int r = 0; r < Rows; ++r) {
        p[r] = x.p + (row + r) * x.padded_columns;
        totals[r][0] = totals[r][1] = _mm256_setzero_ps();
    }
    for (int64_t g = 0; g < x.groups; ++g, cell += bytes) {
        __m256i products[Rows][2];
        if (Bits == 4)
            add_group_4bit<Rows>(cell + kCellHeaderBytes, matrix.group_size, p, products);
        else
            add_group_8bit<Rows>(cell + kCellHeaderBytes, matrix.group_size, p, products);
        for (int half = 0; half < 2; ++half) {
            const __m256 scale = load_halves(cell + 16 * half);
            __m256 minimum = load_halves(cell + 32 + 16 * half);
            if (Bits == 8) minimum = _mm256_fmadd_ps(scale, _mm256_set1_ps(127.0f), minimum);
            for (int r = 0; r < Rows; ++r) {
                const __m256 a = _mm256_set1_ps(x.a[(row + r) * x.groups + g]);
                const __m256 s = _mm256_set1_ps(x.s[(row + r) * x.groups + g]);
                const __m256 product = _mm256_mul_ps(_mm256_cvtepi32_ps(products[r][half]), scale);
                totals[r][half] = _mm256_fmadd_ps(product, a, _mm256_fmadd_ps(minimum, s, totals[r][half]));
            }
        }
        for (int r = 0; r < Rows; ++r) p[r] += matrix.group_size;
    }
    for (int r = 0; r < Rows; ++r)
        for (int half = 0; half < 2; ++half) _mm256_store_ps(sums[r] + 8 * half, totals[r][half]);
}

}  // namespace
}  // namespace avx2

const Kernels* avx2_kernels() {
    static const Kernels kernels = avx2::table("avx2");
    return &kernels;
}

}  // namespace omni
