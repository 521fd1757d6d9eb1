// A rank's board, on which it writes, turn by turn, the digest of its next action, so that ranks see at once
// whether they do the same.
//
// It lies in host memory that the node's ranks share. A rank writes on its own board alone, so a rank that
// was stopped for long writes into no memory of peers that have left meanwhile; then it reads the boards of
// all ranks until each holds that turn. A board has two slots, for even and for odd turns: a rank that writes
// turn t + 2 has read turn t + 1 of all ranks, so all have read turn t.
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
    static constexpr std::size_t kBytes = 2 * sizeof(BoardSlot);

    // Takes zeroed memory of kBytes, aligned to a slot.
    explicit Board(void* memory) : slots_(static_cast<BoardSlot*>(memory)) {}

    void write(std::uint64_t turn, const std::uint8_t* digest) const {
        BoardSlot& own = slots_[turn % 2];
        std::memcpy(own.digest, digest, kDigestBytes);
        std::atomic_ref(own.turn).store(turn, std::memory_order_release);
    }

    // Reads the digest. Returns false where the board's rank has not come to this turn; or gave it up, and
    // came to the turn after the next.
    bool read(std::uint64_t turn, std::uint8_t* digest) const {
        BoardSlot& theirs = slots_[turn % 2];
        if (std::atomic_ref(theirs.turn).load(std::memory_order_acquire) != turn) return false;
        std::memcpy(digest, theirs.digest, kDigestBytes);
        return true;
    }

  private:
    BoardSlot* slots_;
};

}  // namespace mkernel::transport
