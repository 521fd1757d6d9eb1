// Panels of columns, of a product whose tiles of one panel all come before those of the next. Plain
// arithmetic, for host and device.
#pragma once

#include <cstdint>

#include "backends/transport/host_device.hpp"
#include "backends/transport/signal.hpp"

namespace mkernel::hopper::moe {

struct Panels {
    std::int32_t columns, most;  // of results; so many panels at most, 1: one is all

    // Of all but the last: whole pairs of tiles, of which a cluster may take two at a time.
    [[nodiscard]] MKERNEL_HOST_DEVICE std::int32_t each() const {
        constexpr int kPair = 512;
        return (columns + most * kPair - 1) / (most * kPair) * kPair;
    }
    [[nodiscard]] MKERNEL_HOST_DEVICE std::int32_t count() const {
        return (columns + each() - 1) / each();
    }
};

// Of a panel, zeros before a call.
struct PanelCount {
    transport::AddedWord stored;  // by so many blocks of the product: all of their results
    std::uint64_t claimed;  // groups of kTokenGroup tokens, whose sums are made beside the product
};
inline constexpr int kTokenGroup = 4;

}  // namespace mkernel::hopper::moe
