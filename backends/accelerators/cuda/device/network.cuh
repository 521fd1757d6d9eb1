// Ranks of other nodes as kernels see them, a part of a Workspace. Kernels reach them by puts of a NIC, which
// the rank's proxy makes of commands (transport/channel.hpp), and are signalled by them through words of the
// own signal pad.
//
// Words of the pad, each of which one other rank adds to:
//   [0, kMaxRanks)   `finished`: in so many calls rank r needs nothing of this rank's any more
//   kCompletedWord   the own proxy adds to it: the puts before are complete here
//   kFirstArrival + f  what a rank of this node signals by setting flag f
// A call's arrivals are republished: flag f is then set to the epoch, as ranks of the node set it, so that a
// waiter for a flag need not know who sets it. `finished` is waited for by one thread of the grid.
//
// Outbox and inbox are one area, laid out as the workspace's data area, at the same place on every rank.
// Where the NIC reads and writes memory of the device, it is the data area itself; else it is `staged`:
// pinned host memory. Data that arrives there is then copied into the data area before its flag is set; its
// word is republished as a landed flag of the workspace. (Words and counts are the world's; flags hold
// epochs, which are a workspace's own.)
#pragma once

#include <cstdint>

#include "backends/transport/channel.hpp"
#include "backends/transport/fifo_device.hpp"
#include "backends/transport/republish.hpp"

#ifdef __CUDACC__
#include "backends/transport/device_wait.cuh"
#endif

namespace mkernel::cuda {

inline constexpr int kMaxRanks = 16;
inline constexpr std::uint32_t kFlags = 114'688;  // of a workspace

inline constexpr std::uint32_t kCompletedWord = kMaxRanks;
inline constexpr std::uint32_t kFirstArrival = 2 * kMaxRanks;
inline constexpr std::uint32_t kNetworkWords = kFirstArrival + kFlags;

struct Network {
    transport::FifoDevice fifo;
    transport::Channel channel;
    const transport::Word* words;        // [kNetworkWords] of this rank's pad: pinned host memory
    transport::ExpectedCount* expected;  // of each word, in device memory
    char* area;
    std::int32_t rank;
    bool staged;
    bool ordered;  // the NIC never sends a put twice

#ifdef __CUDACC__
    // Puts bytes of the own area into that of a rank of another node, then adds 1 to the word there.
    // Everything that this thread knows to be written is there before the word. Returns false when the call
    // is given up.
    __device__ bool put(const transport::DeviceWaiter& waiter, int peer, std::uint32_t word,
                        const transport::Put& bytes = {}) const {
        return push(waiter, channel.command(static_cast<std::uint32_t>(peer), word, bytes));
    }

    // Adds 1 to kCompletedWord once all earlier puts are complete here.
    __device__ bool ask_completion(const transport::DeviceWaiter& waiter) const {
        return push(waiter, channel.completion(kCompletedWord));
    }

    // Waits until the word has had its one addition of this call. Called by one thread of the grid.
    __device__ bool wait(const transport::DeviceWaiter& waiter, std::uint32_t word) const {
        const auto from = word < kMaxRanks ? word : static_cast<std::uint32_t>(rank);
        if (!waiter.until(words[word], expected[word].after(1),
                          {transport::kControlWord, from, transport::kNoChunk})) {
            return false;
        }
        expected[word].move_on(1);
        return true;
    }

    // Sets those flags, from flag `first` on, as ranks of other nodes signal them. Called by `mine.lanes`
    // threads of one warp together. `source(flag)` returns the rank that signals a flag, for the diagnosis.
    template <class Source>
    __device__ void watch(const transport::DeviceWaiter& waiter, std::uint64_t epoch,
                          transport::SetWord* flags, std::uint32_t first,
                          const transport::WordPattern& which, transport::Lane mine,
                          Source&& source) const {
        const transport::Republished run{words + kFirstArrival + first,
                                         expected + kFirstArrival + first, flags + first, which};
        const transport::WaitResult result =
            transport::republish(run, epoch, waiter.limits(), mine);
        if (result == transport::WaitResult::ok) return;
        const std::uint32_t flag = first + transport::first_missing(run, epoch, mine);
        const std::uint32_t word = min(kFirstArrival + flag, kNetworkWords - 1);
        waiter.went_on(result, words[word].peek(), expected[word].after(1),
                       {word, source(flag), flag});
    }

  private:
    __device__ bool push(const transport::DeviceWaiter& waiter,
                         const transport::PutCommand& command) const {
        return waiter.went_on(fifo.push(command, waiter.limits()), 0, 1,
                              {transport::kFullFifo, command.peer, transport::kNoChunk});
    }
#endif
};

}  // namespace mkernel::cuda
