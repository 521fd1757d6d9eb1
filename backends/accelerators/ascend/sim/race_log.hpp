// Races between ranks that are processes: each keeps a log of its cores' actions in a strict call, and the
// logs of all ranks are walked together afterwards, by the same rules by which ranks of one process are
// checked meanwhile (strict_races.hpp).
//
// A log is in the order in which things happened on its rank. Between ranks the signals give the order: each
// raise records the value of the signal after it, so raises of one signal have an order, and actions after a
// wait come after the raise that reached the value. Any order that keeps to both finds the same races.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "backends/accelerators/ascend/sim/strict_races.hpp"

namespace mkernel::ascend::sim {

// One rank's log of one call. `Races` fills it, under its lock.
class RaceLog {
  public:
    // `shared`: the memory of each rank that all ranks touch, as mapped here.
    RaceLog(std::uint32_t rank, std::vector<Races::Range> shared);

    void enter(Races::CoreId core, const std::string& name);
    void end_kernel();
    void access(Races::CoreId core, const Site& site, isa::Pipe pipe, const isa::GlobalView& view,
                bool write);
    void raise(Races::CoreId core, std::uint32_t peer, std::uint32_t signal, std::uint64_t value);
    void seen(Races::CoreId core, std::uint32_t peer, std::uint32_t signal, std::uint64_t value);

    // Returns the log for `race_between`.
    [[nodiscard]] std::string bytes() const;

  private:
    friend class RaceWalk;
    enum class What : std::uint32_t { enter, end_kernel, access, raise, seen };
    // `place`: of an access, the rank whose memory it is, and `at` the offset there; kPrivate: `at` is an
    // address of this rank's own. `text`: number of the core's name, or of the instruction.
    struct Event {
        What what = What::enter;
        Races::CoreId core = 0;
        std::uint32_t peer = 0, signal = 0;
        std::uint64_t value = 0;
        std::uint32_t place = 0, text = 0, line = 0;
        isa::Pipe pipe = isa::Pipe::S;
        isa::DType dtype = isa::DType::float16;
        bool write = false;
        std::uint32_t rows = 0, cols = 0;
        std::uint64_t at = 0;
        std::int64_t row_stride = 0, col_stride = 0;
    };
    static constexpr std::uint32_t kPrivate = ~0U;

    RaceLog() = default;
    static RaceLog of(const std::string& bytes);
    std::uint32_t text(const std::string& words);

    std::uint32_t rank_ = 0;
    std::vector<Races::Range> shared_;
    std::vector<Event> events_;
    std::vector<std::string> texts_;
    std::map<std::string, std::uint32_t> numbers_;                               // of texts_
    std::map<std::pair<const char*, const char*>, std::uint32_t> instructions_;  // the same
};

// Returns the first race in the calls of a world, in words; empty: there is none. `ranks`: by rank, its logs
// in the order of its calls. Throws std::invalid_argument where the bytes are not logs of one world.
std::string race_between(const std::vector<std::vector<std::string>>& ranks);

}  // namespace mkernel::ascend::sim
