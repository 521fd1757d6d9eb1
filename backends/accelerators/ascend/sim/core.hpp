// A simulated core: the tile ISA as kernels call it, executed by the issuing host thread.
//
// Functional form: an instruction takes effect at once, in issue order, so pipes need no waiting;
// flags are still counted, and a flag that is waited for without having been set (a certain
// deadlock on hardware), set twice or left over at the end is an error. With a trace vector each
// instruction is also recorded for the timed model.
//
// Strict form (strict.hpp): pipes are asynchronous, and accesses that flags and fences leave unordered are
// an error; with a seed, instructions also take effect later, in any order that they allow.
//
// A kernel is a template over the core type and uses only the public members up to "host side", so
// that another core type (a real device) can run the same source. `where` is the kernel's line.
//
// Signals, fences and puts:
//   fence()    all pipes of the core are drained and what they wrote is visible to a waiter for a
//              later tnotify/nic_put of this core. fence(pipe): the same of one pipe alone, while the
//              others work on; what that pipe was ordered after is done too. A signal right after it
//              does not cover what the others still read.
//   tnotify    adds to a 64-bit counter of the pad of any same-node rank; release.
//   twait      returns true once this call has added `amount` to the own pad's counter (acquire): once
//              it is >= what it was expected to be before the call (SignalPad::expected) + amount. A
//              negative amount leaves out as much of what earlier calls add. False when the call is
//              aborted or its deadline passed; the kernel then returns at once.
//   nic_put    queues a put-with-signal to a rank of another node; false as twait.
// Once a call is aborted, or peers may have given it up, tput and tnotify do nothing to other ranks: so one
// that was stopped for long writes into no memory of ranks that have left.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <source_location>
#include <string>
#include <vector>

#include "backends/accelerators/ascend/isa/pipe.hpp"
#include "backends/accelerators/ascend/isa/tile.hpp"
#include "backends/accelerators/ascend/sim/isa_error.hpp"
#include "backends/accelerators/ascend/sim/scheduler.hpp"
#include "backends/accelerators/ascend/sim/strict.hpp"
#include "backends/accelerators/ascend/sim/strict_waits.hpp"
#include "backends/accelerators/ascend/sim/trace.hpp"
#include "backends/transport/fifo_host.hpp"
#include "backends/transport/signal_pad.hpp"

namespace mkernel::ascend::sim {

// The global memory that a kernel may touch.
struct GmRange {
    const std::byte* base = nullptr;
    std::size_t bytes = 0;
    bool writable = false;
    bool real = true;  // false: in a dry run, an address that nothing lies at
};

// The environment that all cores of one kernel launch share; it outlives them.
struct Environment {
    transport::SignalPad pad;                     // the own rank's
    const transport::FifoHandle* fifo = nullptr;  // null where the world has one node
    std::uint64_t deadline_ns = 0;                // of every wait
    std::uint64_t peers_wait_until_ns = 0;        // for this rank, at least; 0: for ever
    std::uint32_t rank = 0;
    std::uint32_t op = 0;  // call number, for diagnosis
    std::vector<GmRange> memory;
    Scheduler* scheduler = nullptr;
    // Checks and records instructions without their effect; waits succeed at once, and only scalar
    // instructions touch memory. Traces of worlds and shapes that this machine could not run in reasonable
    // time are made so.
    bool dry = false;
    std::optional<StrictOptions> strict;
    Waits* waits = nullptr;  // strict, and not dry
    Races* races = nullptr;  // the same
};

// On-chip memory of one core; a host thread keeps one and lends it to the core it runs.
// L0 buffers hold float32 (matrix_unit.hpp) at twice the tile's byte offset: tiles that do not
// overlap on hardware do not overlap here.
class OnChip {
  public:
    OnChip();
    [[nodiscard]] std::byte* at(isa::Buffer buffer, std::uint32_t offset) const;

  private:
    struct Free {
        void operator()(std::byte* memory) const;
    };
    std::unique_ptr<std::byte, Free> memory_[isa::kBuffers];
};

// Returns the name of a tile in messages.
std::string describe(const isa::Tile& tile);

constexpr transport::Waiter waiter_of(KernelName kernel) {
    return kernel == KernelName::comm ? transport::Waiter::comm_kernel
                                      : transport::Waiter::compute_kernel;
}

class Core {
  public:
    Core(const Environment& environment, Role role, std::uint32_t index, std::uint32_t count,
         OnChip& memory, std::vector<Record>* trace);

