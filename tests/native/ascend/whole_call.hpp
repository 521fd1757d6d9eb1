// Whole calls of several ranks in one process: their memory, and what tests of every op start alike.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "backends/accelerators/ascend/host/launch.hpp"
#include "tests/native/ascend/check.hpp"

namespace mkernel::ascend::test {

// Zeroed, page-aligned memory.
struct Pages {
    explicit Pages(std::size_t bytes)
        : memory(static_cast<std::byte*>(
                     std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096 + 4096)),
                 &std::free) {
        std::memset(memory.get(), 0, bytes);
    }
    std::unique_ptr<std::byte, decltype(&std::free)> memory;
};

// What a plan has on one rank.
struct RankMemory {
    RankMemory(std::uint32_t signals, std::size_t workspace_bytes)
        : pad(runtime::SignalPad::bytes(signals)), workspace(workspace_bytes) {
        runtime::SignalPad::format(pad.memory.get(), signals);
    }
    Pages pad, workspace;
};

// Of the calls of a plan, epoch 1 first.
inline constexpr host::View kViews[] = {host::View::pipelined,    host::View::pipelined,
                                        host::View::sequential,   host::View::compute_only,
                                        host::View::compute_only, host::View::pipelined};

// All of a rank's call but its kernels and their blocks. Even epochs are traced, those from 4 on
// strict.
inline host::Call call_of(const std::vector<RankMemory>& ranks, std::uint32_t rank,
                          std::uint64_t epoch, host::View view) {
    host::Call call;
    for (const RankMemory& each : ranks) {
        call.peers.push_back({each.pad.memory.get(), each.workspace.memory.get()});
    }
    call.args.rank = rank;
    call.args.epoch = epoch;
    call.args.pad = call.peers[rank].pad;
    call.args.workspace = call.peers[rank].workspace;
    call.timeout_ns = 120'000'000'000;
    call.view = view;
    call.trace = epoch % 2 == 0;
    if (epoch > 3) call.strict.emplace().seed = epoch;
    return call;
}

// All ranks, `rank` first.
inline std::vector<std::uint32_t> order_from(std::uint32_t rank, std::uint32_t world) {
    std::vector<std::uint32_t> order;
    for (std::uint32_t i = 0; i < world; ++i) order.push_back((rank + i) % world);
    return order;
}

// `start(rank)` launches a rank's call.
template <class Start>
void run_all(std::uint32_t world, const Start& start) {
    std::vector<std::shared_ptr<host::Launch>> launches;
    for (std::uint32_t rank = 0; rank < world; ++rank) launches.push_back(start(rank));
    for (auto& launch : launches) CHECK(launch->wait(150'000'000'000));
}

// Rank 0 never starts: the others wait for it until they are cancelled.
template <class Start>
void run_all_but_one(std::uint32_t world, const Start& start) {
    std::vector<std::shared_ptr<host::Launch>> launches;
    for (std::uint32_t rank = 1; rank < world; ++rank) launches.push_back(start(rank));
    CHECK(!launches[0]->wait(20'000'000));
    host::Launch::cancel_all();
    for (auto& launch : launches) CHECK(launch->wait(60'000'000'000));
}

}  // namespace mkernel::ascend::test
