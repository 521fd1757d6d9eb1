// Strict simulation of several cores, of one rank or of all: accesses of the same global memory that no
// signal orders are reported, whichever happens first; those that one orders are not.
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "backends/accelerators/ascend/sim/core.hpp"
#include "tests/native/ascend/check.hpp"
#include "tests/native/ascend/memory.hpp"

using namespace mkernel;
using namespace mkernel::ascend;
using isa::DType;
using isa::GlobalView;
using isa::Pipe;
using sim::IsaError;
using sim::Role;
using test::has;
using test::thrown;

namespace {

constexpr std::uint32_t kRank = 3, kSignals = 64;

// Two communication cores and a cube core of one call, which this thread runs as a test says.
class Call {
  public:
    Call() : pad_(kSignals), memory_(1 << 20) {
        environment_.pad = pad_.signals;
        environment_.rank = kRank;
        environment_.memory = {{memory_.data(), memory_.size(), true}};
        environment_.scheduler = &scheduler_;
        environment_.strict.emplace();
        environment_.races = &races_;
        first.emplace(environment_, Role::comm, 0, 2, on_chip_[0], nullptr);
        second.emplace(environment_, Role::comm, 1, 2, on_chip_[1], nullptr);
        cube.emplace(environment_, Role::cube, 0, 1, on_chip_[2], nullptr);
    }

    // 16x16 elements, `from` bytes from the start of memory.
    [[nodiscard]] GlobalView view(std::size_t from = 0, std::int64_t pitch = 16) {
        return at(from, pitch);
    }
    void write(sim::Core& core, const GlobalView& view) { copy(core, view, at(1 << 19)); }
    // And puts it where no other core looks.
    void read(sim::Core& core, const GlobalView& view) {
        copy(core, at((3 << 18) + core.index() * 4096), view);
    }
    void raise(sim::Core& core, std::uint32_t signal, std::uint32_t peer = kRank) {
        core.tnotify(peer, pad_.memory(), signal, 1);
    }
    void await(sim::Core& core, std::uint32_t signal, std::uint64_t value = 1,
               std::uint32_t peer = kRank) {
        CHECK(core.twait(signal, value, peer));
    }

    sim::Races& races() { return races_; }
    const sim::Environment& environment() { return environment_; }

    std::optional<sim::Core> first, second, cube;

  private:
    GlobalView at(std::size_t from, std::int64_t pitch = 16) {
        return {memory_.data() + from, DType::float16, 16, 16, pitch, 1};
    }
    void copy(sim::Core& core, const GlobalView& to, GlobalView from) {
        from.rows = to.rows < from.rows ? to.rows : from.rows;
        const isa::Tile tile{.buffer = isa::Buffer::UB,
                             .dtype = DType::float16,
                             .rows = 16,
                             .cols = 16,
                             .valid_rows = from.rows,
                             .valid_cols = 16};
        core.tload(tile, from);
        core.set_flag(Pipe::MTE2, Pipe::MTE3, 0);
        core.wait_flag(Pipe::MTE2, Pipe::MTE3, 0);
        core.tstore(to, tile);
        core.fence();
    }

