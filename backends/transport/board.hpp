// A rank's board: where each rank of its node writes, turn by turn, the digest of what it is about to
// do, so that ranks see at once whether they do the same.
//
// Lies in host memory that the node's ranks share. A rank writes its slot on every board, its own too,
// and then reads its own board until the slots of all ranks hold that turn. Slots are there twice, for
// even and for odd turns: who writes turn t + 2 has read turn t + 1 of all ranks, so all have read
// turn t.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace mkernel::transport {

constexpr std::size_t kDigestBytes = 32;

struct alignas(64) BoardSlot {
    std::uint64_t turn;  // from 1 on; published by a release store
    std::uint8_t digest[kDigestBytes];
};

class Board {
  public:
    static constexpr std::size_t bytes(int ranks) { return 2 * sizeof(BoardSlot) * ranks; }

    // Zeroed memory of bytes(ranks), aligned to a slot.
    Board(void* memory, int ranks) : slots_(static_cast<BoardSlot*>(memory)), ranks_(ranks) {}

    void write(std::uint64_t turn, int rank, const std::uint8_t* digest) const {
        BoardSlot& own = slot(turn, rank);
        std::memcpy(own.digest, digest, kDigestBytes);
        std::atomic_ref(own.turn).store(turn, std::memory_order_release);
    }

    // False where that rank has not come to this turn; or gave it up, and came to the turn after the next.
    bool read(std::uint64_t turn, int rank, std::uint8_t* digest) const {
        BoardSlot& theirs = slot(turn, rank);
        if (std::atomic_ref(theirs.turn).load(std::memory_order_acquire) != turn) return false;
        std::memcpy(digest, theirs.digest, kDigestBytes);
        return true;
    }

    [[nodiscard]] int ranks() const { return ranks_; }

  private:
    [[nodiscard]] BoardSlot& slot(std::uint64_t turn, int rank) const {
        return slots_[(turn % 2) * ranks_ + rank];
    }

    BoardSlot* slots_;
    int ranks_;
};

}  // namespace mkernel::transport
