// What sampling takes from an arm: the largest of many numbers, and exponentials with their sum.
#include "attention.inl"

namespace omni {
namespace OMNI_ARM {
namespace {

// Index of the largest number, the first of equal ones; what is not a number counts as less than all others.
int64_t largest_index(const float* x, int64_t count) {
    int64_t best = 0;
    float most = from_bits(0xff800000);
    // Blocks that hold nothing larger are passed over whole.
    for (int64_t begin = 0; begin < count; begin += 16) {
        const int64_t n = smaller(16, count - begin);
        if (n == 16) {
            Lanes block = load16(x + begin);
            bool has_larger = false;
            for (int i = 0; i < kRegisters; ++i) {
                const Ints above = block.part[i] > splat(most);
                int32_t lanes[OMNI_LANES];
                memcpy(lanes, &above, sizeof lanes);
                for (int lane = 0; lane < OMNI_LANES; ++lane) has_larger |= lanes[lane] != 0;
            }
            if (!has_larger) continue;
        }
        for (int64_t i = begin; i < begin + n; ++i)
            if (x[i] > most) {
                most = x[i];
                best = i;
            }
    }
    return best;
}

// e^(x - shift); 0 below e^-87, and for what is not a number.
inline Floats weight_of(Floats x, Floats shift) {
    const Floats difference = x - shift;
    return difference >= -87.0f ? exponential(difference) : Floats{};
}

// out = e^(x - shift), and their sum over sixteen lanes.
float exponentials(const float* x, int64_t count, float shift, float* out) {
    Lanes sums = {};
    int64_t i = 0;
    for (; i + 16 <= count; i += 16) {
        const Lanes weights = map([&](Floats v) { return weight_of(v, splat(shift)); }, load16(x + i));
        store16(out + i, weights);
        sums = add(sums, weights);
    }
    if (i < count) {
        float rest[16];
        for (int lane = 0; lane < 16; ++lane) rest[lane] = i + lane < count ? x[i + lane] : from_bits(0xff800000);
        const Lanes weights = map([&](Floats v) { return weight_of(v, splat(shift)); }, load16(rest));
        store16(rest, weights);
        memcpy(out + i, rest, sizeof(float) * size_t(count - i));
        sums = add(sums, weights);
    }
    return sum_of(sums);
}

constexpr Kernels table(const char* name) {
    return {name,      gemm,     quantize_row, dequantize_row, to_bfloat16,    rms_norm_row,  rope_head,
            gated_activation, sigmoid,  store_cell,   attention,      join_attention, largest_index, exponentials};
}

}  // namespace
}  // namespace OMNI_ARM
}  // namespace omni
