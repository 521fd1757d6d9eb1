#include "backends/accelerators/cuda/device_clock.hpp"

#include <atomic>
#include <ctime>
#include <new>
#include <stdexcept>
#include <string>

#include "backends/accelerators/cuda/device.hpp"
#include "backends/accelerators/cuda/error.hpp"

namespace mkernel::cuda {

namespace {

std::int64_t monotonic_ns() {
    timespec now{};
    clock_gettime(CLOCK_MONOTONIC, &now);
    return std::int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

}  // namespace

DeviceClock::DeviceClock(int device) : device_(device) {
    const DeviceScope scope(device_);
    void* memory = nullptr;
    // With unified addressing the device's address is the same.
    check(cudaHostAlloc(&memory, sizeof(ClockWords), cudaHostAllocMapped | cudaHostAllocPortable),
          "cudaHostAlloc of the words of a device's clock");
    words_ = new (memory) ClockWords{};
}

DeviceClock::~DeviceClock() {
    if (!silent_) cudaFreeHost(words_);
}

std::vector<ClockSample> DeviceClock::read(int samples, double timeout_s, cudaStream_t stream) {
    if (samples < 1 || samples > kMostClockSamples) {
        throw std::invalid_argument("samples = " + std::to_string(samples) + "; expected 1 to " +
                                    std::to_string(kMostClockSamples));
    }
    if (silent_)
        throw std::runtime_error("the device did not tell its clock when it was last asked");
    const auto timeout_ns = static_cast<std::int64_t>(timeout_s * 1e9);
    for (std::uint64_t& stamp : words_->stamps) std::atomic_ref(stamp).store(0);
    std::atomic_ref asked(words_->asked);
    asked.store(0);
    const DeviceScope scope(device_);
    answer_clock(words_, samples, static_cast<std::uint64_t>(timeout_ns), stream);
    const std::int64_t deadline = monotonic_ns() + timeout_ns;
    std::vector<ClockSample> found;
    for (int sample = 0; sample < samples; ++sample) {
        const std::atomic_ref stamp(words_->stamps[sample]);
        const std::int64_t before = monotonic_ns();
        asked.store(static_cast<std::uint64_t>(sample) + 1);
        std::uint64_t told = 0;
        std::int64_t after = before;
        while (told == 0) {
            told = stamp.load(std::memory_order_acquire);
            after = monotonic_ns();
            if (told == 0 && after > deadline) {
                silent_ = true;
                throw std::runtime_error("the device did not tell its clock within " +
                                         std::to_string(timeout_s) + " s");
            }
        }
        found.push_back({before, static_cast<std::int64_t>(told), after});
    }
    return found;
}

void DeviceClock::hold(std::int64_t until_ns, double most_s, cudaStream_t stream) {
    std::atomic_ref(words_->passed).store(0);
    const DeviceScope scope(device_);
    hold_until(words_, static_cast<std::uint64_t>(until_ns),
               static_cast<std::uint64_t>(most_s * 1e9), stream);
}

std::int64_t DeviceClock::passed() const {
    return static_cast<std::int64_t>(
        std::atomic_ref(words_->passed).load(std::memory_order_acquire));
}

}  // namespace mkernel::cuda
