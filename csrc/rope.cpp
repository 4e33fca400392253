// The table of rotary position embeddings. Sines and cosines are fixed polynomials in double precision, so that the table is the same
// on every processor: the C library's own functions differ with what a processor has.
#include "include/rope.h"

namespace omni {

namespace {

// pi / 2 in three parts, the first two of 30 bits: their products with a whole number below 2^23 are exact.
constexpr double kHalfPi[3] = {0x1.921fb54000000p+0, 0x1.10b4611800000p-30, 0x1.313198a2e0370p-61};
constexpr double kTwoOverPi = 0x1.45f306dc9c883p-1;

// terms[0] + terms[1] * x + ..., of eight terms.
double series(const double (&terms)[8], double x) {
    double sum = terms[7];
    for (int i = 6; i >= 0; --i) sum = sum * x + terms[i];
    return sum;
}

// Taylor's series on |x| <= pi / 4, each coefficient the nearest double to the inverse of a factorial.
double sine_near_zero(double x) {
    constexpr double terms[] = {-1.0 / 6,          1.0 / 120,           -1.0 / 5040,           1.0 / 362880,
                                -1.0 / 39916800, 1.0 / 6227020800.0, -1.0 / 1307674368000.0, 1.0 / 355687428096000.0};
    const double square = x * x;
    return x + x * (square * series(terms, square));
}

double cosine_near_zero(double x) {
    constexpr double terms[] = {-1.0 / 2,        1.0 / 24,          -1.0 / 720,          1.0 / 40320,
                                -1.0 / 3628800, 1.0 / 479001600.0, -1.0 / 87178291200.0, 1.0 / 20922789888000.0};
    const double square = x * x;
    return 1.0 + square * series(terms, square);
}

}  // namespace

void rope_row(const double* frequencies, int64_t count, double position, float magnitude, float* out) {
    for (int64_t i = 0; i < count; ++i) {
        const double angle = position * frequencies[i];
        const int64_t quarters = int64_t(angle * kTwoOverPi + 0.5);
        double rest = angle;
        for (const double part : kHalfPi) rest -= double(quarters) * part;
        const double sine = sine_near_zero(rest), cosine = cosine_near_zero(rest);
        const bool is_swapped = quarters & 1;
        const double x = is_swapped ? sine : cosine, y = is_swapped ? cosine : sine;
        out[i] = float((quarters + 1) & 2 ? -x : x) * magnitude;
        out[count + i] = float(quarters & 2 ? -y : y) * magnitude;
    }
}

}  // namespace omni
