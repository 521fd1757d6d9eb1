// The one way to wait for another GPU, for a copy engine or for a proxy.
//
// `Waiter::until` returns true once the word is at least `wanted` (an acquire: what its writer wrote
// before is visible; call ptx::fence_async_proxy() before bulk loads of it). It returns false when
// the call must be given up: the host set the abort word, another wait of this rank failed, or the
// deadline passed. The first time-out of a rank writes the diagnosis, published by `code`, into
// pinned memory of the host, where `failure()` of the backend finds it. Nothing traps: kernels skip
// what they waited for, run to their end, and the context stays usable.
//
// Any thread may wait; one thread of a warp at a time is enough and cheapest.
#pragma once

#include "backends/accelerators/hopper/device/workspace.cuh"
#include "backends/accelerators/hopper/ptx/sync.cuh"
#include "backends/transport/host_control.hpp"

namespace mkernel::hopper {

// What is waited for, for the diagnosis. `signal`: flag index; control words: kControlWord.
struct Awaited {
    std::uint32_t signal;
    std::uint32_t peer;
    std::uint32_t chunk;
};
inline constexpr std::uint32_t kControlWord = 0xFFFFFFFFu;
inline constexpr std::uint32_t kNoChunk = 0xFFFFFFFFu;

class Waiter {
  public:
    __device__ Waiter(const Workspace& workspace, const transport::WaitLimits& limits,
                      transport::Waiter kernel)
        : control_(&workspace.control()), limits_(limits), kernel_(kernel) {}

    __device__ bool until(const std::uint64_t* word, std::uint64_t wanted, Awaited what) const {
        if (ptx::load_acquire(word) >= wanted) return true;
        return poll(control_, limits_, kernel_, word, wanted, what);
    }

  private:
    // Many blocks may wait at a time, and the copy engines that they wait for fetch their commands
    // over the same PCIe link as the abort word: polls pause, and looks at the host are rare.
    static constexpr int kPauseNs = 64;
    static constexpr int kPollsBetweenLooks = 64;
    static constexpr std::uint64_t kHostLookNs = 1'000'000;

    // Not inlined, since it is long and rare; with its arguments by value, so that they stay in
    // registers.
    __device__ static __noinline__ bool poll(Control* control, transport::WaitLimits limits,
                                             transport::Waiter kernel, const std::uint64_t* word,
                                             std::uint64_t wanted, Awaited what) {
        const std::uint64_t start = ptx::global_ns();
        std::uint64_t look = start + kHostLookNs;
        while (true) {
            for (int turn = 0; turn < kPollsBetweenLooks; ++turn) {
                if (ptx::load_relaxed(word) >= wanted) return ptx::load_acquire(word) >= wanted;
                __nanosleep(kPauseNs);
            }
            if (ptx::load_relaxed(&control->failed) != 0) return false;
            const std::uint64_t now = ptx::global_ns();
            if (now < look) continue;
            look = now + kHostLookNs;
            if (ptx::load_relaxed(&limits.host->abort) != 0) {
                atomicExch(&control->failed, 1u);
                return false;
            }
            if (now - start > limits.timeout_ns) {
                if (atomicExch(&control->failed, 1u) == 0) {
                    record(limits, kernel, word, wanted, what);
                }
                return false;
            }
        }
    }

    __device__ static void record(const transport::WaitLimits& limits, transport::Waiter kernel,
                                  const std::uint64_t* word, std::uint64_t wanted, Awaited what) {
        transport::AbortRecord& record = limits.host->record;
        transport::Diagnosis& who = record.diagnosis;
        who.waiter = kernel;
        who.core = blockIdx.x;
        who.signal = what.signal;
        who.peer = what.peer;
        who.chunk = what.chunk;
        who.op = limits.call;
        who.seen = ptx::load_relaxed(word);
        who.wanted = wanted;
        ptx::store_release(&record.code, static_cast<std::uint32_t>(transport::AbortCode::timeout));
    }

    Control* control_;
    transport::WaitLimits limits_;
    transport::Waiter kernel_;
};

}  // namespace mkernel::hopper
