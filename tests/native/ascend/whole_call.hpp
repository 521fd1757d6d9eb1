// Whole calls of several ranks in one process: their memory, and what tests of every op start alike.
#pragma once

#include <algorithm>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "backends/accelerators/ascend/host/launch.hpp"
#include "tests/native/ascend/check.hpp"
#include "tests/native/ascend/memory.hpp"
#include "tests/native/sanitized.hpp"

namespace mkernel::ascend::test {

// What plans of a world need on each rank.
struct Sizes {
    std::uint64_t inbox = 0, outbox = 0, scratch = 0, words = 0;

    // What the largest of these plans need.
    template <class... Geometries>
    static Sizes of(const Geometries&... plans) {
        return {std::max({plans.inbox_bytes()...}), std::max({plans.outbox_bytes()...}),
                std::max({plans.scratch_bytes()...}), std::max({plans.words()...})};
    }
};

struct RankMemory {
    explicit RankMemory(const Sizes& sizes)
        : pad(static_cast<std::uint32_t>(sizes.words)),
          inbox{Pages(sizes.inbox), Pages(sizes.inbox)},
          outbox{Pages(sizes.outbox), Pages(sizes.outbox)},
          scratch(sizes.scratch) {}
    Pad pad;
    Pages inbox[2], outbox[2], scratch;
};

// What all plans of a world share. Strict calls are looked at together.
struct WorldMemory {
    WorldMemory(std::uint32_t world, const Sizes& sizes) {
        std::vector<sim::Races::Range> shared;
        for (std::uint32_t i = 0; i < world; ++i) {
            const RankMemory& rank = ranks.emplace_back(sizes);
            for (const Pages& inbox : rank.inbox) {
                shared.push_back({inbox.memory.get(), sizes.inbox});
            }
        }
        races = std::make_shared<sim::Races>(std::move(shared));
    }
    std::vector<RankMemory> ranks;
    std::shared_ptr<sim::Races> races;
};

// All of a rank's call but its kernels and their blocks. Even epochs are traced, those from 4 on
// strict.
inline host::Call call_of(const WorldMemory& world, std::uint32_t rank, std::uint64_t epoch,
                          host::View view) {
    host::Call call;
    const std::size_t odd = epoch % 2;
    for (const RankMemory& each : world.ranks) {
        call.peers.push_back({each.pad.memory(), each.inbox[odd].memory.get()});
    }
    call.args.rank = rank;
    call.args.epoch = epoch;
    call.args.pad = call.peers[rank].pad;
    call.args.inbox = call.peers[rank].inbox;
    call.args.outbox = world.ranks[rank].outbox[odd].memory.get();
    call.args.scratch = world.ranks[rank].scratch.memory.get();
    call.timeout_ns = 120'000'000'000;
    call.view = view;
    call.trace = epoch % 2 == 0;
    if (epoch > 3) {
        call.strict.emplace().seed = epoch;
        call.races = world.races;
    }
    return call;
}

// All ranks, `rank` first.
inline std::vector<std::uint32_t> order_from(std::uint32_t rank, std::uint32_t world) {
    std::vector<std::uint32_t> order;
    for (std::uint32_t i = 0; i < world; ++i) order.push_back((rank + i) % world);
    return order;
}

// Below, a `World` has the members memory(), prepared(rank, epoch, view) and, where a call of it is more
// than one launch a rank, call(epoch, view).

// One call of all ranks, to its end.
template <class World>
void run_all(World& world, std::uint64_t epoch, host::View view) {
    std::vector<std::shared_ptr<host::Launch>> launches;
    for (std::uint32_t rank = 0; rank < world.memory().ranks.size(); ++rank) {
        launches.push_back(host::Launch::start(world.prepared(rank, epoch, view)));
    }
    for (auto& launch : launches) CHECK(launch->wait(150'000'000'000));
    // All has come that any call has added: it is what was expected, word by word.
    for (const RankMemory& rank : world.memory().ranks) {
        const transport::SignalPad& pad = rank.pad.signals;
        for (std::uint32_t word = 0; word < pad.capacity(); ++word) {
            CHECK(pad.load(word) == pad.expected(word).value);
        }
    }
}

// Calls in the views of a plan's, epoch 1 first; even epochs are traced, those from 4 on strict.
template <class World>
void all_views(World&& world) {
    using host::View;
    std::uint64_t epoch = 0;
    for (const View view :
         {View::pipelined, View::pipelined, View::sequential, View::compute_only, View::pipelined,
          View::compute_only, View::sequential, View::pipelined, View::pipelined}) {
        ++epoch;
        if constexpr (requires { world.call(epoch, view); }) {
            world.call(epoch, view);
        } else {
            run_all(world, epoch, view);
        }
    }
}

// Rank 0 never starts: the others wait for it until they are cancelled.
template <class World>
void run_all_but_one(World&& world) {
    std::vector<std::shared_ptr<host::Launch>> launches;
    for (std::uint32_t rank = 1; rank < world.memory().ranks.size(); ++rank) {
        launches.push_back(host::Launch::start(world.prepared(rank, 1, host::View::pipelined)));
    }
    CHECK(!launches[0]->wait(20'000'000));
    host::Launch::cancel_all();
    for (auto& launch : launches) CHECK(launch->wait(60'000'000'000));
}

// What a core of a traced call issued: of a kernel's cores of that role the one of this index.
inline std::vector<sim::Record> issued(const std::string& trace, sim::Role role,
                                       std::uint32_t index) {
    std::size_t at = 0;
    const auto take = [&]<class T>(T& value) {
        std::memcpy(&value, trace.data() + at, sizeof value);
        at += sizeof value;
    };
    sim::TraceHeader header;
    take(header);
    std::vector<sim::Record> found;
    for (std::uint32_t i = 0; i < header.cores; ++i) {
        sim::TraceCore core;
        take(core);
        for (std::uint64_t j = 0; j < core.records; ++j) {
            sim::Record record;
            take(record);
            if (core.role == role && index == 0) found.push_back(record);
        }
        if (core.role == role) --index;
    }
    return found;
}

// What the launches' first error is; empty: none. Ends them all.
inline std::string first_error(const std::vector<std::shared_ptr<host::Launch>>& launches) {
    std::string found;
    for (bool left = true; left && found.empty();) {
        left = false;
        for (const auto& launch : launches) {
            const std::string error =
                thrown<sim::IsaError>([&] { left = !launch->wait(1'000'000) || left; });
            if (found.empty()) found = error;
        }
    }
    if (!found.empty()) host::Launch::cancel_all();
    for (const auto& launch : launches) {
        thrown<sim::IsaError>([&] { CHECK(launch->wait(60'000'000'000)); });
    }
    return found;
}

// A strict call of all ranks, which are looked at together. `of_first`: rank 0's options.
template <class World>
std::vector<std::shared_ptr<host::Launch>> together(World& world, std::uint64_t epoch,
                                                    const sim::StrictOptions& of_first = {}) {
    std::vector<std::shared_ptr<host::Launch>> launches;
    for (std::uint32_t rank = 0; rank < world.memory().ranks.size(); ++rank) {
        host::Call call = world.prepared(rank, epoch, host::View::pipelined);
        call.strict = rank == 0 ? of_first : sim::StrictOptions{};
        call.races = world.memory().races;
        call.trace = rank == 0;
        launches.push_back(host::Launch::start(std::move(call)));
    }
    return launches;
}

// Mutations are slow, and not what sanitizers look for.
inline constexpr std::uint32_t kFirstCores = kSanitized ? 1 : 3;

// Whether the core had waited for the same signal, and as much, before the wait at that place.
inline bool again(const std::vector<sim::Record>& records, std::size_t at) {
    const auto here = records.begin() + static_cast<std::ptrdiff_t>(at);
    return std::any_of(records.begin(), here, [&](const sim::Record& before) {
        return before.kind == sim::Kind::twait && before.signal == here->signal &&
               before.amount >= here->amount;
    });
}

// TWAITs of rank 0's first cores of each kernel and kind in a third call, left out in turn, are races
// that strict simulation of all ranks together reports; but for those that say again what the core has
// waited for, and those that are `implied`, given what the core issued and the wait's place in it:
// something else orders the same. `make()` gives a new world. In each call every rank waits for all others, so none is needed for what
// a rank has released: that alone orders two calls.
template <class Make>
void every_wait_is_needed(
    const char* name, const Make& make,
    const std::function<bool(const std::vector<sim::Record>&, std::size_t)>& implied) {
#if defined(__SANITIZE_THREAD__)
    return;  // a wait that is left out is a data race, which ThreadSanitizer reports when it sees it
#endif
    const auto after_two_calls = [&] {
        auto world = make();
        for (const std::uint64_t epoch : {1, 2})
            CHECK(first_error(together(*world, epoch)).empty());
        return world;
    };
    const auto sound = after_two_calls();
    const auto third = together(*sound, 3);
    CHECK(first_error(third).empty());
    std::uint32_t left_out = 0;
    for (const auto role : {sim::Role::comm, sim::Role::cube, sim::Role::vector}) {
        for (std::uint32_t core = 0; core < kFirstCores; ++core) {
            const auto records = issued(third[0]->trace(), role, core);
            std::uint32_t number = 0;  // among the core's TWAITs
            for (std::size_t at = 0; at < records.size(); ++at) {
                if (records[at].kind != sim::Kind::twait) continue;
                const std::uint32_t wait = number++;
                if (again(records, at) || implied(records, at)) continue;
                sim::StrictOptions options;
                options.skip = {role, core, {}, {wait}};
                const auto world = after_two_calls();
                const std::string said = first_error(together(*world, 3, options));
                ++left_out;
                if (said.find("no signal orders the two cores") != std::string::npos) continue;
                std::fprintf(stderr, "%s, %s core %u without TWAIT %u (signal %u of rank %u): %s\n",
                             name, name_of(role), core, wait, records[at].signal, records[at].peer,
                             said.c_str());
                CHECK(false);
            }
        }
    }
    CHECK(left_out > kFirstCores);
}

}  // namespace mkernel::ascend::test
