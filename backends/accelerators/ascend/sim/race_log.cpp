#include "backends/accelerators/ascend/sim/race_log.hpp"

#include <cstring>
#include <optional>
#include <set>
#include <stdexcept>

namespace mkernel::ascend::sim {

using isa::GlobalView;

namespace {

template <class T>
void put(std::string& to, const T& value) {
    to.append(reinterpret_cast<const char*>(&value), sizeof value);
}

// The reader of what `put` wrote.
class Reader {
  public:
    explicit Reader(const std::string& from) : from_(from) {}
    template <class T>
    T take() {
        T value;
        std::memcpy(&value, next(sizeof value), sizeof value);
        return value;
    }
    std::string take_text() {
        const auto length = take<std::uint64_t>();
        return {next(length), length};
    }
    [[nodiscard]] bool at_end() const { return at_ == from_.size(); }

  private:
    const char* next(std::uint64_t bytes) {
        if (bytes > from_.size() - at_) throw std::invalid_argument("a log of races ends early");
        const char* here = from_.data() + at_;
        at_ += bytes;
        return here;
    }
    const std::string& from_;
    std::size_t at_ = 0;
};

// Returns where a walk puts a byte of a rank's address space: no two ranks' memory may look alike.
std::byte* address(std::uint32_t rank, std::uint64_t at) {
    return reinterpret_cast<std::byte*>((std::uint64_t{rank} + 1) << 48 | at);
}

}  // namespace

RaceLog::RaceLog(std::uint32_t rank, std::vector<Races::Range> shared)
    : rank_(rank), shared_(std::move(shared)) {}

std::uint32_t RaceLog::text(const std::string& words) {
    const auto [it, fresh] = numbers_.emplace(words, static_cast<std::uint32_t>(texts_.size()));
    if (fresh) texts_.push_back(words);
    return it->second;
}

void RaceLog::enter(Races::CoreId core, const std::string& name) {
    events_.push_back({.what = What::enter, .core = core, .text = text(name)});
}

void RaceLog::end_kernel() {
    events_.push_back({.what = What::end_kernel});
}

void RaceLog::access(Races::CoreId core, const Site& site, isa::Pipe pipe, const GlobalView& view,
                     bool write) {
    Event event{.what = What::access, .core = core, .line = site.where.line, .pipe = pipe};
    const auto [it, fresh] = instructions_.try_emplace({site.instruction, site.where.file}, 0);
    if (fresh) it->second = text(std::string(site.instruction) + '\n' + site.where.file);
    event.text = it->second;
    event.dtype = view.dtype;
    event.write = write;
    event.rows = view.rows;
    event.cols = view.cols;
    event.row_stride = view.row_stride;
    event.col_stride = view.col_stride;
    event.place = kPrivate;
    event.at = reinterpret_cast<std::uintptr_t>(view.base);
    for (std::uint32_t rank = 0; rank < shared_.size(); ++rank) {
        const Races::Range& range = shared_[rank];
        if (view.base < range.base || view.base >= range.base + range.bytes) continue;
        event.place = rank;
        event.at = static_cast<std::uint64_t>(view.base - range.base);
    }
    events_.push_back(event);
}

void RaceLog::raise(Races::CoreId core, std::uint32_t peer, std::uint32_t signal,
                    std::uint64_t value) {
    events_.push_back(
        {.what = What::raise, .core = core, .peer = peer, .signal = signal, .value = value});
}

void RaceLog::seen(Races::CoreId core, std::uint32_t peer, std::uint32_t signal,
                   std::uint64_t value) {
    events_.push_back(
        {.what = What::seen, .core = core, .peer = peer, .signal = signal, .value = value});
}

std::string RaceLog::bytes() const {
    std::string all;
    put(all, rank_);
    put(all, std::uint64_t{shared_.size()});
    for (const Races::Range& range : shared_) put(all, range);
    put(all, std::uint64_t{texts_.size()});
    for (const std::string& each : texts_) {
        put(all, std::uint64_t{each.size()});
        all += each;
    }
    put(all, std::uint64_t{events_.size()});
    for (const Event& event : events_) put(all, event);
    return all;
}

RaceLog RaceLog::of(const std::string& bytes) {
    Reader from(bytes);
    RaceLog log;
    log.rank_ = from.take<std::uint32_t>();
    for (auto left = from.take<std::uint64_t>(); left > 0; --left) {
        log.shared_.push_back(from.take<Races::Range>());
    }
    for (auto left = from.take<std::uint64_t>(); left > 0; --left) {
        log.texts_.push_back(from.take_text());
    }
    for (auto left = from.take<std::uint64_t>(); left > 0; --left) {
        const auto event = from.take<Event>();
        const bool named = event.what == What::enter || event.what == What::access;
        if (named && event.text >= log.texts_.size()) {
            throw std::invalid_argument("a log of races names what it does not hold");
        }
        log.events_.push_back(event);
    }
    if (!from.at_end()) throw std::invalid_argument("a log of races goes on behind its end");
    return log;
}

// All ranks' logs of a world, walked in an order that its signals allow.
class RaceWalk {
  public:
    explicit RaceWalk(const std::vector<std::vector<std::string>>& ranks) : ranks_(ranks.size()) {
        std::vector<Races::Range> shared;
        for (std::uint32_t rank = 0; rank < ranks.size(); ++rank) {
            for (const std::string& bytes : ranks[rank]) {
                const RaceLog& log = ranks_[rank].calls.emplace_back(RaceLog::of(bytes));
                if (log.rank_ != rank || log.shared_.size() != ranks.size() ||
                    ranks[rank].size() != ranks[0].size()) {
                    throw std::invalid_argument("log " + std::to_string(ranks_[rank].calls.size()) +
                                                " of rank " + std::to_string(rank) +
                                                " is not of this world's calls");
                }
                const Races::Range& own = log.shared_[rank];
                shared.push_back({own_address(rank, own.base), own.bytes});
                for (const RaceLog::Event& event : log.events_) {
                    if (event.what == RaceLog::What::raise) {
                        signals_[{event.peer, event.signal}].left.insert(event.value);
                    }
                }
            }
        }
        races_.emplace(std::move(shared));
    }

