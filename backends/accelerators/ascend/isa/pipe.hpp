// Pipes of a core. Each executes its own instructions in order; two pipes are ordered against each
// other only by set_flag/wait_flag (source pipe, waiting pipe, event) and fence.
#pragma once

#include <cstdint>

namespace mkernel::ascend::isa {

enum class Pipe : std::uint8_t {
    S = 0,     // scalar: issues everything, waits for and raises signals
    V = 1,     // vector
    M = 2,     // matrix
    MTE1 = 3,  // L1 → L0
    MTE2 = 4,  // GM → L1 / UB
    MTE3 = 5,  // UB → GM
    FIX = 6,   // L0C → GM
    ALL = 7,   // in fence only
};
inline constexpr int kPipes = 7;
inline constexpr int kEvents = 8;

constexpr const char* name_of(Pipe pipe) {
    constexpr const char* kNames[] = {"S", "V", "M", "MTE1", "MTE2", "MTE3", "FIX", "ALL"};
    return kNames[static_cast<int>(pipe)];
}

}  // namespace mkernel::ascend::isa
