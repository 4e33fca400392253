#include <chrono>
#include <cstdlib>
#include <new>

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

}  // namespace

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

Team::Team(int num_threads, const Kernels& kernels, int spin_us) : num_threads_(num_threads), kernels_(kernels), spin_us_(spin_us) {
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

Team::~Team() {
    stopping_ = true;
    epoch_.fetch_add(1);
    { std::lock_guard<std::mutex> lock(mutex_); }
    wake_.notify_all();
    for (std::thread& thread : threads_) thread.join();
}

void Team::run(const std::function<void(int)>& job) {
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
