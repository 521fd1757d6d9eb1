// The interface of an op to a launch: its two kernels and what they touch. There is one object a call, on one
// rank; kernels of it run on many cores at once.
//
// The comm kernel runs on vector cores. The compute kernel has a cube part and a vector part, which run at
// the same time; an op may use one of them or both.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "backends/accelerators/ascend/kernels/call.hpp"
#include "backends/accelerators/ascend/sim/core.hpp"

namespace mkernel::ascend::host {

// The cores of each kernel of a call.
struct Blocks {
    std::uint32_t comm = 0, cube = 0, vector = 0;
};

class Kernels {
  public:
    struct Tensor {
        isa::GlobalView* view;
        bool writable;
    };

    virtual ~Kernels() = default;

    // Binds, before the first launch, the call, whose pointers stay valid, and the blocks of each kernel.
    virtual void bind(const CallArgs& call, const Blocks& blocks) = 0;

    // Run a kernel's part on each block's core. Return false if a wait was aborted or timed out.
    virtual bool comm(sim::Core& core) const = 0;
    virtual bool cube(sim::Core&) const { return true; }
    virtual bool vector(sim::Core&) const { return true; }

    // In the sequential view, `compute_first` returns true where compute comes before communication, which
    // works on its results. Otherwise `arrived` ends the comm kernel, on one core: it waits until everything
    // that the compute kernel needs of other ranks is here.
    [[nodiscard]] virtual bool compute_first() const { return false; }
    virtual bool arrived(sim::Core& core) const = 0;

    [[nodiscard]] virtual std::uint32_t world() const = 0;
    // Returns true where the comm kernel has work.
    [[nodiscard]] virtual bool communicates() const { return world() > 1; }
    // Return the words of a signal pad, and the bytes of each part of the memory (kernels/call.hpp).
    [[nodiscard]] virtual std::uint64_t words() const = 0;
    [[nodiscard]] virtual std::uint64_t inbox_bytes() const = 0;
    [[nodiscard]] virtual std::uint64_t outbox_bytes() const = 0;
    [[nodiscard]] virtual std::uint64_t scratch_bytes() const = 0;
    virtual std::vector<Tensor> tensors() = 0;

    // Writes, before a record, everything that blocks of this call learn from each other by memory: a record
    // runs blocks one after another. Called on one vector core that runs alone.
    virtual void foresee(sim::Core&) const {}

    // Calls `amount` with how much this call, in its view, adds to each word of the own pad once all of it
    // has arrived.
    using Amount = std::function<void(std::uint32_t word, std::uint64_t amount)>;
    virtual void each_amount(const Amount& amount) const = 0;
};

// Refuses (std::invalid_argument) tile sizes that a cube core's buffers cannot hold.
void check_tiling(const Tiling& tiling, isa::DType dtype);
void check_fits(const char* what, std::uint64_t bytes, isa::Buffer buffer);
void check_world(std::uint32_t world);

}  // namespace mkernel::ascend::host
