#include "backends/accelerators/cuda/clock.hpp"

#include "backends/accelerators/cuda/small_launch.cuh"
#include "backends/transport/atomics.hpp"
#include "backends/transport/clock.hpp"

namespace mkernel::cuda {

namespace {

__global__ void answer_kernel(ClockWords* words, int samples, std::uint64_t timeout_ns) {
    const std::uint64_t start = transport::global_ns();
    for (int sample = 0; sample < samples; ++sample) {
        while (transport::load_relaxed(&words->asked) <= static_cast<std::uint64_t>(sample)) {
            if (transport::global_ns() - start > timeout_ns) return;
        }
        transport::store_relaxed(&words->stamps[sample], transport::global_ns());
    }
}

__global__ void hold_kernel(ClockWords* words, std::uint64_t until_ns, std::uint64_t most_ns) {
    const std::uint64_t start = transport::global_ns();
    std::uint64_t now = start;
    while (now < until_ns && now - start < most_ns) now = transport::global_ns();
    transport::store_relaxed(&words->passed, now);
}

}  // namespace

void answer_clock(ClockWords* words, int samples, std::uint64_t timeout_ns, cudaStream_t stream) {
    launch_small("launching answer_clock", answer_kernel, 1, 1, 0, stream, words, samples,
                 timeout_ns);
}

void hold_until(ClockWords* words, std::uint64_t until_ns, std::uint64_t most_ns,
                cudaStream_t stream) {
    launch_small("launching hold_until", hold_kernel, 1, 1, 0, stream, words, until_ns, most_ns);
}

}  // namespace mkernel::cuda
