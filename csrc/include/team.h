// A team of threads that walk one job together, from barrier to barrier.
#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "kernel_table.h"

namespace omni {

// Memory that grows and keeps an alignment of 64 bytes; its content is lost when it grows.
class Scratch {
public:
    Scratch() = default;
    ~Scratch();
    Scratch(const Scratch&) = delete;
    Scratch& operator=(const Scratch&) = delete;

    template <typename T>
    T* reserve(int64_t count) {
        return static_cast<T*>(reserve_bytes(count * int64_t(sizeof(T))));
    }

private:
    void* reserve_bytes(int64_t bytes);

    void* data_ = nullptr;
    int64_t capacity_ = 0;
};

// Memory that will be read soon, from its beginning.
struct Ahead {
    const uint8_t* begin = nullptr;
    const uint8_t* end = nullptr;
};

class Team {
public:
    // Throws std::system_error where a thread cannot be started.
    Team(int num_threads, const Kernels& kernels, int spin_us);
    ~Team();
    Team(const Team&) = delete;
    Team& operator=(const Team&) = delete;

    // Runs job(thread) on every thread, the calling one as thread 0, and returns when all are done. Throws std::runtime_error in a process
    // that was forked from the one that made the team: its threads are not there.
    void run(const std::function<void(int)>& job);

    // Within a job: nobody goes on before all have come here. Who waits asks memory for what is ahead, and moves its beginning.
    void barrier(Ahead& ahead);
    void barrier() {
        Ahead nothing;
        barrier(nothing);
    }

    // Whether this process was forked from the one that made the team. Such a team cannot be ended either: its threads are not there.
    bool is_forked() const;

    int size() const { return num_threads_; }
    const Kernels& kernels() const { return kernels_; }

private:
    void work(int thread);
    uint64_t wait_for_job(uint64_t seen);

    const int num_threads_;
    const Kernels& kernels_;
    const int spin_us_;
    const uint32_t generation_;

    alignas(64) std::atomic<uint64_t> epoch_{0};
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<uint32_t> phase_{0};
    std::atomic<int> parked_{0};
    std::atomic<bool> stopping_{false};
    const std::function<void(int)>* job_ = nullptr;
    std::mutex mutex_;
    std::condition_variable wake_;
    std::vector<std::thread> threads_;
};

// While it lives, this thread rounds to nearest and keeps subnormal numbers, whatever the application has set.
class FloatRules {
public:
    FloatRules();
    ~FloatRules();
    FloatRules(const FloatRules&) = delete;
    FloatRules& operator=(const FloatRules&) = delete;

private:
    uint64_t before_;
};

struct Range {
    int64_t begin, end;
};

// Part `index` of `parts` nearly equal parts of 0..count.
inline Range share(int64_t count, int64_t index, int64_t parts) { return {count * index / parts, count * (index + 1) / parts}; }

}  // namespace omni
