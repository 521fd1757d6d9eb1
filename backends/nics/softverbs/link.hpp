// The emulated link of a port, which computes when a packet that leaves now arrives. Each direction carries
// one packet after the other at the set bandwidth; latency and jitter come on top. Used under the control
// lock.
//
// A packet's moment of arrival travels with it; the receiver takes it then, and no faster than its own side
// of the link allows. Without emulation that moment is 0.
#pragma once

#include <algorithm>
#include <cstdint>
#include <random>

#include "backends/nics/softverbs/config.hpp"

namespace mkernel::nics::softverbs {

class Link {
  public:
    explicit Link(const Config& config)
        : latency_(config.latency_ns),
          jitter_(config.jitter_ns),
          out_{config.bandwidth_mbps},
          in_{config.bandwidth_mbps},
          random_(config.seed) {}

    // Sends a packet of so many payload bytes; returns when its last byte arrives.
    std::uint64_t depart(std::uint64_t now, std::uint32_t bytes) {
        if (latency_ == 0 && jitter_ == 0 && out_.mbps == 0) return 0;
        out_.free_at = std::max(out_.free_at, now) + out_.time_of(bytes);
        return out_.free_at + latency_ + (jitter_ != 0 ? random_() % jitter_ : 0);
    }
    // Returns true where a packet that arrives then can be taken now; if not, lowers `wake_at`.
    [[nodiscard]] bool arrived(std::uint64_t arrival, std::uint64_t now,
                               std::uint64_t& wake_at) const {
        const std::uint64_t from = std::max(arrival, in_.free_at);
        if (from > now) wake_at = std::min(wake_at, from);
        return from <= now;
    }
    // Returns how long before its arrival a copy of so many bytes should begin, in place of the link's
    // transfer.
    [[nodiscard]] std::uint64_t lead(std::uint64_t bytes) const {
        return kStarts * latency_ + (in_.mbps != 0 ? bytes * 8000 / in_.mbps : 0);
    }
    // Takes the packet.
    void take(std::uint64_t arrival, std::uint32_t bytes) {
        if (in_.mbps == 0 || arrival == 0) return;
        const std::uint64_t time = in_.time_of(bytes);
        in_.free_at = std::max(in_.free_at, arrival - time) + time;
    }

  private:
    static constexpr std::uint64_t kStarts = 10;  // latencies, in which a batch of copies begins

    struct Direction {
        std::uint64_t mbps;
        std::uint64_t free_at = 0;
        std::uint64_t rest = 0;  // of the division, so that small packets do not travel for nothing

        std::uint64_t time_of(std::uint32_t bytes) {
            if (mbps == 0) return 0;
            rest += std::uint64_t{bytes} * 8000;
            const std::uint64_t time = rest / mbps;
            rest %= mbps;
            return time;
        }
    };

    std::uint64_t latency_;
    std::uint64_t jitter_;
    Direction out_;
    Direction in_;
    std::mt19937_64 random_;
};

}  // namespace mkernel::nics::softverbs
