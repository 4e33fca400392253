// Armv8.2 with the dot-product instructions: four rows in a register, four columns of each in a lane.
#include <arm_neon.h>

static inline int32x4_t widened_bytes(const int8_t* bytes) {
    int32_t four;
    __builtin_memcpy(&four, bytes, sizeof four);
    return vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_s32(vdup_n_s32(four)))));
}

#define OMNI_ARM neon_dotprod
#define OMNI_LANES 4
#define OMNI_FUSED(a, b, c) ((Floats)vfmaq_f32((float32x4_t)(c), (float32x4_t)(a), (float32x4_t)(b)))
#define OMNI_LARGER(x, y) ((x) > (y) ? (x) : (y))
#define OMNI_WIDENED_BYTES(bytes) ((Ints)widened_bytes(bytes))
#define OMNI_WIDENED_HALVES(halves) ((Words)vmovl_u16(vld1_u16(halves)))
#include "sampling.inl"

namespace omni {
namespace neon_dotprod {
namespace {

// Registers of four rows that make a block.
constexpr int kParts = 4;

inline float32x4_t load_halves(const uint8_t* bytes) {
    return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(reinterpret_cast<const uint16_t*>(bytes))));
}

// Weights of 8 bits as q - 127, so that they are signed.
template <Form F>
inline int8x16_t signed_weights(uint8x16_t bytes) {
    return vreinterpretq_s8_u8(F == Form::bytes ? vsubq_u8(bytes, vdupq_n_u8(127)) : bytes);
}

template <int Rows, Form F>
inline void add_group(const uint8_t* chunks, int32_t group_size, const int8_t* const (&p)[Rows], int32x4_t (&products)[Rows][kParts]) {
    constexpr bool kNibbles = F == Form::nibbles;
    for (int r = 0; r < Rows; ++r)
        for (int part = 0; part < kParts; ++part) products[r][part] = vdupq_n_s32(0);
    for (int32_t column = 0; column < group_size; column += 8, chunks += kNibbles ? 64 : 128) {
        int8x8_t x[Rows];
        for (int r = 0; r < Rows; ++r) x[r] = vld1_s8(p[r] + column);
        for (int part = 0; part < kParts; ++part) {
            const uint8x16_t bytes = vld1q_u8(chunks + 16 * part);
            const int8x16_t first = signed_weights<F>(kNibbles ? vandq_u8(bytes, vdupq_n_u8(15)) : bytes);
            const int8x16_t second = signed_weights<F>(kNibbles ? vshrq_n_u8(bytes, 4) : vld1q_u8(chunks + 64 + 16 * part));
            for (int r = 0; r < Rows; ++r) {
                products[r][part] = vdotq_lane_s32(products[r][part], first, x[r], 0);
                products[r][part] = vdotq_lane_s32(products[r][part], second, x[r], 1);
            }
        }
    }
}

template <int Rows, Form F>
void multiply_cells(const Cells& cells, const Activations& x, int64_t row, float (*sums)[kBlockRows]) {
    const uint8_t* cell = cells.data;
    const int8_t* p[Rows];
    float32x4_t totals[Rows][kParts];
    for (int r = 0; r < Rows; ++r) {
        p[r] = x.p + (row + r) * x.padded_columns + cells.first_group * cells.group_size;
        for (int part = 0; part < kParts; ++part) totals[r][part] = vld1q_f32(sums[r] + 4 * part);
    }
    for (int64_t g = cells.first_group; g < cells.first_group + cells.num_groups; ++g, cell += cells.bytes) {
        int32x4_t products[Rows][kParts];
        add_group<Rows, F>(cell + kCellHeaderBytes, cells.group_size, p, products);
        for (int part = 0; part < kParts; ++part) {
            const float32x4_t scale = load_halves(cell + 8 * part);
            const float32x4_t minimum = load_halves(cell + 32 + 8 * part);
            for (int r = 0; r < Rows; ++r) {
                // The 8-bit products are of q - 127.
                if (F == Form::bytes)
                    products[r][part] = vaddq_s32(products[r][part], vdupq_n_s32(127 * x.sums[(row + r) * x.groups + g]));
                totals[r][part] = vfmaq_n_f32(totals[r][part], minimum, x.s[(row + r) * x.groups + g]);
                const float32x4_t product = vmulq_f32(vcvtq_f32_s32(products[r][part]), scale);
                totals[r][part] = vfmaq_n_f32(totals[r][part], product, x.a[(row + r) * x.groups + g]);
            }
        }
        for (int r = 0; r < Rows; ++r) p[r] += cells.group_size;
    }
    for (int r = 0; r < Rows; ++r)
        for (int part = 0; part < kParts; ++part) vst1q_f32(sums[r] + 4 * part, totals[r][part]);
}

template <int Rows>
void multiply_codes(const uint8_t* codes, int32_t head_dim, const int8_t* q, int64_t q_stride, const int32_t*,
                    int32_t (*out)[kChunkKeys]) {
    int32x4_t products[Rows][kParts];
    for (int r = 0; r < Rows; ++r)
        for (int part = 0; part < kParts; ++part) products[r][part] = vdupq_n_s32(0);
    for (int32_t d = 0; d < head_dim; d += 4, codes += 64)
        for (int part = 0; part < kParts; ++part) {
            const int8x16_t keys = signed_weights<Form::bytes>(vld1q_u8(codes + 16 * part));
            for (int r = 0; r < Rows; ++r) {
                int32_t four;
                memcpy(&four, q + r * q_stride + d, sizeof four);
                products[r][part] = vdotq_s32(products[r][part], keys, vreinterpretq_s8_s32(vdupq_n_s32(four)));
            }
        }
    for (int r = 0; r < Rows; ++r)
        for (int part = 0; part < kParts; ++part) vst1q_s32(out[r] + 4 * part, products[r][part]);
}

}  // namespace
}  // namespace neon_dotprod

const Kernels* neon_dotprod_kernels() {
    static const Kernels kernels = neon_dotprod::table("neon_dotprod");
    return &kernels;
}

}  // namespace omni
