// In place of the transport's: a wait for a word has no end but the word.
#pragma once

#include <cstdint>

#include "backends/transport/call_state.hpp"
#include "backends/transport/signal.hpp"
#include "tests/native/model/explore.hpp"

namespace mkernel::transport {

struct Awaited {
    std::uint32_t signal, peer, chunk;
};
inline constexpr std::uint32_t kControlWord = 0xFFFFFFFFu;
inline constexpr std::uint32_t kNoChunk = 0xFFFFFFFFu;

struct WaitLimits {};
enum class Waiter { kernel };

struct DeviceWaiter {
    DeviceWaiter(CallState&, const WaitLimits&, Waiter) {}

    [[nodiscard]] bool until(const Word& word, std::uint64_t wanted, Awaited) const {
        while (!word.reached(wanted)) model::yield();
        return true;
    }
};

}  // namespace mkernel::transport
