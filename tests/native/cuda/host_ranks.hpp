// Ranks of several nodes for the code of kernels: threads stand for those of blocks, and one thread for the proxies and NICs
// of all ranks.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <optional>
#include <random>
#include <string>

#include "tests/native/cuda/host_kernels.hpp"

#include "backends/accelerators/cuda/device/call.cuh"
#include "backends/transport/fifo.hpp"
#include "tests/native/nics/check.hpp"

namespace mkernel::host_kernels {

struct Rank {
    Rank(std::uint64_t area_bytes, bool staged)
        : base(static_cast<char*>(std::calloc(1, cuda::kDataOffset + area_bytes))),
          staging(staged ? area_bytes : 0),
          words(cuda::kNetworkWords),
          expected(cuda::kNetworkWords),
          ring(256),
          tickets(transport::FifoTickets::of(ring.memory())) {}
    ~Rank() { std::free(base); }
    Rank(const Rank&) = delete;
    Rank& operator=(const Rank&) = delete;
    char* area() { return staging.empty() ? data() : staging.data(); }
    char* data() { return base + cuda::kDataOffset; }

    char* base;
    std::vector<char> staging;
    std::vector<transport::AddedWord> words;
    std::vector<transport::ExpectedCount> expected;
    transport::FifoRing ring;
    transport::FifoTickets tickets;
    transport::HostControl host{};
    std::optional<transport::PutCommand> held;
    std::map<int, std::uint64_t> put;  // bytes, by peer
};

class Ranks {
  public:
    // NICs write to the first `inbox_bytes` of an area alone.
    Ranks(int nodes, int local, bool staged, std::uint64_t area_bytes, std::uint64_t inbox_bytes)
        : local_(local), staged_(staged), area_bytes_(area_bytes), inbox_bytes_(inbox_bytes) {
        for (int rank = 0; rank < nodes * local; ++rank) {
            ranks_.push_back(std::make_unique<Rank>(area_bytes, staged));
            control(rank).state.epoch = 1;
        }
        proxy_ = std::thread([this] { carry(); });
    }
    Ranks(const Ranks&) = delete;
    Ranks& operator=(const Ranks&) = delete;
    ~Ranks() {
        stop_ = true;
        proxy_.join();
    }

    Rank& operator[](int rank) { return *ranks_[rank]; }
    [[nodiscard]] int size() const { return static_cast<int>(ranks_.size()); }
    [[nodiscard]] bool near(int a, int b) const { return a / local_ == b / local_; }
    [[nodiscard]] cuda::Control& control(int rank) const {
        return *reinterpret_cast<cuda::Control*>(ranks_[rank]->base);
    }

    [[nodiscard]] cuda::Workspace workspace(int rank) const {
        cuda::Workspace made{};
        made.rank = rank, made.world = size(), made.local = local_;
        made.first = rank / local_ * local_;
        for (int other = 0; other < size(); ++other) {
            if (near(rank, other)) made.base[other] = ranks_[other]->base;
        }
        Rank& own = *ranks_[rank];
        const transport::FifoRingMemory& ring = own.ring.memory();
        made.network.fifo = {ring.slots, ring.tail, &own.tickets, ring.capacity};
        made.network.words = own.words.data();
        made.network.expected = own.expected.data();
        made.network.area = own.area();
        made.network.rank = rank;
        made.network.staged = staged_;
        made.network.ordered = true;
        return made;
    }
    [[nodiscard]] transport::WaitLimits limits(int rank) const {
        return {&ranks_[rank]->host, patience_ns, 1};
    }

    // A rank's put, and all that follow it, leave when `held(word)` is false. Set it before ranks run.
    std::function<bool(std::uint32_t)> held = [](std::uint32_t) { return false; };
    // Carries the bytes of a put, and then its word, to the peer. Set it, and how long ranks wait, before they run.
    using Step = std::function<void()>;
    std::function<void(const Step&, const Step&)> deliver = [](const Step& bytes,
                                                               const Step& word) {
        bytes();
        word();
    };
    std::uint64_t patience_ns = 60'000'000'000u;

    // Runs both of each rank's threads to their end; then, unless something is broken, every word that came has been
    // counted.
    template <class First, class Second>
    void run(First&& first, Second&& second, bool broken = false) {
        std::vector<std::thread> running;
        for (int rank = 0; rank < size(); ++rank) {
            ranks_[rank]->put.clear();
            running.emplace_back([&, rank] { first(rank); });
            running.emplace_back([&, rank] { second(rank); });
        }
        for (std::thread& each : running) each.join();
        if (broken) return;
        for (auto& each : ranks_) {
            CHECK(each->host.record.code == 0);
            for (std::uint32_t word = 0; word < cuda::kNetworkWords; ++word) {
                if (each->words[word].value != each->expected[word].value)
                    CHECK(!"a word not counted");
            }
        }
    }

  private:
    void carry() {
        while (!stop_) {
            bool any = false;
            for (auto& each : ranks_) {
                transport::PutCommand command;
                while (each->held || each->ring.pop(command)) {
                    if (each->held) command = *each->held;
                    each->held.reset();
                    if (held(command.signal)) {
                        each->held = command;
                        break;
                    }
                    any = true;
                    Rank& peer = *ranks_[command.peer];
                    CHECK(command.remote_offset + command.bytes <= inbox_bytes_);
                    CHECK(command.local_offset + command.bytes <= area_bytes_);
                    deliver(
                        [&] {
                            std::memcpy(peer.area() + command.remote_offset,
                                        each->area() + command.local_offset, command.bytes);
                            each->put[static_cast<int>(command.peer)] += command.bytes;
                        },
                        [&] { peer.words[command.signal].add(command.value); });
                    each->ring.release();
                }
            }
            if (!any) std::this_thread::sleep_for(std::chrono::microseconds(100));
        }
    }

    int local_;
    bool staged_;
    std::uint64_t area_bytes_, inbox_bytes_;
    std::vector<std::unique_ptr<Rank>> ranks_;
    std::atomic<bool> stop_ = false;
    std::thread proxy_;
};

}  // namespace mkernel::host_kernels
