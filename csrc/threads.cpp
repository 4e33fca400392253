#include <pthread.h>

#include <chrono>
#include <cstdlib>
#include <new>
#include <stdexcept>

#include "include/team.h"

namespace omni {

namespace {

// Waits within a job are short; a thread that waits longer shares its core with somebody and lets it run.
constexpr int kSpinsBeforeYield = 4000;
// How often a spinning thread looks at the clock.
constexpr int kSpinsPerClock = 64;

inline void pause_cpu() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

// Into the second-level cache, where a weight waits for its use.
inline void fetch_line(Ahead& ahead) {
    __builtin_prefetch(ahead.begin, 0, 2);
    ahead.begin += 64;
}

// How often this process is the child of a fork since the library was loaded.
std::atomic<uint32_t> forks{0};

uint32_t watched_forks() {
    static const int registered = pthread_atfork(nullptr, nullptr, [] { forks.fetch_add(1, std::memory_order_relaxed); });
    if (registered != 0) throw std::bad_alloc();
    return forks.load(std::memory_order_relaxed);
}

#if defined(__x86_64__)
// All exceptions masked, round to nearest, no flush to zero.
constexpr uint64_t kPlainRules = 0x1f80;
uint64_t float_rules() { return __builtin_ia32_stmxcsr(); }
void set_float_rules(uint64_t rules) { __builtin_ia32_ldmxcsr(uint32_t(rules)); }
#elif defined(__aarch64__)
constexpr uint64_t kPlainRules = 0;
uint64_t float_rules() {
    uint64_t rules;
    __asm__ volatile("mrs %0, fpcr" : "=r"(rules));
    return rules;
}
void set_float_rules(uint64_t rules) { __asm__ volatile("msr fpcr, %0" : : "r"(rules)); }
#else
constexpr uint64_t kPlainRules = 0;
uint64_t float_rules() { return 0; }
void set_float_rules(uint64_t) {}
#endif

}  // namespace

FloatRules::FloatRules() : before_(float_rules()) { set_float_rules(kPlainRules); }

FloatRules::~FloatRules() { set_float_rules(before_); }

Scratch::~Scratch() { std::free(data_); }

void* Scratch::reserve_bytes(int64_t bytes) {
    if (bytes <= capacity_) return data_;
    const int64_t rounded = (bytes + 63) / 64 * 64;
    std::free(data_);
    capacity_ = 0;
    data_ = std::aligned_alloc(64, size_t(rounded));
    if (!data_) throw std::bad_alloc();
    capacity_ = rounded;
    return data_;
}

Team::Team(int num_threads, const Kernels& kernels, int spin_us) : num_threads_(num_threads), kernels_(kernels), spin_us_(spin_us), generation_(watched_forks()) {
    try {
        for (int thread = 1; thread < num_threads; ++thread) threads_.emplace_back([this, thread] { work(thread); });
    } catch (...) {
        stopping_ = true;
        epoch_.fetch_add(1);
        { std::lock_guard<std::mutex> lock(mutex_); }
        wake_.notify_all();
        for (std::thread& thread : threads_) thread.join();
        throw;
    }
}

bool Team::is_forked() const { return generation_ != forks.load(std::memory_order_relaxed); }

Team::~Team() {
    stopping_ = true;
    epoch_.fetch_add(1);
    { std::lock_guard<std::mutex> lock(mutex_); }
    wake_.notify_all();
    for (std::thread& thread : threads_) thread.join();
}

void Team::run(const std::function<void(int)>& job) {
    if (is_forked())
        throw std::runtime_error("a team of threads does not cross a fork: create the engine in the process that uses it");
    const FloatRules rules;
    job_ = &job;
    epoch_.fetch_add(1);
    // A thread counts itself as parked before it looks at the epoch for the last time, under the mutex.
    if (parked_.load() > 0) {
        { std::lock_guard<std::mutex> lock(mutex_); }
        wake_.notify_all();
    }
    job(0);
    barrier();
}

void Team::barrier(Ahead& ahead) {
    if (num_threads_ == 1) return;
    const uint32_t phase = phase_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) == num_threads_ - 1) {
        arrived_.store(0, std::memory_order_relaxed);
        phase_.store(phase + 1, std::memory_order_release);
        return;
    }
    for (int spins = 0; phase_.load(std::memory_order_acquire) == phase; ++spins)
        if (spins >= kSpinsBeforeYield)
            std::this_thread::yield();
        else if (ahead.begin < ahead.end)
            fetch_line(ahead);
        else
            pause_cpu();
}

void Team::work(int thread) {
#if defined(__linux__)
    pthread_setname_np(pthread_self(), "omni-native");  // what top and gdb show
#endif
    const FloatRules rules;
    uint64_t seen = 0;
    for (;;) {
        seen = wait_for_job(seen);
        if (stopping_) return;
        (*job_)(thread);
        barrier();
    }
}

uint64_t Team::wait_for_job(uint64_t seen) {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::microseconds(spin_us_);
    for (int spins = 0;; ++spins) {
        const uint64_t epoch = epoch_.load(std::memory_order_acquire);
        if (epoch != seen) return epoch;
        pause_cpu();
        if (spins % kSpinsPerClock == 0 && std::chrono::steady_clock::now() >= deadline) break;
    }
    std::unique_lock<std::mutex> lock(mutex_);
    parked_.fetch_add(1);
    wake_.wait(lock, [&] { return epoch_.load() != seen; });
    parked_.fetch_sub(1);
    return epoch_.load();
}

}  // namespace omni