    std::string race() {
        for (bool moved = true; moved;) {
            moved = false;
            for (Rank& rank : ranks_) {
                while (rank.call < rank.calls.size() && next(rank)) {
                    moved = true;
                    if (!found_.empty()) return found_;
                }
            }
        }
        for (const Rank& rank : ranks_) {
            if (rank.call < rank.calls.size()) {
                throw std::invalid_argument("a rank waited for what no log raises");
            }
        }
        return {};
    }

  private:
    struct Rank {
        std::vector<RaceLog> calls;
        std::size_t call = 0, event = 0;
        std::map<Races::CoreId, Races::CoreId> cores;  // of this call: in its log → in the walk
    };

    struct Signal {
        std::uint64_t stands = 0;
        std::multiset<std::uint64_t> left;  // what raises that were not walked make it
    };

    static const std::byte* own_address(std::uint32_t rank, const std::byte* base) {
        return address(rank, reinterpret_cast<std::uintptr_t>(base));
    }

    // Takes the rank's next event; false where it comes after one that has not been walked.
    bool next(Rank& rank) {
        const RaceLog& log = rank.calls[rank.call];
        if (rank.event == log.events_.size()) {
            rank.cores.clear();
            rank.event = 0;
            ++rank.call;
            return true;
        }
        const RaceLog::Event& event = log.events_[rank.event];
        if (!walk(rank, log, event)) return false;
        ++rank.event;
        return true;
    }

    bool walk(Rank& rank, const RaceLog& log, const RaceLog::Event& event) {
        using What = RaceLog::What;
        if (event.what == What::enter) {
            rank.cores[event.core] = races_->enter(log.rank_, log.texts_[event.text]);
            return true;
        }
        if (event.what == What::end_kernel) {
            races_->end_kernel(log.rank_);
            return true;
        }
        const auto core = rank.cores.find(event.core);
        if (core == rank.cores.end()) throw std::invalid_argument("a core did not enter its call");
        if (event.what == What::access) {
            access(core->second, rank.call, log, event);
            return true;
        }
        const bool raises = event.what == What::raise;
        Signal& signal = signals_[{raises ? event.peer : log.rank_, event.signal}];
        if (raises) {
            if (*signal.left.begin() != event.value) return false;
            signal.left.erase(signal.left.begin());
            signal.stands = event.value;
            races_->raise(core->second, event.peer, event.signal, [&event] { return event.value; });
            return true;
        }
        if (signal.stands < event.value) return false;
        races_->seen(core->second, event.peer, event.signal, event.value);
        return true;
    }

    void access(Races::CoreId core, std::size_t call, const RaceLog& log,
                const RaceLog::Event& event) {
        GlobalView view{nullptr,    event.dtype,      event.rows,
                        event.cols, event.row_stride, event.col_stride};
        if (event.place == RaceLog::kPrivate) {
            view.base = address(log.rank_, event.at);
        } else {
            const Races::Range& theirs = ranks_.at(event.place).calls.at(call).shared_[event.place];
            view.base =
                address(event.place, reinterpret_cast<std::uintptr_t>(theirs.base) + event.at);
        }
        const std::string& words = log.texts_[event.text];
        const std::size_t cut = words.find('\n');
        const char* file = texts_.insert(words.substr(cut + 1)).first->c_str();
        const char* instruction = texts_.insert(words.substr(0, cut)).first->c_str();
        const std::string wrong =
            races_->access(core, {instruction, {file, event.line}}, event.pipe, view, event.write);
        if (wrong.empty()) return;
        found_ = races_->name(core) + ", " +
                 describe({instruction, {file, event.line}}, event.pipe) + ": " + wrong;
    }

    std::vector<Rank> ranks_;
    std::optional<Races> races_;
    std::map<std::pair<std::uint32_t, std::uint32_t>, Signal> signals_;  // by rank and number
    std::set<std::string> texts_;                                        // Sites lead to them
    std::string found_;
};

std::string race_between(const std::vector<std::vector<std::string>>& ranks) {
    return RaceWalk(ranks).race();
}

}  // namespace mkernel::ascend::sim
