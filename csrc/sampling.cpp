#include "include/sampling.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace omni {

namespace {

// As in vLLM: below it the largest logit is taken.
constexpr float kGreedyTemperature = 1e-5f;

// How far below the largest logit candidates are looked for first, and how much farther each time there are too few.
constexpr float kFirstDepth = 4.0f, kDepthFactor = 3.0f, kFullDepth = 87.0f;

uint64_t mixed(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

// Natural logarithm of a positive, finite number by a fixed series: the C library's depends on the processor.
double logarithm(double x) {
    uint64_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    int64_t exponent = int64_t(bits >> 52) - 1023;
    bits = (bits & 0xfffffffffffffu) | 0x3ff0000000000000u;
    double mantissa;
    std::memcpy(&mantissa, &bits, sizeof mantissa);
    if (mantissa > 1.4142135623730951) {
        mantissa *= 0.5;
        ++exponent;
    }
    // log m = 2 atanh((m - 1) / (m + 1)).
    const double s = (mantissa - 1) / (mantissa + 1), square = s * s;
    double sum = 0;
    for (int n = 23; n >= 1; n -= 2) sum = sum * square + 1.0 / n;
    return double(exponent) * 0.6931471805599453 + 2 * s * sum;
}

// What is not a number is less than all others.
bool is_larger(const float* values, int64_t a, int64_t b) {
    const float x = values[a], y = values[b];
    if (x > y || (x == x && y != y)) return true;
    if (x < y || (x != x && y == y)) return false;
    return a < b;
}

class Draw {
public:
    Draw(const float* logits, int64_t columns, const omni_sampling& settings, SamplingScratch& scratch)
        : logits_(logits), columns_(columns), settings_(settings), scaled_(scratch.scaled.data()), weights_(scratch.weights.data()),
          kept_(scratch.kept) {}

    int64_t run(const Kernels& kernels) {
        for (int64_t i = 0; i < columns_; ++i) scaled_[i] = logits_[i] / settings_.temperature;
        const int64_t best = kernels.largest_index(scaled_, columns_);
        largest_ = scaled_[best];
        // An infinite logit takes it all; where there is none above minus infinity, the first is as good as any.
        if (!std::isfinite(largest_)) return best;
        total_ = double(kernels.exponentials(scaled_, columns_, largest_, weights_));
        const bool has_top_k = settings_.top_k > 0 && settings_.top_k < columns_;
        if (!has_top_k && settings_.min_p <= 0 && settings_.top_p >= 1) return first_above(uniform(settings_.seed, settings_.step) * total_);
        keep_candidates(has_top_k);
        keep_top_p(has_top_k || settings_.min_p > 0);
        return drawn();
    }

private:
    // Every token, in the order of ids.
    int64_t first_above(double target) const {
        double sum = 0;
        int64_t last = 0;
        for (int64_t i = 0; i < columns_; ++i) {
            if (weights_[i] <= 0) continue;
            last = i;
            sum += double(weights_[i]);
            if (sum > target) break;
        }
        return last;
    }

    // Enough of the likeliest tokens for what follows, the likeliest first.
    void keep_candidates(bool has_top_k) {
        const int64_t wanted = has_top_k ? settings_.top_k : columns_;
        for (float depth = kFirstDepth;; depth *= kDepthFactor) {
            const bool is_all = depth >= kFullDepth;
            kept_.clear();
            double sum = 0;
            for (int64_t i = 0; i < columns_; ++i)
                if (weights_[i] > 0 && (is_all || scaled_[i] >= largest_ - depth)) {
                    kept_.push_back(i);
                    sum += double(weights_[i]);
                }
            // A little more than needed, since a weight is a rounded exponential.
            const bool has_min_p = settings_.min_p > 0 && double(depth) > 0.01 - logarithm(double(settings_.min_p));
            const bool has_top_p = !has_top_k && settings_.min_p <= 0 && sum >= double(settings_.top_p) * total_;
            if (is_all || int64_t(kept_.size()) >= wanted || has_min_p || has_top_p) break;
        }
        std::sort(kept_.begin(), kept_.end(), [this](int64_t a, int64_t b) { return is_larger(scaled_, a, b); });
        if (int64_t(kept_.size()) > wanted) kept_.resize(size_t(wanted));
        while (kept_.size() > 1 && weights_[kept_.back()] < settings_.min_p) kept_.pop_back();
    }

    // The shortest beginning of the candidates that has so much of what they are together, or of all tokens.
    void keep_top_p(bool is_of_candidates) {
        if (settings_.top_p >= 1) return;
        double total = total_;
        if (is_of_candidates) {
            total = 0;
            for (const int64_t id : kept_) total += double(weights_[id]);
        }
        double before = 0;
        size_t count = 0;
        while (count < kept_.size() && (count == 0 || before < double(settings_.top_p) * total)) before += double(weights_[kept_[count++]]);
        kept_.resize(count);
    }

    int64_t drawn() const {
        double total = 0;
        for (const int64_t id : kept_) total += double(weights_[id]);
        const double target = uniform(settings_.seed, settings_.step) * total;
        double sum = 0;
        for (const int64_t id : kept_) {
            sum += double(weights_[id]);
            if (sum > target) return id;
        }
        return kept_.back();
    }

    const float* logits_;
    const int64_t columns_;
    const omni_sampling& settings_;
    float *scaled_, *weights_;
    std::vector<int64_t>& kept_;
    float largest_ = 0;
    double total_ = 0;
};

}  // namespace

double uniform(uint64_t seed, uint64_t step) {
    const uint64_t bits = mixed(mixed(seed + 0x9e3779b97f4a7c15u) + (step + 1) * 0x9e3779b97f4a7c15u);
    return double(bits >> 11) * 0x1p-53;
}

void log_softmax_row(const Kernels& kernels, const float* logits, int64_t columns, float* out) {
    const float largest = logits[kernels.largest_index(logits, columns)];
    // `out` holds the exponentials until their sum is known.
    const double total = double(kernels.exponentials(logits, columns, largest, out));
    const double shift = std::isfinite(largest) ? double(largest) + logarithm(total) : double(largest);
    for (int64_t i = 0; i < columns; ++i) out[i] = float(double(logits[i]) - shift);
}

void top_row(const float* values, int64_t columns, int64_t count, int64_t* ids) {
    for (int64_t i = 0; i < columns; ++i) ids[i] = i;
    const auto before = [values](int64_t a, int64_t b) { return is_larger(values, a, b); };
    if (count < columns) std::nth_element(ids, ids + count, ids + columns, before);
    std::sort(ids, ids + count, before);
}

int64_t sample_row(const Kernels& kernels, const float* logits, int64_t columns, const omni_sampling& settings, SamplingScratch& scratch) {
    if (settings.temperature < kGreedyTemperature) return kernels.largest_index(logits, columns);
    return Draw(logits, columns, settings, scratch).run(kernels);
}

}  // namespace omni