    test::Pad pad_;
    std::vector<std::byte> memory_;
    sim::Scheduler scheduler_{2};
    sim::Races races_;
    sim::Environment environment_;
    sim::OnChip on_chip_[3];
};

std::string says(const std::function<void(Call&)>& body) {
    Call call;
    return thrown<IsaError>([&] { body(call); });
}

void without_a_signal() {
    const std::string after = says([](Call& call) {
        call.write(*call.first, call.view());
        call.read(*call.second, call.view(32));
    });
    CHECK(has(after, "rank 3 AIV core 1, TLOAD (pipe MTE2, test_races.cpp:"));
    CHECK(has(after, "reads 512 bytes of global memory"));
    CHECK(has(after, "which rank 3 AIV core 0 writes in TSTORE (pipe MTE3, test_races.cpp:"));
    CHECK(has(after, "a TNOTIFY or a TWAIT is missing"));
    // The other way round: the reader happened to come first.
    CHECK(has(says([](Call& call) {
                  call.read(*call.second, call.view());
                  call.write(*call.first, call.view(32));
              }),
              "overwrites 512 bytes of global memory"));
    CHECK(has(says([](Call& call) {
                  call.write(*call.first, call.view());
                  call.write(*call.second, call.view());
              }),
              "overwrites"));
    // Raised, but nobody waited; waited, but for another signal; raised before the write.
    CHECK(has(says([](Call& call) {
                  call.write(*call.first, call.view());
                  call.raise(*call.first, 5);
                  call.read(*call.second, call.view());
              }),
              "a TWAIT is missing"));
    CHECK(has(says([](Call& call) {
                  call.raise(*call.cube, 6);
                  call.write(*call.first, call.view());
                  call.raise(*call.first, 5);
                  call.await(*call.second, 6);
                  call.read(*call.second, call.view());
              }),
              "AIV core 0 writes"));
    CHECK(has(says([](Call& call) {
                  call.raise(*call.first, 5);
                  call.write(*call.first, call.view());
                  call.await(*call.second, 5);
                  call.read(*call.second, call.view());
              }),
              "AIV core 0 writes"));
}

void ordered_by_signals() {
    Call call;
    call.write(*call.first, call.view());
    call.raise(*call.first, 5);
    call.await(*call.second, 5);
    call.read(*call.second, call.view());
    // Through a third core; and the place is written again once its reader has said so.
    call.raise(*call.second, 6);
    call.await(*call.cube, 6);
    call.raise(*call.cube, 7);
    call.await(*call.first, 7);
    call.write(*call.first, call.view());
    // Beside each other: other rows, other columns of the same rows, both only reading.
    call.write(*call.second, call.view(1024));
    call.write(*call.first, call.view(8192, 64));
    call.write(*call.second, call.view(8192 + 32, 64));
    call.read(*call.first, call.view(16384));
    call.read(*call.second, call.view(16384));
    // Different pitches, interleaved lines.
    call.write(*call.first, {call.view(32768).base, DType::float16, 4, 16, 64, 1});
    call.write(*call.second, {call.view(32768 + 32).base, DType::float16, 2, 16, 128, 1});
}

void pitches_that_differ_are_compared_line_by_line() {
    CHECK(has(says([](Call& call) {
                  call.write(*call.first, {call.view().base, DType::float16, 4, 16, 64, 1});
                  call.write(*call.second, {call.view(30).base, DType::float16, 2, 16, 192, 1});
              }),
              "overwrites"));
}

void what_other_ranks_pass_on_is_not_held_against_anyone() {
    // Told to another rank, which answers this rank's other core: that may be an order.
    Call call;
    call.write(*call.first, call.view());
    call.raise(*call.first, 9, 1);  // (its pad is this one here)
    call.await(*call.second, 9, 1, 1);
    call.read(*call.second, call.view());
    // But only what was told by then.
    CHECK(has(says([](Call& late) {
                  late.raise(*late.first, 9, 1);
                  late.await(*late.second, 9, 1, 1);
                  late.write(*late.first, late.view());
                  late.read(*late.second, late.view());
              }),
              "AIV core 0 writes"));
}

void scalars_are_compared_once_others_hear_of_them() {
    const auto words = [](Call& call, sim::Core& core, int from, int to) {
        for (int i = from; i < to; ++i) core.sstore(call.view().base + i * 4, i);
        core.fence();
    };
    CHECK(has(says([&](Call& call) {
                  words(call, *call.first, 8, 16);
                  words(call, *call.first, 0, 8);
                  call.raise(*call.first, 5);
                  (void)call.second->sload(call.view(36).base);
                  call.await(*call.second, 5);  // too late
              }),
              "rank 3 AIV core 1, SLOAD (pipe S, test_races.cpp:"));
    CHECK(has(says([&](Call& call) {
                  words(call, *call.first, 0, 8);
                  words(call, *call.second, 7, 9);
                  call.first->finish(true);
                  call.second->finish(true);
              }),
              "overwrites 8 bytes of global memory"));
    Call call;
    words(call, *call.first, 0, 8);
    words(call, *call.second, 8, 16);
    call.raise(*call.first, 5);
    call.await(*call.second, 5);
    for (int i = 15; i >= 0; --i) (void)call.second->sload(call.view().base + i * 4);
    call.first->finish(true);
    call.second->finish(true);
}

void kernels_that_follow_each_other_are_ordered() {
    Call call;
    call.write(*call.first, call.view());
    call.races().end_kernel(kRank);
    sim::OnChip memory;
    sim::Core later(call.environment(), Role::vector, 2, 3, memory, nullptr);
    call.read(later, call.view());
    CHECK(!thrown<IsaError>([&] { call.write(*call.second, call.view()); }).empty());
}

void ranks_of_one_process_are_looked_at_together() {
    std::vector<std::byte> memory(4096);  // the first half is shared
    sim::Races races({{memory.data(), 2048}});
    const auto first = races.enter(0, "rank 0 core 0");
    const auto second = races.enter(1, "rank 1 core 0");
    const auto touches = [&](sim::Races::CoreId core, std::size_t from, bool write) {
        const GlobalView view{memory.data() + from, DType::float16, 16, 16, 16, 1};
        return races.access(core, {"TSTORE", std::source_location::current()}, Pipe::MTE3, view,
                            write);
    };
    CHECK(touches(first, 0, true).empty());
    CHECK(has(touches(second, 256, false), "which rank 0 core 0 writes"));
    const auto raise = [&](sim::Races::CoreId core, std::uint64_t value) {
        races.raise(core, 1, 5, [value] { return value; });
    };
    raise(first, 3);
    races.seen(second, 0, 6, 1);  // another signal; that one of another rank
    races.seen(first, 1, 5, 1);
    CHECK(!touches(second, 0, false).empty());
    races.seen(second, 0, 5, 3);
    CHECK(touches(second, 0, false).empty());
    // What was done before a later raise does not come before a wait for an earlier one.
    CHECK(touches(first, 1024, true).empty());
    raise(first, 4);
    races.seen(second, 0, 5, 3);
    CHECK(!touches(second, 1024, false).empty());
    races.seen(second, 0, 5, 4);
    CHECK(touches(second, 1024, false).empty());
    // And back: the place may be written again by a later call of the reader's own rank only.
    races.end_kernel(0);
    races.end_kernel(1);
    const auto later = races.enter(0, "rank 0 core 0, next call");
    CHECK(has(touches(later, 0, true), "which rank 1 core 0 reads"));
    CHECK(touches(races.enter(1, "rank 1 core 0, next call"), 0, true).empty());
    // What is not shared was each rank's own at its time.
    CHECK(touches(first, 2048, true).empty());
    CHECK(touches(second, 2048, true).empty());
}

}  // namespace

int main() {
    without_a_signal();
    ordered_by_signals();
    pitches_that_differ_are_compared_line_by_line();
    what_other_ranks_pass_on_is_not_held_against_anyone();
    scalars_are_compared_once_others_hear_of_them();
    kernels_that_follow_each_other_are_ordered();
    ranks_of_one_process_are_looked_at_together();
    return test::finish();
}
