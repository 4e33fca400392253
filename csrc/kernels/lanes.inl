// Numbers that every arm computes to the same bits. An arm defines, before it includes this:
//   OMNI_ARM              its namespace
//   OMNI_LANES            float32 lanes of a register: 4, 8 or 16
//   OMNI_FUSED(a, b, c)   a * b + c of three `Floats`, rounded once
//   OMNI_LARGER(x, y)     x > y ? x : y of two `Floats`, so y where one is not a number
//   OMNI_WIDENED_BYTES(x), OMNI_WIDENED_HALVES(x)   the next signed bytes, or unsigned numbers of 16 bits, as integers of 32
// Three rules make the bits equal: nothing is fused but by `fused` (the build forbids the compiler to do it), sums run over 16 lanes and
// then through one tree whatever a register holds, and functions are fixed polynomials.
// Nothing of the standard library is used: an inline function of a header, compiled here for one instruction set, could be the
// copy that the linker keeps for all.
#pragma once

#include <stdint.h>
#include <string.h>

#include "../include/kernel_table.h"

namespace omni {
namespace OMNI_ARM {
namespace {

typedef float Floats __attribute__((vector_size(4 * OMNI_LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * OMNI_LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * OMNI_LANES)));
typedef int8_t Bytes __attribute__((vector_size(OMNI_LANES)));

inline Floats load(const float* x) {
    Floats v;
    memcpy(&v, x, sizeof v);
    return v;
}

inline void store(float* x, Floats v) { memcpy(x, &v, sizeof v); }

inline Floats splat(float x) { return x - Floats{}; }

inline Floats fused(Floats a, Floats b, Floats c) { return OMNI_FUSED(a, b, c); }
inline float fused(float a, float b, float c) { return __builtin_fmaf(a, b, c); }

inline float larger(float x, float y) { return x > y ? x : y; }
inline Floats larger(Floats x, Floats y) { return OMNI_LARGER(x, y); }
inline int64_t smaller(int64_t x, int64_t y) { return x < y ? x : y; }
inline int64_t later(int64_t x, int64_t y) { return x > y ? x : y; }
inline int64_t divide_up(int64_t x, int64_t y) { return (x + y - 1) / y; }

inline float from_bits(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

inline uint32_t to_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

// Sixteen lanes, in as many registers as they take.
constexpr int kRegisters = 16 / OMNI_LANES;

struct Lanes {
    Floats part[kRegisters];
};

inline Lanes load16(const float* x) {
    Lanes v;
    for (int i = 0; i < kRegisters; ++i) v.part[i] = load(x + i * OMNI_LANES);
    return v;
}

// The first `count` numbers, then zeros.
inline Lanes load_some(const float* x, int64_t count) {
    float lanes[16] = {};
    memcpy(lanes, x, sizeof(float) * size_t(count));
    return load16(lanes);
}

inline void store16(float* x, const Lanes& v) {
    for (int i = 0; i < kRegisters; ++i) store(x + i * OMNI_LANES, v.part[i]);
}

template <typename Function>
inline Lanes map(const Function& function, const Lanes& a) {
    Lanes out;
    for (int i = 0; i < kRegisters; ++i) out.part[i] = function(a.part[i]);
    return out;
}

template <typename Function>
inline Lanes map(const Function& function, const Lanes& a, const Lanes& b) {
    Lanes out;
    for (int i = 0; i < kRegisters; ++i) out.part[i] = function(a.part[i], b.part[i]);
    return out;
}

inline Lanes add(const Lanes& a, const Lanes& b) {
    return map([](Floats x, Floats y) { return x + y; }, a, b);
}

// Lane i + Width in lane i.
template <int Width>
inline Floats rotated(Floats v) {
#if OMNI_LANES == 16
    constexpr Ints places = {Width,     Width + 1, Width + 2,  Width + 3,  Width + 4,  Width + 5,  Width + 6,  Width + 7,
                             Width + 8, Width + 9, Width + 10, Width + 11, Width + 12, Width + 13, Width + 14, Width + 15};
#elif OMNI_LANES == 8
    constexpr Ints places = {Width, Width + 1, Width + 2, Width + 3, Width + 4, Width + 5, Width + 6, Width + 7};
#else
    constexpr Ints places = {Width, Width + 1, Width + 2, Width + 3};
#endif
    return __builtin_shuffle(v, places);  // modulo the number of lanes
}

template <int Width, typename Function>
inline Floats folded_lanes(Floats v, const Function& function) {
    if constexpr (Width == 0)
        return v;
    else
        return folded_lanes<Width / 2>(function(v, rotated<Width>(v)), function);
}

// Lanes i and i + 8, then i and i + 4, i + 2, i + 1.
template <typename Function>
inline float folded(Lanes v, const Function& function) {
    for (int width = kRegisters / 2; width > 0; width /= 2)
        for (int i = 0; i < width; ++i) v.part[i] = function(v.part[i], v.part[i + width]);
    return folded_lanes<OMNI_LANES / 2>(v.part[0], function)[0];
}

struct Sum {
    template <typename T>
    T operator()(T a, T b) const {
        return a + b;
    }
};

struct Largest {
    template <typename T>
    T operator()(T a, T b) const {
        return larger(a, b);
    }
};

inline float sum_of(const Lanes& v) { return folded(v, Sum()); }
inline float largest_of(const Lanes& v) { return folded(v, Largest()); }

// Adding and taking away 1.5 * 2^23 rounds to the nearest integer, halves to even, for |x| < 2^22. Between the two, the integer stands
// in the low bits, so that converting needs no instruction whose result is undefined for what is not a number.
constexpr float kRounder = 12582912.0f;
constexpr int32_t kRounderBits = 0x4b400000;

inline Ints rounded_to_int(Floats x) { return (Ints)(x + kRounder) - kRounderBits; }

// 2^x for x below 128, to about 1 unit in the last place; below -126 it is 2^-126. Exactly 1 at 0.
inline Floats power_of_two(Floats x) {
    x = larger(splat(-126.0f), x);
    const Floats shifted = x + kRounder;
    const Floats r = x - (shifted - kRounder);
    // Taylor's series of e^(r ln 2) on |r| <= 1/2.
    Floats sum = splat(1.5252734e-5f);
    sum = fused(sum, r, splat(1.5403530e-4f));
    sum = fused(sum, r, splat(1.3333558e-3f));
    sum = fused(sum, r, splat(9.6181291e-3f));
    sum = fused(sum, r, splat(5.5504109e-2f));
    sum = fused(sum, r, splat(2.4022651e-1f));
    sum = fused(sum, r, splat(6.9314718e-1f));
    sum = fused(sum, r, splat(1.0f));
    return sum * (Floats)(((Words)shifted + 127u) << 23);
}

inline float power_of_two(float x) { return power_of_two(splat(x))[0]; }

constexpr float kLog2E = 1.44269504f;

// e^x to about 1 unit in the last place; below -87 it is 1e-38, above 88 it is 1e38.
inline Floats exponential(Floats x) {
    x = larger(splat(-87.0f), x);
    const Floats high = splat(88.0f);
    x = x > high ? high : x;
    const Floats shifted = fused(x, splat(kLog2E), splat(kRounder));
    const Floats n = shifted - kRounder;
    const Floats r = fused(n, splat(2.12194440e-4f), fused(n, splat(-0.693359375f), x));
    // Taylor's series on |r| <= ln(2) / 2.
    Floats sum = splat(1.0f / 5040);
    sum = fused(sum, r, splat(1.0f / 720));
    sum = fused(sum, r, splat(1.0f / 120));
    sum = fused(sum, r, splat(1.0f / 24));
    sum = fused(sum, r, splat(1.0f / 6));
    sum = fused(sum, r, splat(0.5f));
    sum = fused(sum * r, r, r) + 1.0f;
    return sum * (Floats)(((Words)shifted + 127u) << 23);
}

inline float from_half(uint16_t half) {
    // Exponent moved to float32's place; the product with 2^112 restores the bias and makes subnormals normal.
    const float magnitude = from_bits(uint32_t(half & 0x7fff) << 13) * from_bits(0x77800000);
    const uint32_t special = (half & 0x7c00) == 0x7c00 ? 0x7f800000u : 0;
    return from_bits(to_bits(magnitude) | special | uint32_t(half & 0x8000) << 16);
}

inline uint16_t to_bfloat16_bits(float x) {
    const uint32_t bits = to_bits(x);
    const uint32_t nearest = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    return uint16_t(x == x ? nearest : 0x7fc0);
}

// bfloat16 and bytes as float32, exactly.
inline Floats widened(const uint16_t* numbers) {
    return (Floats)((Words)OMNI_WIDENED_HALVES(numbers) << 16);
}

inline Floats widened(const int8_t* numbers) {
    return __builtin_convertvector(OMNI_WIDENED_BYTES(numbers), Floats);
}

inline Floats widened(const float* numbers) { return load(numbers); }

}  // namespace
}  // namespace OMNI_ARM
}  // namespace omni
