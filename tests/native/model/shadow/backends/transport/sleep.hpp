// In place of the transport's: nobody sleeps longer than until he is woken.
#pragma once

#include <cstdint>

#include "tests/native/model/explore.hpp"

namespace mkernel::transport {

enum class Reach { process, host };

inline void sleep_while(const std::uint32_t* word, std::uint32_t seen, std::uint64_t, Reach) {
    model::sleep_while(word, seen);
}
inline void wake_all(const std::uint32_t* word, Reach) {
    model::wake_all(word);
}
inline const std::uint32_t* low_half(const std::uint64_t* word) {
    return reinterpret_cast<const std::uint32_t*>(word);
}
inline void ring(int eventfd) {
    model::ring(eventfd);
}
inline void hush(int eventfd) {
    model::hush(eventfd);
}
inline void yield() {
    model::yield();
}

}  // namespace mkernel::transport
