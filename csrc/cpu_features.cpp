// Which arms this processor can run: CPUID says what it has, XGETBV what the operating system saves and restores.
#include "include/kernel_table.h"

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace omni {

#if defined(__x86_64__)

namespace {

struct Registers {
    uint32_t eax, ebx, ecx, edx;
};

Registers cpuid(uint32_t leaf) {
    Registers r = {};
    __get_cpuid_count(leaf, 0, &r.eax, &r.ebx, &r.ecx, &r.edx);
    return r;
}

// States of XCR0: 2 is XMM, 4 is YMM, 0xe0 is the mask registers and ZMM.
bool os_saves(uint64_t states) {
    constexpr uint32_t osxsave = 1u << 27;
    if (!(cpuid(1).ecx & osxsave)) return false;
    uint32_t low, high;
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return ((uint64_t(high) << 32 | low) & states) == states;
}

}  // namespace

bool can_run_avx2() {
    constexpr uint32_t fma = 1u << 12, f16c = 1u << 29, avx2 = 1u << 5;
    const uint32_t first = cpuid(1).ecx;
    return os_saves(0x6) && (first & fma) && (first & f16c) && (cpuid(7).ebx & avx2);
}

bool can_run_avx512_vnni() {
    constexpr uint32_t f = 1u << 16, dq = 1u << 17, bw = 1u << 30, vl = 1u << 31, vnni = 1u << 11, needed = f | dq | bw | vl;
    const Registers seven = cpuid(7);
    return can_run_avx2() && os_saves(0xe6) && (seven.ebx & needed) == needed && (seven.ecx & vnni);
}

bool can_run_neon_dotprod() { return false; }

#elif defined(__aarch64__) && defined(__linux__)

bool can_run_avx2() { return false; }
bool can_run_avx512_vnni() { return false; }
bool can_run_neon_dotprod() { return getauxval(AT_HWCAP) & HWCAP_ASIMDDP; }

#elif defined(__aarch64__)

bool can_run_avx2() { return false; }
bool can_run_avx512_vnni() { return false; }
// Every Apple processor that runs macOS has them.
bool can_run_neon_dotprod() { return true; }

#else

bool can_run_avx2() { return false; }
bool can_run_avx512_vnni() { return false; }
bool can_run_neon_dotprod() { return false; }

#endif

}  // namespace omni
