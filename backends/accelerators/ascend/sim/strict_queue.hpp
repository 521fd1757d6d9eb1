// The queue of a core's instructions whose effect is still to come: one queue a pipe, drained in an order
// drawn from a seed, any that pipe order, flags and fences allow.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <functional>
#include <optional>
#include <random>

#include "backends/accelerators/ascend/isa/pipe.hpp"

namespace mkernel::ascend::sim {

class Queue {
  public:
    using Effect = std::function<void()>;

    explicit Queue(std::optional<std::uint64_t> seed)
        : defers_(seed.has_value()), random_(seed.value_or(0)) {}

    // Without a seed effects run at once and flags order nothing.
    void push(isa::Pipe pipe, Effect effect);
    void set(isa::Pipe source, isa::Pipe waiting, std::uint32_t event);
    // Where S waits, everything that its flag covers has happened on return.
    void wait(isa::Pipe source, isa::Pipe waiting, std::uint32_t event);
    // On return, everything issued so far, to one pipe or to all, has taken effect.
    void drain();
    void drain(isa::Pipe pipe);

  private:
    struct Item {
        enum class Kind : std::uint8_t { effect, set, wait } kind = Kind::effect;
        std::size_t flag = 0;
        Effect effect{};
    };
    // The most pending effects, more than a core has in flight on hardware; bounds memory.
    static constexpr std::size_t kMost = 64;

    void add(isa::Pipe pipe, Item item);
    bool step();  // runs one instruction; false: none can
    [[nodiscard]] bool ready(const std::deque<Item>& pipe) const;

    bool defers_;
    std::mt19937_64 random_;
    std::array<std::deque<Item>, isa::kPipes> pipes_;
    std::array<int, isa::kPipes * isa::kPipes * isa::kEvents> flags_{};
    std::size_t pending_ = 0;
};

}  // namespace mkernel::ascend::sim