    [[nodiscard]] std::uint32_t index() const { return index_; }
    [[nodiscard]] std::uint32_t count() const { return count_; }

    // Names the chunk that the following instructions work for: in diagnosis and timelines only.
    void annotate(std::uint32_t chunk) { chunk_ = chunk; }

    using Where = std::source_location;

    void tload(const isa::Tile& to, const isa::GlobalView& from,
               Where where = Where::current());  // MTE2
    void tstore(const isa::GlobalView& to, const isa::Tile& from,
                Where where = Where::current());  // MTE3; L0C: FIX
    void textract(const isa::Tile& to, const isa::Tile& from, std::uint32_t row, std::uint32_t col,
                  Where where = Where::current());  // MTE1
    void tmatmul(const isa::Tile& c, const isa::Tile& a, const isa::Tile& b,
                 Where where = Where::current());  // M
    void tmatmul_acc(const isa::Tile& c, const isa::Tile& a, const isa::Tile& b,
                     Where where = Where::current());
    // Copies `from` to `to`, which lies at rank `peer` (may be the own rank), row blocks alternating between
    // the two UB tiles. It is a macro of MTE2 and MTE3 instructions with their own flags, which also order it
    // after the earlier instructions of these two pipes.
    void tput(std::uint32_t peer, const isa::GlobalView& to, const isa::GlobalView& from,
              const isa::Tile& ping, const isa::Tile& pong, Where where = Where::current());
    // Copies the other way: `from` lies at rank `peer`, `to` here.
    void tget(std::uint32_t peer, const isa::GlobalView& to, const isa::GlobalView& from,
              const isa::Tile& ping, const isa::Tile& pong, Where where = Where::current());

    // Scalar instructions (pipe S): one int32 of global memory, four-byte aligned. They go through a cache of
    // the core's own: fence() must come between them and accesses of the same bytes by other pipes, and
    // before a signal that announces a store to another core. They are real in a dry run too, since schedules
    // depend on them.
    [[nodiscard]] std::int32_t sload(const std::byte* from, Where where = Where::current());
    void sstore(std::byte* to, std::int32_t value, Where where = Where::current());

    // Vector instructions (pipe V): on the valid parts of row-major UB tiles, float32 except one side of
    // tcvt. They work element by element on tiles of one shape; c may be an input.
    void tadd(const isa::Tile& c, const isa::Tile& a, const isa::Tile& b,
              Where where = Where::current());
    void tsub(const isa::Tile& c, const isa::Tile& a, const isa::Tile& b,
              Where where = Where::current());
    void tmul(const isa::Tile& c, const isa::Tile& a, const isa::Tile& b,
              Where where = Where::current());
    void tmax(const isa::Tile& c, const isa::Tile& a, const isa::Tile& b,
              Where where = Where::current());
    void tmuls(const isa::Tile& c, const isa::Tile& a, float factor,
               Where where = Where::current());
    void texp(const isa::Tile& c, const isa::Tile& a, Where where = Where::current());
    void tlog(const isa::Tile& c, const isa::Tile& a, Where where = Where::current());
    void tfill(const isa::Tile& c, float value, Where where = Where::current());
    // Keeps row i's columns up to i + diagonal; the others become `otherwise`.
    void ttril(const isa::Tile& c, const isa::Tile& a, std::int32_t diagonal, float otherwise,
               Where where = Where::current());
    // Converts a tile to another dtype, one of the two being float32: exact, or rounded to nearest even.
    void tcvt(const isa::Tile& to, const isa::Tile& from, Where where = Where::current());
    // Sets c [rows, 1] to the largest element of each row, or to its sum.
    void trowmax(const isa::Tile& c, const isa::Tile& a, Where where = Where::current());
    void trowsum(const isa::Tile& c, const isa::Tile& a, Where where = Where::current());
    // Combines every element of a row with that row's element of `column` [rows, 1].
    void trowexpandsub(const isa::Tile& c, const isa::Tile& a, const isa::Tile& column,
                       Where where = Where::current());
    void trowexpandmul(const isa::Tile& c, const isa::Tile& a, const isa::Tile& column,
                       Where where = Where::current());
    void trowexpanddiv(const isa::Tile& c, const isa::Tile& a, const isa::Tile& column,
                       Where where = Where::current());

    void set_flag(isa::Pipe source, isa::Pipe waiting, std::uint32_t event,
                  Where where = Where::current());
    void wait_flag(isa::Pipe source, isa::Pipe waiting, std::uint32_t event,
                   Where where = Where::current());
    void fence(isa::Pipe pipe = isa::Pipe::ALL);

