// One running call of an op on one rank: it starts the op's two kernels on simulated cores, keeps alive what
// they use, and collects outcome, times and traces.
#pragma once

#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "backends/accelerators/ascend/host/kernels.hpp"
#include "backends/accelerators/ascend/sim/core.hpp"
#include "backends/accelerators/ascend/sim/race_log.hpp"

namespace mkernel::ascend::host {

using sim::View;

struct Call {
    std::shared_ptr<Kernels> kernels;
    CallArgs args;  // `peers` and the view's flag are set by the launch
    std::vector<Peer> peers;
    Blocks blocks;  // vector cores of the chip: the comm kernel's come first
    std::uint32_t number = 0;
    std::uint32_t node = 0;
    const transport::FifoHandle* fifo = nullptr;
    std::uint64_t timeout_ns = 0;
    std::uint64_t begun_ns = 0;  // when the ranks agreed on it, or later; 0: not known
    View view = View::pipelined;
    bool trace = false;
    std::optional<sim::StrictOptions> strict;
    std::shared_ptr<sim::Races> races;  // strict: of the whole world; null: this call has its own
    bool log_races = false;             // strict, in a world of one node: for `race_log`
};

// Returns the trace blob (sim/trace.hpp) of a rank's call without running it: no signal is awaited, and of
// memory only tables are touched, by scalar instructions, for whose tensors the kernels have addresses; other
// addresses in `call` are ignored. It is the same schedule as a traced launch of the call.
std::string record(Call call);

class Launch : public std::enable_shared_from_this<Launch> {
  public:
    // Starts a call. Throws where the host has no threads for its cores; nothing was started then.
    static std::shared_ptr<Launch> start(Call call);

    // Waits; returns true once both kernels have returned. Rethrows what an instruction of them reported.
    bool wait(std::uint64_t timeout_ns);
    // Return seconds, meaningful once wait returned true. 0 for a kernel that the view leaves out. In the
    // sequential view communication ends when the data from other ranks has arrived here.
    [[nodiscard]] double comm_seconds() const { return comm_.seconds(); }
    [[nodiscard]] double compute_seconds() const { return compute_.seconds(); }
    // In strict simulation, returns every core that was waiting when a wait passed its deadline, and what it
    // waited for; otherwise empty.
    [[nodiscard]] std::string at_deadline() const {
        return waits_ ? waits_->at_deadline() : std::string();
    }
    // Returns the trace blob (sim/trace.hpp); empty where none was requested.
    [[nodiscard]] std::string trace() const;

    // Returns the log that `sim::race_between` walks, once wait returned true; empty where none was
    // requested.
    [[nodiscard]] std::string race_log() const { return race_log_ ? race_log_->bytes() : ""; }

    // Aborts every launch that this process started and that still runs, so that its cores can be joined. A
    // forked child leaves its parent's launches alone.
    static void cancel_all();

  private:
    // The cores of a kernel that have one role.
    struct Part {
        sim::Role role;
        std::uint32_t blocks;
        std::uint32_t first;  // number of its first core among those of its kind
        bool (Kernels::*run)(sim::Core&) const;
        std::vector<std::vector<sim::Record>> records;
    };
    struct Kernel {
        sim::KernelName name;
        std::vector<Part> parts = {};
        std::atomic<std::uint32_t> left{0};
        std::uint64_t start_ns = 0, end_ns = 0;
        [[nodiscard]] std::uint32_t blocks() const {
            std::uint32_t all = 0;
            for (const Part& part : parts) all += part.blocks;
            return all;
        }
        [[nodiscard]] double seconds() const {
            return end_ns > start_ns ? static_cast<double>(end_ns - start_ns) * 1e-9 : 0.0;
        }
    };

    friend std::string record(Call call);

    explicit Launch(Call call);
    void reserve() const;
    void submit(Kernel& kernel);
    void run_block(Part& part, std::uint32_t index);
    void run_core(Kernel& kernel, Part& part, std::uint32_t index);
    void guarded(const Kernel& kernel, std::uint32_t index, const std::function<void()>& body);
    void kernel_ended(Kernel& kernel);
    void arrived();
    void count_ended(Kernel& kernel);
    void end_races();

    pid_t process_ = getpid();
    Call call_;
    sim::Environment environment_;
    std::optional<sim::Waits> waits_;       // strict
    std::optional<sim::RaceLog> race_log_;  // the same
    std::optional<sim::Races> races_;       // the same
    Kernel comm_{.name = sim::KernelName::comm}, compute_{.name = sim::KernelName::compute};

    std::mutex mutex_;
    std::condition_variable ended_;
    std::uint32_t kernels_left_ = 0;
    std::string error_;
};

}  // namespace mkernel::ascend::host
