// Rows of the table of rotary position embeddings.
#pragma once

#include <stdint.h>

namespace omni {

// Angles are at most so large: beyond it the part of pi / 2 that is taken away is no longer exact.
constexpr double kMaxAngle = 8388608.0;

// out [2 * count]: cosines, then sines, of position * frequencies[i], which is at least 0 and at most kMaxAngle; times `magnitude`.
void rope_row(const double* frequencies, int64_t count, double position, float magnitude, float* out);

}  // namespace omni
