// Memory of outputs that peers may write: torch's caching allocator takes it in large pieces, for a pool of
// its own (torch.cuda.MemPool), from ranges that are mapped at every rank of the node. Outputs are torch's
// tensors in every other respect: they are freed in the order of streams, and `record_stream` holds.
//
// Where no range has room a piece is ordinary memory of the device, which no peer writes.
//
// A graph's memory is in a pool of its own, because replays write to what is free in it: mkernel.graph_pool
// gives one of the same ranges, and whatever is captured with it takes pieces of them. Compiled code has its
// outputs in ordinary memory (contracts/output_memory.py).
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "backends/accelerators/cuda/memory.hpp"

namespace mkernel::cuda {

class OutputMemory {
  public:
    static constexpr std::size_t kMostRanges = 4;
    static constexpr std::size_t kPiece = std::size_t{2} << 20;  // pieces are multiples of it

    struct Place {
        int range;
        std::uint64_t offset;
    };

    explicit OutputMemory(int device) : device_(device) {}

    // Adds a range: this rank's memory, and where every rank's is mapped here, by rank (0: another node's).
    // std::length_error: there are kMostRanges.
    void add_range(std::shared_ptr<DeviceMemory> own, std::vector<std::uint64_t> everywhere);
    [[nodiscard]] std::size_t ranges() const;
    // Returns where a rank's range is mapped here.
    [[nodiscard]] std::uint64_t range_of(std::size_t range, std::size_t rank) const;
    // Returns where that memory lies; none: in no range.
    [[nodiscard]] std::optional<Place> place_of(std::uint64_t address, std::size_t bytes) const;

    // Allocates for torch's allocator. Null: the device has no memory left.
    void* allocate(std::size_t bytes) noexcept;
    void release(void* piece) noexcept;
    // Return the bytes of ranges that are in use, and of ordinary memory.
    [[nodiscard]] std::size_t taken() const;
    [[nodiscard]] std::size_t elsewhere() const;

  private:
    struct Range {
        std::shared_ptr<DeviceMemory> own;
        std::vector<std::uint64_t> everywhere;
        std::map<std::size_t, std::size_t> pieces;  // that are out: bytes by offset
    };
    [[nodiscard]] std::optional<Place> find(std::uint64_t address, std::size_t bytes) const;

    int device_;
    mutable std::mutex mutex_;
    std::vector<Range> ranges_;
    std::map<std::uint64_t, std::size_t> ordinary_;  // bytes by address
};

}  // namespace mkernel::cuda
