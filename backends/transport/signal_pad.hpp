// A rank's signal pad in host memory: words (signal.hpp) of either kind, and the rank's abort record.
//
// `SignalPad` is the plain handle that kernels, proxies and simulators get by value; the memory is
// a symmetric segment that the world owns. Layout: one header, then `capacity` words, then the expected
// count of each, which only the pad's own rank uses. Pages that nobody touches take no memory.
//
//   add(i, v)   to an added word.
//   wait(i, v)  for a word of either kind: returns `ok` once word i >= v; `aborted` once the abort word
//               is set; `timed_out` at the deadline, after writing the diagnostic record and the abort
//               word.
//   expected(i) of an added word.
//
// Any number of threads and processes may add and wait. A waiter spins briefly, then sleeps on a
// futex shared between processes (the *bell* of its word), so that waiting costs no CPU on a
// machine with fewer cores than waiters. Writers that cannot ring (a copy engine, or a NIC writing
// memory by itself) are still seen: a waiter looks again by itself, the more seldom the longer it has waited
// (`pause_ns`). Thousands of waiters that each did so every 2 ms, such as the cores of a simulated world,
// would keep a machine from the work that they wait for.
#pragma once

#include <cstddef>
#include <cstdint>

#include "backends/transport/clock.hpp"
#include "backends/transport/diagnosis.hpp"
#include "backends/transport/shared_word.hpp"
#include "backends/transport/signal.hpp"
#include "backends/transport/sleep.hpp"

namespace mkernel::transport {

struct alignas(64) Bell {
    std::uint32_t rung = 0;
    std::uint32_t sleepers = 0;
};

struct alignas(64) SignalPadHeader {
    static constexpr std::uint64_t kMagic = 0x6d6b5f7369676e31;  // "mk_sign1"
    static constexpr std::uint32_t kBells = 64;

    std::uint64_t magic = kMagic;
    std::uint32_t capacity = 0;
    std::uint32_t reserved = 0;
    alignas(64) AbortRecord abort{};
    Bell bells[kBells]{};
};

class SignalPad {
  public:
    static constexpr std::uint64_t kMaxSleepNs = 2'000'000;
    static constexpr std::uint64_t kSeldomSleepNs = 64'000'000;
    static constexpr int kSpins = 64;

    SignalPad() = default;
    // `memory` holds at least bytes(capacity) and was formatted by `format`.
    explicit SignalPad(void* memory)
        : header_(static_cast<SignalPadHeader*>(memory)),
          words_(reinterpret_cast<Word*>(header_ + 1)) {}

    // The most signals; more than NICs can name (nics/verbs/immediate.hpp) are of no use.
    static constexpr std::uint32_t kMostSignals = 1u << 23;

    static constexpr std::size_t bytes(std::uint32_t capacity) {
        return sizeof(SignalPadHeader) +
               std::size_t{capacity} * (sizeof(Word) + sizeof(ExpectedCount));
    }

    // Formats a pad, once, by the owner, before any peer maps the segment. The memory must be zero.
    static SignalPad format(void* memory, std::uint32_t capacity) {
        auto* header = new (memory) SignalPadHeader;
        header->capacity = capacity;
        return SignalPad(memory);
    }

    [[nodiscard]] bool valid() const {
        return header_ != nullptr && header_->magic == SignalPadHeader::kMagic;
    }
    [[nodiscard]] std::uint32_t capacity() const { return header_->capacity; }
    [[nodiscard]] AbortRecord& abort_record() const { return header_->abort; }
    [[nodiscard]] AbortCode aborted() const { return abort_code(header_->abort); }

    [[nodiscard]] std::uint64_t load(std::uint32_t index) const { return words_[index].load(); }

    // Returns where the word lies, for devices that write it and wait for it by its address.
    [[nodiscard]] const Word* word(std::uint32_t index) const { return words_ + index; }

    // Adds to an added word. Returns its value after that.
    std::uint64_t add(std::uint32_t index, std::uint64_t value) const {
        const std::uint64_t sum = static_cast<AddedWord&>(words_[index]).add_and_fetch(value);
        ring(bell(index));
        return sum;
    }

    // Returns the count of the own rank's pad, which only the rank itself uses: its calls run one after
    // another, and the one that ends moves the count on.
    [[nodiscard]] ExpectedCount& expected(std::uint32_t index) const {
        return reinterpret_cast<ExpectedCount*>(words_ + header_->capacity)[index];
    }

    // Ends every wait for a set word whose writer is given up.
    void end_waits(std::uint32_t index) const {
        static_cast<SetWord&>(words_[index]).set(kEndsWaits);
        ring(bell(index));
    }

    // Sets the abort word (the first caller's diagnosis stays) and wakes every waiter.
    bool abort(AbortCode code, const Diagnosis& diagnosis) const {
        const bool first = claim_abort(header_->abort, code, diagnosis);
        for (auto& each : header_->bells) ring(each);
        return first;
    }

    // Waits. `deadline_ns` is on monotonic_ns()'s clock. `who` is the diagnosis to record if it passes.
    WaitResult wait(std::uint32_t index, std::uint64_t wanted, std::uint64_t deadline_ns,
                    Diagnosis who) const {
        for (int spin = 0; spin < kSpins; ++spin) {
            if (load(index) >= wanted) return WaitResult::ok;
        }
        Bell& own = bell(index);
        const std::uint64_t began = monotonic_ns();
        while (true) {
            const std::uint32_t rung = shared(own.rung).load(std::memory_order_seq_cst);
            shared(own.sleepers).fetch_add(1, std::memory_order_seq_cst);
            const std::uint64_t seen = load(index);
            const AbortCode code = aborted();
            const std::uint64_t now = monotonic_ns();
            const bool sleep = seen < wanted && code == AbortCode::none && now < deadline_ns;
            if (sleep) {
                const std::uint64_t left = deadline_ns - now;
                const std::uint64_t pause = pause_ns(now - began);
                sleep_while(&own.rung, rung, left < pause ? left : pause, Reach::host);
            }
            shared(own.sleepers).fetch_sub(1, std::memory_order_seq_cst);
            if (sleep) continue;
            if (seen >= wanted) return WaitResult::ok;
            if (code != AbortCode::none) return WaitResult::aborted;
            who.signal = index;
            who.seen = seen;
            who.wanted = wanted;
            abort(AbortCode::timeout, who);
            return WaitResult::timed_out;
        }
    }

    // Returns the longest sleep of a waiter that has waited so long: an eighth of that, from kMaxSleepNs to
    // kSeldomSleepNs.
    static constexpr std::uint64_t pause_ns(std::uint64_t waited_ns) {
        const std::uint64_t share = waited_ns / 8;
        if (share < kMaxSleepNs) return kMaxSleepNs;
        return share < kSeldomSleepNs ? share : kSeldomSleepNs;
    }

  private:
    [[nodiscard]] Bell& bell(std::uint32_t index) const {
        return header_->bells[index % SignalPadHeader::kBells];
    }

    static void ring(Bell& bell) {
        shared(bell.rung).fetch_add(1, std::memory_order_seq_cst);
        if (shared(bell.sleepers).load(std::memory_order_seq_cst) != 0) {
            wake_all(&bell.rung, Reach::host);
        }
    }

    SignalPadHeader* header_ = nullptr;
    Word* words_ = nullptr;
};

}  // namespace mkernel::transport
