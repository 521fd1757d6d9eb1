#include "backends/accelerators/cuda/host/collectives/landing.hpp"

#include <utility>

namespace mkernel::cuda {

static_assert(kOutputRanges == cuda::OutputMemory::kMostRanges);

Outputs::Outputs(std::shared_ptr<const cuda::OutputMemory> memory, int world, std::size_t bytes)
    : memory_(std::move(memory)), world_(world), bytes_(bytes) {}

Landings Outputs::landings(std::uint64_t out) const {
    Landings made{};
    if (memory_ == nullptr) return made;
    made.told = true;
    for (std::size_t range = 0; range < memory_->ranges(); ++range) {
        for (int rank = 0; rank < world_; ++rank) {
            made.ranges[range][rank] =
                reinterpret_cast<char*>(memory_->range_of(range, static_cast<std::size_t>(rank)));
        }
    }
    if (const auto place = memory_->place_of(out, bytes_)) {
        made.own = landing_at(place->range, place->offset);
    }
    return made;
}

}  // namespace mkernel::cuda
