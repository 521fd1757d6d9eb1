// The timed model: it replays the traces of all ranks of a call against a machine description and returns how
// long the same schedule would take there. It is a deterministic discrete-event simulation; no threads, no
// clocks of the host. Times are nanoseconds of the modelled machine.
//
// What is modelled
//   - A core's S pipe issues its instructions one by one (`issue_ns` each) and itself executes
//     signals, fences, NIC puts and scalar instructions (`scalar_ns` each). Every other pipe
//     executes what it was issued, in order.
//   - set_flag takes effect when everything before it on its pipe is done; wait_flag holds its
//     pipe.
//   - A fence waits for all pipes of its core, or for one.
//   - An instruction occupies its pipe for bytes / rate (or multiply-adds / rate) and is done a
//     fixed latency later, so that a pipe overlaps latencies but not transfers.
//   - Transfers also occupy what they share, in order of their start: the rank's memory, the link
//     of the ordered pair of ranks, the rank's egress and ingress, the node's NIC in each
//     direction. Memory is L2; HBM too where a piece of the call's inputs is read for the first time.
//   - A TGET has the latency of a link twice: a request and its answer.
//   - A signal is seen `signal_ns` after it was raised; one that a NIC put carries, when the data
//     is there. Counters start at 0.
// Not modelled are data that L2 cannot hold or writes back, limits of issue queues, bank conflicts,
// contention inside a core, and clock throttling.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "backends/accelerators/ascend/sim/trace.hpp"

namespace mkernel::ascend::sim {

// Rates in bytes per ns (= GB/s) unless named otherwise. See machine.json for their meaning.
struct Machine {
    double launch_ns = 0, issue_ns = 0, signal_ns = 0, scalar_ns = 0;
    double macs_per_ns_16 = 1, macs_per_ns_32 = 1, matmul_ns = 0;
    double extract_rate = 1, extract_ns = 0;
    double vector_rate = 1;
    double load_rate = 1, store_rate = 1, put_rate = 1, memory_ns = 0, memory_rate = 1;
    double hbm_rate = 1;
    double link_rate = 1, link_ns = 0, egress_rate = 1, ingress_rate = 1;
    double proxy_ns = 0, nic_rate = 1, nic_ns = 0;
};

// The compute-only view leaves out the comm kernel, and every signal of the compute kernel to other ranks;
// signals that it waits for are there, except those of its own cores to each other.

// One executed instruction. `core`: index among the cores of its kind. Plain data, passed on as bytes.
struct Span {
    std::uint32_t rank = 0;
    Role role = Role::cube;
    std::uint32_t core = 0;
    Kind kind = Kind::tload;
    isa::Pipe pipe = isa::Pipe::S;
    std::uint16_t reserved = 0;
    std::uint32_t chunk = kNoChunk;
    std::uint32_t peer = 0;
    double start_ns = 0, duration_ns = 0;
};
static_assert(sizeof(Span) == 40);

struct KernelTime {
    std::uint32_t rank = 0;
    KernelName kernel = KernelName::comm;
    double start_ns = 0, end_ns = 0;
};

struct Replay {
    double total_ns = 0;  // launch of the call to the end of its last kernel on any rank
    std::vector<KernelTime> kernels;
    std::vector<Span> spans;  // only where asked for
};

// The error of a wait that nobody satisfies, or of blobs that are not the traces of one call.
class ReplayError : public std::runtime_error {
  public:
    using std::runtime_error::runtime_error;
};

Replay replay(const std::vector<std::string>& traces, const Machine& machine, View view,
              bool keep_spans);

}  // namespace mkernel::ascend::sim
