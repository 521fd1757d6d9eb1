// Commands that the proxy has taken from the FIFO and could not post, because their peer's queue was full: a
// list a peer, in the order in which they were taken, in a pool of fixed size. Peers take turns.
//
// A peer's first command may be posted in part; the others have not begun. Adding and removing allocate
// nothing, except for the first command ever set aside for a rank higher than all before.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "backends/nics/nic.hpp"

namespace mkernel::nics {

class Waiting {
  public:
    struct Entry {
        transport::PutCommand command;
        PutCursor cursor;
        std::uint64_t number = 0;  // the how many-th that was taken
        std::uint32_t next = 0;
    };

    explicit Waiting(std::uint64_t capacity) : entries_(capacity) {
        for (std::uint32_t i = 0; i < capacity; ++i) entries_[i].next = i + 1;
        turns_.reserve(capacity);
    }

    [[nodiscard]] std::size_t size() const { return used_; }
    [[nodiscard]] bool full() const { return used_ == entries_.size(); }
    // Returns the number of peers for which commands wait.
    [[nodiscard]] std::size_t peers() const { return turns_.size(); }
    [[nodiscard]] bool has(std::uint32_t peer) const {
        return peer < lists_.size() && lists_[peer].count != 0;
    }
    // Returns the lowest number that waits; `otherwise` where none does.
    [[nodiscard]] std::uint64_t oldest(std::uint64_t otherwise) const {
        for (const std::uint32_t peer : turns_) {
            otherwise = std::min(otherwise, entries_[lists_[peer].first].number);
        }
        return otherwise;
    }

    // Adds a command after the peer's others. There must be room.
    void add(const transport::PutCommand& command, const PutCursor& cursor, std::uint64_t number) {
        const std::uint32_t slot = free_;
        free_ = entries_[slot].next;
        entries_[slot] = {command, cursor, number, 0};
        if (command.peer >= lists_.size()) lists_.resize(command.peer + 1);
        List& list = lists_[command.peer];
        if (list.count++ == 0) {
            list.first = slot;
            turns_.push_back(command.peer);
        } else {
            entries_[list.last].next = slot;
        }
        list.last = slot;
        ++used_;
    }

    // Returns the first command of the peer whose turn it is; null where nothing waits.
    Entry* first() { return turns_.empty() ? nullptr : &entries_[lists_[turn_peer()].first]; }
    // Removes it. Returns true where its peer has no more; then it is the next peer's turn.
    bool remove_first() {
        const std::size_t at = turn_ % turns_.size();
        List& list = lists_[turns_[at]];
        const std::uint32_t slot = list.first;
        list.first = entries_[slot].next;
        entries_[slot].next = free_;
        free_ = slot;
        --used_;
        if (--list.count != 0) return false;
        turns_.erase(turns_.begin() + static_cast<std::ptrdiff_t>(at));
        turn_ = at;
        return true;
    }
    void next_peer() { turn_ = turn_ % turns_.size() + 1; }

  private:
    struct List {
        std::uint32_t first = 0;
        std::uint32_t last = 0;
        std::uint32_t count = 0;
    };
    [[nodiscard]] std::uint32_t turn_peer() const { return turns_[turn_ % turns_.size()]; }

    std::vector<Entry> entries_;
    std::vector<List> lists_;           // by peer
    std::vector<std::uint32_t> turns_;  // peers for which commands wait
    std::size_t turn_ = 0;
    std::uint32_t free_ = 0;
    std::size_t used_ = 0;
};

}  // namespace mkernel::nics
