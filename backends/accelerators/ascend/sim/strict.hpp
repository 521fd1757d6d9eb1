// Strict simulation: the checks that a core adds to executing when each of its pipes is asynchronous and
// ordered against the others only by flags and fences.
//
// Order is followed with vector clocks (strict_order.hpp), so a hazard is found whatever the order
// in which the instructions happened to run. The first one ends the kernel with an IsaError:
//   - a read or write of bytes whose pending access by another pipe it is not ordered after;
//   - a read of bytes that nothing has written, or that a partly overlapping tile has overwritten;
//   - a signal raised (TNOTIFY, NIC_PUT) while the core's own accesses of global memory may still
//     be under way: without fence() a waiter for the signal may miss the bytes;
//   - an event set again although its waiter may not have seen it set the last time;
//   - an access of global memory that another core touches too, with no signal between the two
//     (strict_races.hpp): of the same rank, or, where all ranks run in one process, of any.
// Flags without a partner and tiles out of bounds are errors of every core (core.hpp); signals that
// nobody can raise any more are found by the call's cores together (strict_waits.hpp).
//
// With a seed, effects are put off and run later in an order drawn from it, any that flags and
// fences allow (strict_queue.hpp). Results must not depend on it.
#pragma once

#include <cstdint>
#include <functional>
#include <initializer_list>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "backends/accelerators/ascend/isa/pipe.hpp"
#include "backends/accelerators/ascend/isa/tile.hpp"
#include "backends/accelerators/ascend/sim/strict_order.hpp"
#include "backends/accelerators/ascend/sim/strict_queue.hpp"
#include "backends/accelerators/ascend/sim/strict_races.hpp"
#include "backends/accelerators/ascend/sim/strict_ranges.hpp"
#include "backends/accelerators/ascend/sim/trace.hpp"

namespace mkernel::ascend::sim {

struct StrictOptions {
    std::optional<std::uint64_t> seed;  // none: effects happen when issued
    // Planted fault: on core `index` of `role`, those of its flags, fences, TNOTIFYs and
    // NIC_PUTs with these numbers, counted from 0 over all of them, are left out.
    struct {
        Role role = Role::cube;
        std::uint32_t index = 0;
        std::vector<std::uint32_t> numbers;
        std::vector<std::uint32_t> waits{};  // the same of its TWAITs, counted by themselves
    } skip;
};

class Strict {
  public:
    // `core`: its name in messages. `races`: those of all cores of the call, or of the world; null: this core
    // is alone.
    Strict(const StrictOptions& options, Role role, std::uint32_t index, std::string core,
           std::uint32_t rank, Races* races);

    // Issues an instruction of a pipe, in issue order. `effect` runs now or later.
    void issue(const Site& site, isa::Pipe pipe, std::initializer_list<Operand> operands,
               std::function<void()> effect);
    // Issues TPUT and TGET: loads of MTE2 and stores of MTE3 through two UB tiles with flags of its own,
    // which order it against everything else those two pipes do with the tiles.
    void put(const Site& site, const isa::GlobalView& to, const isa::GlobalView& from,
             const isa::Tile& ping, const isa::Tile& pong, std::function<void()> effect);

    // Returns false for a planted fault; the instruction is to be left out.
    [[nodiscard]] bool executes_sync();
    void set_flag(const Site& site, isa::Pipe source, isa::Pipe waiting, std::uint32_t event);
    void wait_flag(isa::Pipe source, isa::Pipe waiting, std::uint32_t event);
    void fence(isa::Pipe pipe);
    // Raises a signal of `peer`, by `add` (Races::raise), or precedes a put that raises it and is queued
    // next. Right after a fence of one pipe the signal does not cover what the other pipes still read.
    void publish(const Site& site, const std::string& what, std::uint32_t peer,
                 std::uint32_t signal, const std::function<std::uint64_t()>& add);
    // Returns false for a planted fault; the TWAIT is to be left out.
    [[nodiscard]] bool executes_wait();
    // Called after a TWAIT has seen its signal, which `peer` raises, stand at `value`.
    void seen(std::uint32_t peer, std::uint32_t signal, std::uint64_t value);
    // Called after a kernel's last instruction.
    void drain();

  private:
    // Runs of words that S read, or wrote, since other cores were last signalled by this one: first byte →
    // byte after the last, and the instruction that began it.
    struct Run {
        const std::byte* end = nullptr;
        Site site;
    };
    using Runs = std::map<const std::byte*, Run>;

    void check(const Site& site, isa::Pipe pipe, std::uint32_t at, const Operand& operand);
    // Throws if an access of global memory races with another core.
    void check_races(const Site& site, isa::Pipe pipe, const isa::GlobalView& view, bool write);
    static void add_word(Runs& runs, const Site& site, const isa::GlobalView& word);
    // Checks the words before this core signals others about its accesses, or waits for theirs.
    void check_words();

    std::string core_;
    Order order_;
    Ranges ranges_;
    Queue queue_;
    Races* races_;
    Races::CoreId id_ = 0;       // in `races_`
    Runs words_[2];              // read, written
    bool tells_of_one_ = false;  // a fence of one pipe came last: signals say nothing of the others
    std::vector<std::uint32_t> skipped_, skipped_waits_;
    std::uint32_t syncs_ = 0, waits_ = 0;
};

}  // namespace mkernel::ascend::sim
