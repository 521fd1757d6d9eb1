// Copies that were joined write what they would have written one by one, in their order.
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "backends/accelerators/cuda/copy_list.hpp"
#include "tests/native/nics/check.hpp"

using mkernel::cuda::CopyList;
using mkernel::cuda::QueuedCopy;

namespace {

constexpr std::size_t kBytes = 4096;
using Bytes = std::vector<std::uint8_t>;

// Memory by its "addresses", which begin at 1000 in every kind of memory.
struct Machine {
    Machine() : device(kBytes), peer(kBytes), host(4 * kBytes) {
        for (std::size_t i = 0; i < kBytes; ++i) {
            peer[i] = static_cast<std::uint8_t>(i * 7 + i / 256);
        }
    }
    // As the mover runs a list: all that is staged is read first.
    void run(const std::vector<QueuedCopy>& copies) {
        for (const QueuedCopy& each : copies) {
            if (each.staging != 0 && each.from != 0) {
                std::memcpy(&host[each.staging - 1000], &peer[each.from - 1000], each.bytes);
            }
        }
        for (const QueuedCopy& each : copies) {
            if (each.to == 0) continue;
            const std::uint8_t* source =
                each.staging != 0 ? &host[each.staging - 1000] : &peer[each.from - 1000];
            std::memcpy(&device[each.to - 1000], source, each.bytes);
        }
    }
    Bytes device, peer, host;
};

TEST(joined_copies_write_the_same) {
    std::mt19937_64 random(5);
    std::size_t given = 0;
    std::size_t left = 0;
    for (int round = 0; round < 4000; ++round) {
        // Pieces of one region, in any order, some twice, some through staging, at times one that
        // overlaps with others.
        const std::size_t piece = 8 + random() % 64;
        const std::uint64_t shift = random() % 100;
        Machine one_by_one;
        Machine joined;
        CopyList list;
        std::uint64_t staged = 1000;
        std::vector<QueuedCopy> fetched;
        for (std::uint64_t i = 0, count = random() % 30; i < count; ++i) {
            const std::uint64_t at = random() % 30 * piece;
            QueuedCopy copy{1000 + shift + at, 1000 + at, 0, piece};
            if (random() % 20 == 0) copy.from += random() % 50;
            if (random() % 20 == 0) copy.to += random() % 50;
            const auto kind = random() % 8;
            if (round % 2 == 1 && kind < 3) {
                copy.staging = staged;
                staged += piece;
                if (kind == 0) {  // out of host memory
                    for (Machine* each : {&one_by_one, &joined}) {
                        std::memset(&each->host[copy.staging - 1000], static_cast<int>(i), piece);
                    }
                    copy.from = 0;
                } else if (kind == 1) {
                    copy.to = 0;
                    fetched.push_back(copy);
                }
            }
            one_by_one.run({copy});
            list.add(copy);
            ++given;
        }
        const auto& copies = list.join();
        left += copies.size();
        joined.run(copies);
        CHECK(one_by_one.device == joined.device);
        for (const QueuedCopy& each : fetched) {
            CHECK(std::memcmp(&one_by_one.host[each.staging - 1000],
                              &joined.host[each.staging - 1000], each.bytes) == 0);
        }
    }
    CHECK(left < given);
}

TEST(a_run_of_pieces_in_any_order_becomes_one_copy) {
    std::mt19937_64 random(9);
    std::vector<QueuedCopy> pieces;
    for (std::uint64_t i = 0; i < 64; ++i) pieces.push_back({1000 + i * 32, 1200 + i * 32, 0, 32});
    pieces.push_back(pieces[17]);  // placed twice
    std::ranges::shuffle(pieces, random);
    CopyList list;
    for (const QueuedCopy& each : pieces) list.add(each);
    const auto& copies = list.join();
    CHECK(copies.size() == 1 && copies[0].to == 1000 && copies[0].bytes == 64 * 32);
}

}  // namespace

int main(int argc, char** argv) {
    return mkernel::nics::testing::run(argc, argv);
}
