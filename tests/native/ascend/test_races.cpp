// Strict simulation of several cores, of one rank or of all: accesses of the same global memory that no
// signal orders are reported, whichever happens first; those that one orders are not.
#include <cstdio>
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

const isa::Tile kTile{.buffer = isa::Buffer::UB,
                      .dtype = DType::float16,
                      .rows = 16,
                      .cols = 16,
                      .valid_rows = 16,
                      .valid_cols = 16};

// Copies a view of up to 16x16 elements through UB, without a fence.
void move(sim::Core& core, const GlobalView& to, const GlobalView& from) {
    const isa::Tile tile = kTile.with_valid(from.rows, from.cols);
    core.tload(tile, from);
    core.set_flag(Pipe::MTE2, Pipe::MTE3, 0);
    core.wait_flag(Pipe::MTE2, Pipe::MTE3, 0);
    core.tstore(to, tile);
}

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
        move(core, to, from);
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

// Told of what one pipe has done, another core knows nothing of what the other pipes still read.
void the_fence_of_one_pipe() {
    const auto behind = [](bool all) {
        return says([&](Call& call) {
            call.first->tload(kTile, call.view());
            if (all) {
                call.first->fence();
            } else {
                call.first->fence(Pipe::MTE3);
            }
            call.raise(*call.first, 5);
            call.await(*call.second, 5);
            call.write(*call.second, call.view());
        });
    };
    CHECK(behind(true).empty());
    CHECK(has(behind(false), "overwrites 512 bytes of global memory"));
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

void memory_that_ranks_do_not_share_is_each_ones_at_its_time() {
    std::byte shared[64], own[512];
    sim::Races races({{shared, sizeof shared}});
    for (const std::uint32_t rank : {0u, 1u}) {
        const auto core = races.enter(rank, "core");
        const GlobalView view{own, DType::float16, 16, 16, 16, 1};
        CHECK(
            races.access(core, {"TSTORE", std::source_location::current()}, Pipe::MTE3, view, true)
                .empty());
    }
}

// ---- every kind of race between ranks ------------------------------------------------------------

// Three ranks of a world in one process, each with a core, a pad and memory that all of them reach.
class World {
  public:
    static constexpr std::uint32_t kRanks = 3;
    static constexpr std::size_t kBytes = 1 << 16;  // the upper half: nobody else's

    World() {
        std::vector<sim::Races::Range> shared;
        for (Side& side : sides_) shared.push_back({side.memory.memory.get(), kBytes / 2});
        races_.emplace(std::move(shared));
        for (std::uint32_t rank = 0; rank < kRanks; ++rank) {
            sim::Environment& environment = sides_[rank].environment;
            environment.pad = sides_[rank].pad.signals;
            environment.rank = rank;
            for (const Side& side : sides_) {
                environment.memory.push_back({side.memory.memory.get(), kBytes, true});
            }
            environment.scheduler = &scheduler_;
            environment.strict.emplace();
            environment.races = &*races_;
            launch(rank);
        }
    }

    // 16x16 elements of a rank's shared memory.
    GlobalView of(std::uint32_t rank) { return at(rank, 0); }
    // A rank writes them, or reads them, and fences.
    void write(std::uint32_t rank, const GlobalView& view) {
        move(core(rank), view, at(rank, kBytes / 2));
        core(rank).fence();
    }
    void read(std::uint32_t rank, const GlobalView& view, Pipe fenced = Pipe::ALL) {
        move(core(rank), at(rank, kBytes / 2 + 4096), view);
        core(rank).fence(fenced);
    }
    void write_unfenced(std::uint32_t rank, const GlobalView& view) {
        move(core(rank), view, at(rank, kBytes / 2));
    }
    void load(std::uint32_t rank, const GlobalView& view, Pipe fenced) {
        core(rank).tload(kTile, view);
        core(rank).fence(fenced);
    }
    void raise(std::uint32_t rank, std::uint32_t peer, std::uint32_t signal) {
        core(rank).tnotify(peer, sides_[peer].pad.memory(), signal, 1);
    }
    void await(std::uint32_t rank, std::uint32_t peer, std::uint32_t signal,
               std::uint64_t value = 1) {
        CHECK(core(rank).twait(signal, static_cast<std::int64_t>(value), peer));
    }
    // Rank 0 writes and tells rank 1, which hears of it.
    void deliver(const GlobalView& place) {
        write(0, place);
        raise(0, 1, 5);
        await(1, 0, 5);
    }
    // All ranks' kernels end, and the next call's begin.
    void next_call() {
        for (std::uint32_t rank = 0; rank < kRanks; ++rank) {
            races_->end_kernel(rank);
            launch(rank);
        }
    }

  private:
    struct Side {
        test::Pad pad{kSignals};
        test::Pages memory{kBytes};
        sim::Environment environment;
        sim::OnChip on_chip;
        std::optional<sim::Core> core;
    };
    sim::Core& core(std::uint32_t rank) { return *sides_[rank].core; }
    void launch(std::uint32_t rank) {
        Side& side = sides_[rank];
        side.core.emplace(side.environment, Role::comm, 0, 1, side.on_chip, nullptr);
    }
    GlobalView at(std::uint32_t rank, std::size_t from) {
        return {sides_[rank].memory.memory.get() + from, DType::float16, 16, 16, 16, 1};
    }

    sim::Scheduler scheduler_{2};
    std::optional<sim::Races> races_;
    Side sides_[kRanks];
};

// Rank 0 writes a place and tells rank 1 by signal 5; rank 1 reads it and gives it back by signal 6 of
// rank 0. What is planted is left out, comes too early, or is another.
struct Kind {
    const char* name;
    const char* report;
    void (*play)(World&, const GlobalView& place, bool planted);
};

const Kind kKinds[] = {
    {"read before arrival", "TWAIT is missing",
     [](World& world, const GlobalView& place, bool planted) {
         world.write(0, place);
         world.raise(0, 1, 5);
         if (!planted) world.await(1, 0, 5);
         world.read(1, place);
     }},
    {"read before arrival, the read happening first", "overwrites",
     [](World& world, const GlobalView& place, bool planted) {
         if (planted) world.read(1, place);
         world.deliver(place);
         world.read(1, place);
     }},
    {"signal raised before the data", "which rank 0 AIV core 0 writes",
     [](World& world, const GlobalView& place, bool planted) {
         if (planted) world.raise(0, 1, 5);
         world.write(0, place);
         if (!planted) world.raise(0, 1, 5);
         world.await(1, 0, 5);
         world.read(1, place);
     }},
    {"signal raised before the fence", "TNOTIFY",
     [](World& world, const GlobalView& place, bool planted) {
         planted ? world.write_unfenced(0, place) : world.write(0, place);
         world.raise(0, 1, 5);
         world.await(1, 0, 5);
         world.read(1, place);
     }},
    {"released behind the fence of another pipe", "overwrites",
     [](World& world, const GlobalView& place, bool planted) {
         world.load(1, place, planted ? Pipe::MTE3 : Pipe::ALL);
         world.raise(1, 0, 6);
         world.await(0, 1, 6);
         world.write(0, place);
     }},
    {"signal of an earlier generation", "which rank 0 AIV core 0 writes",
     [](World& world, const GlobalView& place, bool planted) {
         for (const std::uint64_t generation : {1, 2}) {
             if (generation == 2) world.await(0, 1, 6);
             world.write(0, place);
             world.raise(0, 1, 5);
             world.await(1, 0, 5, planted ? 1 : generation);
             world.read(1, place);
             world.raise(1, 0, 6);
         }
     }},
    {"another signal", "which rank 0 AIV core 0 writes",
     [](World& world, const GlobalView& place, bool planted) {
         world.raise(2, 1, 7);
         world.write(0, place);
         world.raise(0, 1, 5);
         planted ? world.await(1, 2, 7) : world.await(1, 0, 5);
         world.read(1, place);
     }},
    {"told by a rank that had not been told", "which rank 0 AIV core 0 writes",
     [](World& world, const GlobalView& place, bool planted) {
         world.write(0, place);
         world.raise(0, 2, 5);
         if (planted) world.raise(2, 1, 7);
         world.await(2, 0, 5);
         if (!planted) world.raise(2, 1, 7);
         world.await(1, 2, 7);
         world.read(1, place);
     }},
    {"written again before it is released", "overwrites",
     [](World& world, const GlobalView& place, bool planted) {
         world.deliver(place);
         world.read(1, place);
         world.raise(1, 0, 6);
         if (!planted) world.await(0, 1, 6);
         world.write(0, place);
     }},
    {"written again before it is released, the write happening first",
     "which rank 0 AIV core 0 writes",
     [](World& world, const GlobalView& place, bool planted) {
         world.write(0, place);
         world.raise(0, 1, 5);
         if (planted) world.write(0, place);
         world.await(1, 0, 5);
         world.read(1, place);
         world.raise(1, 0, 6);
         world.await(0, 1, 6);
         world.write(0, place);
     }},
    {"released before it is read", "overwrites",
     [](World& world, const GlobalView& place, bool planted) {
         world.deliver(place);
         if (planted) world.raise(1, 0, 6);
         world.read(1, place);
         if (!planted) world.raise(1, 0, 6);
         world.await(0, 1, 6);
         world.write(0, place);
     }},
    {"two writers", "which rank 0 AIV core 0 writes",
     [](World& world, const GlobalView& place, bool planted) {
         world.write(0, place);
         world.raise(0, 1, 5);
         if (!planted) world.await(1, 0, 5);
         world.write(1, place);
     }},
    {"left to the next call", "which rank 0 AIV core 0 writes",
     [](World& world, const GlobalView& place, bool planted) {
         world.write(0, place);
         world.raise(0, 1, 5);
         if (!planted) world.await(1, 0, 5);
         world.next_call();
         world.read(1, place);
     }},
    {"taken back by the next call", "overwrites",
     [](World& world, const GlobalView& place, bool planted) {
         world.deliver(place);
         world.read(1, place);
         world.raise(1, 0, 6);
         if (!planted) world.await(0, 1, 6);
         world.next_call();
         world.write(0, place);
     }},
};

// In memory of the writer, the reader, and of a rank that only has it.
void every_kind_between_ranks() {
    for (const Kind& kind : kKinds) {
        for (std::uint32_t owner = 0; owner < World::kRanks; ++owner) {
            for (const bool planted : {false, true}) {
                World world;
                const std::string said =
                    thrown<IsaError>([&] { kind.play(world, world.of(owner), planted); });
                const bool right = planted ? has(said, kind.report) : said.empty();
                if (!right) {
                    std::fprintf(stderr, "%s in memory of rank %u, %s: \"%s\"\n", kind.name, owner,
                                 planted ? "planted" : "sound", said.c_str());
                }
                CHECK(right);
            }
        }
    }
}

}  // namespace

int main() {
    without_a_signal();
    ordered_by_signals();
    the_fence_of_one_pipe();
    pitches_that_differ_are_compared_line_by_line();
    what_other_ranks_pass_on_is_not_held_against_anyone();
    scalars_are_compared_once_others_hear_of_them();
    kernels_that_follow_each_other_are_ordered();
    memory_that_ranks_do_not_share_is_each_ones_at_its_time();
    every_kind_between_ranks();
    return test::finish();
}