    void tnotify(std::uint32_t peer, std::byte* pad, std::uint32_t signal, std::uint64_t value,
                 Where where = Where::current());
    [[nodiscard]] bool twait(std::uint32_t signal, std::int64_t amount, std::uint32_t peer,
                             Where where = Where::current());
    [[nodiscard]] bool nic_put(const transport::PutCommand& command,
                               Where where = Where::current());

    // --- host side ---
    // Ends the core after the kernel returned normally (`complete`) or early: flags left over are an error.
    void finish(bool complete);

  private:
    [[noreturn]] void fail(const char* instruction, const std::string& what) const;
    std::byte* check(const char* instruction, const isa::Tile& tile) const;
    const GmRange& check(const char* instruction, const isa::GlobalView& view, bool write) const;
    // Copies for TPUT and TGET.
    void copy(Kind kind, std::uint32_t peer, const isa::GlobalView& to, const isa::GlobalView& from,
              const isa::Tile& ping, const isa::Tile& pong);
    void multiply(const char* instruction, const isa::Tile& c, const isa::Tile& a,
                  const isa::Tile& b, bool accumulate);
    // Lets an instruction take effect: at once or, strict, when its pipe comes to it.
    template <class Effect>
    void execute(const char* instruction, isa::Pipe pipe, std::initializer_list<Operand> operands,
                 const Effect& effect) {
        if (strict_) {
            strict_->issue({instruction, where_}, pipe, operands, [effect, dry = environment_.dry] {
                if (!dry) effect();
            });
        } else if (!environment_.dry) {
            effect();
        }
    }
    // The record is filed under the chunk that was annotated last.
    void record(Record record) {
        if (trace_ == nullptr) return;
        record.chunk = chunk_;
        trace_->push_back(record);
    }
    // Records an instruction that signals no core.
    void record_work(Kind kind, isa::Pipe pipe, std::uint64_t amount, std::uint32_t width = 0) {
        record({.kind = kind,
                .pipe = pipe,
                .peer = environment_.rank,
                .amount = amount,
                .width = width});
    }
    // Returns which piece of a call's inputs an instruction reads; 0: no input (trace.hpp).
    [[nodiscard]] std::uint32_t piece_of(const GmRange& range, const isa::GlobalView& view) const;
    // In core_scalar.cpp. Returns the view of one element, checked.
    isa::GlobalView scalar_access(const char* instruction, const std::byte* at, bool write);

    // In core_vector.cpp. `shape`: the tile whose rows and pitch this one must have.
    std::byte* vector_tile(Kind kind, const isa::Tile& tile, const isa::Tile& shape) const;
    float* float_tile(Kind kind, const isa::Tile& tile, const isa::Tile& shape) const;
    float* float_column(Kind kind, const isa::Tile& tile, const isa::Tile& shape) const;
    template <class Element, class... Inputs>
    void elementwise(Kind kind, const Element& element, const isa::Tile& c,
                     const Inputs&... inputs);
    template <class Element>
    void reduce_rows(Kind kind, float first, const Element& element, const isa::Tile& c,
                     const isa::Tile& a);
    template <class Element>
    void expand_rows(Kind kind, const Element& element, const isa::Tile& c, const isa::Tile& a,
                     const isa::Tile& column);
    void record_vector(Kind kind, const isa::Tile& work);
    [[nodiscard]] std::string name() const;
    // Returns the value of a counter once this call has added so much to it.
    [[nodiscard]] std::uint64_t wanted(std::uint32_t signal, std::int64_t amount) const;
    // Waits until the counter is at `value`: twait without the part of strict simulation.
    [[nodiscard]] bool await(std::uint32_t signal, std::uint64_t value, std::uint32_t peer);
    [[nodiscard]] transport::Diagnosis diagnosis(std::uint32_t peer) const;
    // Returns true where `peer` is another rank, which may have left the call meanwhile.
    [[nodiscard]] bool given_up(std::uint32_t peer) const;
    [[nodiscard]] int priority() const { return role_ == Role::cube ? 1 : 0; }

    const Environment& environment_;
    Role role_;
    std::uint32_t index_, count_;
    OnChip& memory_;
    std::vector<Record>* trace_;
    std::optional<Strict> strict_;
    std::uint32_t chunk_ = kNoChunk;
    Where where_;  // of the latest instruction that names its place
    struct {
        bool set = false;
        Where where;
    } flags_[isa::kPipes][isa::kPipes][isa::kEvents];
};

}  // namespace mkernel::ascend::sim
