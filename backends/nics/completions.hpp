// Completions (transport/put_command.hpp) that the proxy has taken from the FIFO and not raised yet, in
// their order, in a ring of fixed size. The first ones have marks of the NIC, as many as there are marks.
#pragma once

#include <cstdint>
#include <vector>

#include "backends/nics/nic.hpp"

namespace mkernel::nics {

class Completions {
  public:
    explicit Completions(std::uint64_t capacity) : capacity_(capacity), entries_(capacity) {}

    [[nodiscard]] bool empty() const { return begin_ == end_; }
    [[nodiscard]] bool full() const { return end_ - begin_ == capacity_; }
    // Returns the number of the first one; `otherwise` where there is none.
    [[nodiscard]] std::uint64_t oldest(std::uint64_t otherwise) const {
        return empty() ? otherwise : at(begin_).number;
    }

    // Adds one after the others. `number`: the command's own, in the order of commands. There must be room.
    void add(const transport::PutCommand& command, std::uint64_t number) {
        entries_[end_++ % capacity_] = {command, number};
    }

    // Returns true where the first one has a mark.
    [[nodiscard]] bool marked() const { return marked_ != begin_; }
    [[nodiscard]] const transport::PutCommand& first() const { return at(begin_).command; }
    [[nodiscard]] std::uint32_t first_mark() const { return mark_of(begin_); }
    void remove_first() { ++begin_; }

    // `can_mark` returns true where one is without a mark while a mark is free; the next functions return its
    // number, and the mark that it takes.
    [[nodiscard]] bool can_mark() const { return marked_ != end_ && marked_ - begin_ < kOwnMarks; }
    [[nodiscard]] std::uint64_t next_number() const { return at(marked_).number; }
    std::uint32_t take_mark() { return mark_of(marked_++); }

  private:
    static constexpr std::uint32_t kOwnMarks = kMarks - 1;  // all but the flush's
    struct Entry {
        transport::PutCommand command;
        std::uint64_t number = 0;
    };
    [[nodiscard]] const Entry& at(std::uint64_t index) const { return entries_[index % capacity_]; }
    static std::uint32_t mark_of(std::uint64_t index) {
        return 1 + static_cast<std::uint32_t>(index % kOwnMarks);
    }

    std::uint64_t capacity_;
    std::vector<Entry> entries_;
    std::uint64_t begin_ = 0;
    std::uint64_t marked_ = 0;  // those before have marks
    std::uint64_t end_ = 0;
};

}  // namespace mkernel::nics
