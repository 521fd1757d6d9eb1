#include "backends/accelerators/ascend/sim/strict.hpp"

#include <algorithm>
#include <iterator>
#include <utility>

#include "backends/accelerators/ascend/sim/isa_error.hpp"

namespace mkernel::ascend::sim {

using isa::Pipe;

Strict::Strict(const StrictOptions& options, Role role, std::uint32_t index, std::string core,
               std::uint32_t rank, Races* races)
    : core_(std::move(core)),
      queue_(options.seed
                 ? std::optional(*options.seed + index * kRoles + static_cast<unsigned>(role))
                 : std::nullopt),
      races_(races) {
    if (options.skip.role == role && options.skip.index == index) {
        skipped_ = options.skip.numbers;
        skipped_waits_ = options.skip.waits;
    }
    if (races_ != nullptr) id_ = races_->enter(rank, core_);
}

void Strict::check(const Site& site, Pipe pipe, std::uint32_t at, const Operand& operand) {
    const std::string wrong = ranges_.access(order_, site, pipe, at, operand);
    if (!wrong.empty()) throw IsaError(core_ + ", " + describe(site, pipe) + ": " + wrong);
    if (races_ == nullptr || operand.kind != Operand::Kind::global) return;
    if (pipe == Pipe::S) {
        add_word(words_[operand.write ? 1 : 0], site, operand.view);
    } else {
        check_races(site, pipe, operand.view, operand.write);
    }
}

void Strict::check_races(const Site& site, Pipe pipe, const isa::GlobalView& view, bool write) {
    const std::string wrong = races_->access(id_, site, pipe, view, write);
    if (!wrong.empty()) throw IsaError(core_ + ", " + describe(site, pipe) + ": " + wrong);
}

void Strict::add_word(Runs& runs, const Site& site, const isa::GlobalView& word) {
    const std::byte* end = end_of(word);
    auto next = runs.upper_bound(word.base);
    auto run = next == runs.begin() ? runs.end() : std::prev(next);
    if (run != runs.end() && run->second.end >= end) return;
    if (run != runs.end() && run->second.end >= word.base) {
        run->second.end = end;
    } else {
        run = runs.emplace_hint(next, word.base, Run{end, site});
    }
    if (next != runs.end() && next->first == end) {
        run->second.end = next->second.end;
        runs.erase(next);
    }
}

void Strict::check_words() {
    if (races_ == nullptr) return;
    for (const bool write : {false, true}) {
        for (const auto& [begin, run] : words_[write ? 1 : 0]) {
            const auto words = static_cast<std::uint32_t>((run.end - begin) / sizeof(std::int32_t));
            check_races(run.site, Pipe::S,
                        {const_cast<std::byte*>(begin), isa::DType::int32, 1, words, words, 1},
                        write);
        }
        words_[write ? 1 : 0].clear();
    }
}

void Strict::drain() {
    check_words();
    queue_.drain();
}

void Strict::issue(const Site& site, Pipe pipe, std::initializer_list<Operand> operands,
                   std::function<void()> effect) {
    tells_of_one_ = false;
    const std::uint32_t at = order_.issue(pipe);
    for (const bool write : {false, true}) {  // an instruction reads before it writes
        for (const Operand& operand : operands) {
            if (operand.write == write) check(site, pipe, at, operand);
        }
    }
    queue_.push(pipe, std::move(effect));
}

void Strict::put(const Site& site, const isa::GlobalView& to, const isa::GlobalView& from,
                 const isa::Tile& ping, const isa::Tile& pong, std::function<void()> effect) {
    const auto filled = [](const isa::Tile& tile) { return tile.with_valid(tile.rows, tile.cols); };
    tells_of_one_ = false;
    order_.follow(Pipe::MTE2, Pipe::MTE3);
    const std::uint32_t loads = order_.issue(Pipe::MTE2);
    check(site, Pipe::MTE2, loads, reads(from));
    check(site, Pipe::MTE2, loads, writes(filled(ping)));
    check(site, Pipe::MTE2, loads, writes(filled(pong)));
    order_.follow(Pipe::MTE3, Pipe::MTE2);
    const std::uint32_t stores = order_.issue(Pipe::MTE3);
    check(site, Pipe::MTE3, stores, reads(filled(ping)));
    check(site, Pipe::MTE3, stores, reads(filled(pong)));
    check(site, Pipe::MTE3, stores, writes(to));
    // Takes effect as one piece, after everything that the two pipes have before it.
    queue_.drain();
    queue_.push(Pipe::MTE3, std::move(effect));
}

bool Strict::executes_sync() {
    return std::find(skipped_.begin(), skipped_.end(), syncs_++) == skipped_.end();
}

void Strict::set_flag(const Site& site, Pipe source, Pipe waiting, std::uint32_t event) {
    if (!order_.set(source, waiting, event)) {
        throw IsaError(core_ + ", " + describe(site, source) + ": event " + std::to_string(event) +
                       " of " + name_of(source) + "→" + name_of(waiting) +
                       " is set again, but nothing orders this after pipe " + name_of(waiting) +
                       " has waited for it");
    }
    queue_.set(source, waiting, event);
}

void Strict::wait_flag(Pipe source, Pipe waiting, std::uint32_t event) {
    order_.wait(source, waiting, event);
    queue_.wait(source, waiting, event);
}

void Strict::fence(Pipe pipe) {
    if (pipe == Pipe::ALL) {
        order_.all();
        queue_.drain();
    } else {
        order_.follow(Pipe::S, pipe);
        queue_.drain(pipe);
    }
    ranges_.fence(pipe);
    tells_of_one_ = pipe != Pipe::ALL;
}

void Strict::publish(const Site& site, const std::string& what, std::uint32_t peer,
                     std::uint32_t signal, const std::function<std::uint64_t()>& add) {
    const std::string pending = ranges_.unpublished(order_, !tells_of_one_);
    if (!pending.empty()) {
        throw IsaError(core_ + ", " + describe(site, Pipe::S) + ": " + what + " while " + pending);
    }
    check_words();
    if (races_ == nullptr) {
        add();
    } else {
        races_->raise(id_, peer, signal, add);
        // Reads that are still under way come after this signal, for any core that waits for it.
        ranges_.each_pending_read(order_,
                                  [&](const Site& site, Pipe pipe, const isa::GlobalView& view) {
                                      check_races(site, pipe, view, false);
                                  });
    }
}

bool Strict::executes_wait() {
    const auto last = skipped_waits_.end();
    return std::find(skipped_waits_.begin(), last, waits_++) == last;
}

void Strict::seen(std::uint32_t peer, std::uint32_t signal, std::uint64_t value) {
    check_words();
    if (races_ != nullptr) races_->seen(id_, peer, signal, value);
}

}  // namespace mkernel::ascend::sim
