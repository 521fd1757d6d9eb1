// Protection domains and memory regions, and the shared file behind a region if there is one.
//
// The table is guarded by the context's control lock: the engine holds it while it touches user
// memory, so that after ibv_dereg_mr returns nothing touches the region any more.
#pragma once

#include <infiniband/verbs.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "backends/nics/softverbs/config.hpp"
#include "backends/nics/softverbs/device_memory.hpp"
#include "backends/nics/softverbs/port.hpp"

namespace mkernel::nics::softverbs {

struct Pd : ibv_pd {
    std::uint32_t users = 0;  // regions and queue pairs
};

// The place where another process finds a region's bytes: (file, offset of the region's start).
struct Backing {
    Fd fd;  // our own duplicate, so that number and inode stay valid while the region lives
    std::uint64_t inode = 0;
    std::uint64_t offset = 0;
};

// Returns the shared mapping that wholly contains [address, address + length), if this process also holds a
// descriptor of its file. Reads /proc/self.
std::optional<Backing> find_backing(std::uint64_t address, std::uint64_t length);

// Returns true where every byte of the range is mapped with the wanted rights.
bool is_mapped(std::uint64_t address, std::uint64_t length, bool writable);

// Writes payload bytes; every byte that the device writes into its host's memory passes here.
void place_bytes(const Config& config, std::uint64_t address, const std::byte* source,
                 std::size_t bytes);

struct Mr : ibv_mr {
    unsigned int access = 0;
    std::optional<Backing> backing;
    std::optional<DeviceBacking> device;  // it is device memory

    [[nodiscard]] bool contains(std::uint64_t start, std::uint64_t bytes) const {
        const auto base = reinterpret_cast<std::uint64_t>(addr);
        return start >= base && bytes <= length && start - base <= length - bytes;
    }
};

class MrTable {
  public:
    static constexpr std::uint32_t kMax = 1u << 16;
    // Takes the region and gives it its key; returns null where the table is full.
    Mr* add(std::unique_ptr<Mr> mr);
    bool remove(Mr* mr);
    [[nodiscard]] Mr* find(std::uint32_t key) const {
        const std::uint32_t index = key >> 8;
        Mr* mr = index < slots_.size() ? slots_[index].mr.get() : nullptr;
        return mr != nullptr && mr->rkey == key ? mr : nullptr;
    }

  private:
    struct Slot {
        std::unique_ptr<Mr> mr;
        std::uint8_t generation = 0;
    };
    std::vector<Slot> slots_;
    std::size_t next_ = 0;
};

}  // namespace mkernel::nics::softverbs
