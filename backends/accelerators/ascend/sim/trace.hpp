// The records of a traced core, and the form in which a rank passes them on.
//
// A trace is the *schedule*: instructions in issue order with their sizes, flags and signals,
// without any time in it. The timed model (replay.hpp) adds the times of a machine description. It
// does not depend on how the host interleaved the cores.
//
// Blob of one rank, little-endian as the host writes it, read only on the same kind of host:
//   TraceHeader, then per core: TraceCore, `records` x Record. Signals count what this call adds: a wait
//   is for so much of it, whatever was added before.
#pragma once

#include <cstdint>
#include <iterator>
#include <string>

#include "backends/accelerators/ascend/isa/pipe.hpp"

namespace mkernel::ascend::sim {

enum class Kind : std::uint8_t {
    tload = 0,
    tstore = 1,
    textract = 2,
    tmatmul = 3,
    tmatmul_acc = 4,
    tput = 5,
    tnotify = 6,
    twait = 7,
    nic_put = 8,
    set_flag = 9,
    wait_flag = 10,
    fence = 11,  // of one pipe, or (pipe S) of all
    tadd = 12,
    tcvt = 13,
    tsub = 14,
    tmul = 15,
    tmax = 16,
    tmuls = 17,
    texp = 18,
    tlog = 19,
    tfill = 20,
    ttril = 21,
    trowmax = 22,
    trowsum = 23,
    trowexpandsub = 24,
    trowexpandmul = 25,
    trowexpanddiv = 26,
    scalar = 27,  // loads and stores of S, one record for all that follow one another
    tget = 28,
};
inline constexpr int kKinds = 29;

constexpr const char* name_of(Kind kind) {
    constexpr const char* kNames[] = {
        "TLOAD",         "TSTORE",        "TEXTRACT",      "TMATMUL",  "TMATMUL_ACC", "TPUT",
        "TNOTIFY",       "TWAIT",         "NIC_PUT",       "SET_FLAG", "WAIT_FLAG",   "FENCE",
        "TADD",          "TCVT",          "TSUB",          "TMUL",     "TMAX",        "TMULS",
        "TEXP",          "TLOG",          "TFILL",         "TTRIL",    "TROWMAX",     "TROWSUM",
        "TROWEXPANDSUB", "TROWEXPANDMUL", "TROWEXPANDDIV", "SCALAR",   "TGET"};
    static_assert(std::size(kNames) == kKinds);
    return kNames[static_cast<int>(kind)];
}

inline constexpr std::uint32_t kNoChunk = 0xffffffff;

struct Record {
    Kind kind = Kind::fence;
    isa::Pipe pipe = isa::Pipe::S;   // executes it; for flags the source pipe
    isa::Pipe other = isa::Pipe::S;  // flags: the waiting pipe
    std::uint8_t event = 0;
    std::uint32_t chunk = kNoChunk;
    // For signals, their number. For a load or put from memory that nobody writes during the call (an input),
    // the number of its piece, so that the first access can be told from later ones; otherwise 0.
    std::uint32_t signal = 0;
    std::uint32_t peer = 0;    // rank written to, notified or waited for; own rank: local
    std::uint64_t amount = 0;  // bytes; multiply-adds (padded to 16) of a matmul; value of a signal
    std::uint32_t value = 0;   // nic_put: what is added to the signal; scalar: bytes stored
    std::uint32_t width = 0;   // textract: bytes a source element; matmul: the same
};
static_assert(sizeof(Record) == 32);

struct TraceHeader {
    static constexpr std::uint32_t kMagic = 0x32546b6d;  // "mkT2"
    std::uint32_t magic = kMagic;
    std::uint32_t rank = 0;
    std::uint32_t world = 0;
    std::uint32_t node = 0;
    std::uint32_t cores = 0;
    std::uint32_t compute_first = 0;  // sequential view: communication comes second
};

// The way in which a call runs: both kernels at once, one after the other, or compute alone.
enum class View : std::uint32_t { pipelined = 0, sequential = 1, compute_only = 2 };

enum class KernelName : std::uint8_t { comm = 0, compute = 1 };
inline constexpr int kKernels = 2;

constexpr const char* name_of(KernelName kernel) {
    return kernel == KernelName::comm ? "comm" : "compute";
}

// The role of a core: the cube part of the compute kernel, the comm kernel, or the vector part of the compute
// kernel.
enum class Role : std::uint32_t { cube = 0, comm = 1, vector = 2 };
inline constexpr int kRoles = 3;

constexpr const char* name_of(Role role) {
    return role == Role::cube ? "AIC" : "AIV";
}

// Returns the name of a core of a rank in messages.
inline std::string core_name(Role role, std::uint32_t index) {
    return std::string(name_of(role)) + " core " + std::to_string(index) +
           (role == Role::vector ? " of the compute kernel" : "");
}

constexpr KernelName kernel_of(Role role) {
    return role == Role::comm ? KernelName::comm : KernelName::compute;
}

struct TraceCore {
    Role role = Role::cube;
    std::uint32_t index = 0;  // among the cores of its kind, vector cores of both kernels together
    std::uint64_t records = 0;
};

}  // namespace mkernel::ascend::sim
