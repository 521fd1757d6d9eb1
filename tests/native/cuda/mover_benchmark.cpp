// How fast puts of device memory are on the software device, between two processes. Not a test: run it by
// hand or from bench/. Usage: mover_benchmark LIBRARY cx7|efa DEVICE DEVICE [megabytes a size]
//
// Prints one JSON object. For every size of put: GB/s of puts that follow each other in both memories, and
// of puts with gaps, which no copy can join, each the median of three turns; microseconds from a put alone
// until the peer has its signal and has answered with one, halved; copies a turn ended right.
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "backends/accelerators/cuda/device.hpp"
#include "backends/accelerators/cuda/error.hpp"
#include "backends/accelerators/cuda/memory.hpp"
#include "backends/accelerators/cuda/mover.hpp"
#include "backends/nics/verbs/loader.hpp"
#include "tests/native/nics/hello.hpp"
#include "tests/native/nics/pair.hpp"

using namespace mkernel;
using namespace mkernel::nics;
using mkernel::transport::monotonic_ns;

namespace {

constexpr std::size_t kBuffer = 256u << 20;
constexpr int kTurns = 3;
constexpr int kTrips = 200;
constexpr std::uint64_t kGap = 256;  // between puts that do not follow each other

using testing::Rank;

// Memory of a GPU.
class GpuRegion final : public testing::Region {
  public:
    explicit GpuRegion(int device)
        : device_(device), memory_(cuda::DeviceMemory::create(device, kBuffer)) {
        local_ = {memory_.address(),       kBuffer, true,
                  memory_.export_dmabuf(), 0,       cuda::device_flush(device)};
    }
    ~GpuRegion() override { ::close(local_.dmabuf); }
    void fill(std::uint32_t seed) {
        std::vector<std::uint32_t> words(kBuffer / 4);
        for (std::size_t i = 0; i < words.size(); ++i) {
            words[i] = (static_cast<std::uint32_t>(i) * 2654435761u) ^ seed;
        }
        const cuda::DeviceScope scope(device_);
        cuda::check(cudaMemcpy(reinterpret_cast<void*>(address()), words.data(), kBuffer,
                               cudaMemcpyHostToDevice),
                    "cudaMemcpy");
    }
    // Whether `bytes` from there on are what fill(seed) wrote at `source`.
    bool holds(std::uint32_t seed, std::uint64_t source, std::uint64_t at, std::size_t bytes) {
        std::vector<std::uint32_t> words(bytes / 4);
        const cuda::DeviceScope scope(device_);
        cuda::check(cudaMemcpy(words.data(), reinterpret_cast<void*>(address() + at), bytes,
                               cudaMemcpyDeviceToHost),
                    "cudaMemcpy");
        for (std::size_t i = 0; i < words.size(); ++i) {
            const auto wanted = (static_cast<std::uint32_t>(source / 4 + i) * 2654435761u) ^ seed;
            if (words[i] != wanted) return false;
        }
        return true;
    }

  private:
    int device_;
    cuda::DeviceMemory memory_;
};

void put(Rank& me, std::uint64_t bytes, std::uint64_t local, std::uint64_t remote,
         std::uint32_t signal) {
    if (me.put(bytes, signal, 1, local, remote) != transport::WaitResult::ok) {
        throw std::runtime_error("put");
    }
}
void await(Rank& me, std::uint32_t signal, std::uint64_t value) {
    if (me.wait(signal, value, 60)) return;
    const auto failure = me.session.failure();
    throw std::runtime_error(failure ? failure->message : "no signal in time");
}

// Before a device is opened, which then asks whether device memory is taken.
void set_mover(const std::string& library) {
    const verbs::Library opened(library);
    int (*set)(transport::Mover*) = opened.need("mkernel_softverbs_set_mover", nullptr, "");
    if (set(cuda::mover()) != 0) throw std::runtime_error("set_mover");
}

constexpr std::array<std::size_t, 7> kSizes{4 << 10, 16 << 10, 64 << 10, 256 << 10,
                                            1 << 20, 4 << 20,  16 << 20};

double median(std::vector<double> values) {
    std::sort(values.begin(), values.end());
    return values[values.size() / 2];
}

// Signals: 0 and 1 ping and pong, 2 the puts of turns, 3 what the child found right, 4 wrong.
double turn(Rank& me, std::size_t size, std::size_t stride, std::size_t total,
            std::uint64_t& sent) {
    const std::size_t slots = kBuffer / stride;
    const std::size_t puts = std::max<std::size_t>(4, std::min(total / size, std::size_t{20'000}));
    const std::uint64_t start = monotonic_ns();
    for (std::size_t i = 0; i < puts; ++i) {
        const std::uint64_t at = i % slots * stride;
        put(me, size, at, at, 2);
    }
    if (!me.session.flush(60)) throw std::runtime_error("flush");
    const double gbps =
        static_cast<double>(puts * size) / static_cast<double>(monotonic_ns() - start);
    sent += puts;
    return gbps;
}

}  // namespace

int main(int argc, char** argv) {
    if (argc < 5) {
        return std::fprintf(stderr, "usage: mover_benchmark LIBRARY cx7|efa DEVICE DEVICE [MB]\n"),
               2;
    }
    const std::string library = argv[1];
    const bool srd = std::string(argv[2]) == "efa";
    const std::size_t total = (argc > 5 ? std::strtoull(argv[5], nullptr, 10) : 1024) << 20;
    int to_child[2];
    int to_parent[2];
    if (::pipe(to_child) != 0 || ::pipe(to_parent) != 0) return 1;
    const pid_t child = ::fork();  // before CUDA
    const std::uint32_t rank = child == 0 ? 1 : 0;
    const int out = child == 0 ? to_parent[1] : to_child[1];
    const int in = child == 0 ? to_child[0] : to_parent[0];
    try {
        set_mover(library);
        auto made = std::make_unique<GpuRegion>(std::atoi(argv[3 + rank]));
        GpuRegion& memory = *made;
        testing::Setup setup;
        setup.srd = srd;
        Rank me(library, 1 - rank, std::move(made), setup);
        memory.fill(rank == 0 ? 7 : 9);
        testing::say(out, me.endpoints[0], me.key);
        const testing::Hello peer = testing::hear(in);
        me.join({peer.endpoint}, peer.key);
        char ready = 1;  // both are connected
        if (::write(out, &ready, 1) != 1 || ::read(in, &ready, 1) != 1) return 1;
        if (child == 0) {
            std::uint64_t asked = 0;
            for (int i = 1; i <= kTrips; ++i) {
                await(me, 0, static_cast<std::uint64_t>(i));
                put(me, 8, 0, kBuffer - 64, 1);
            }
            for (const std::size_t size : kSizes) {
                await(me, 3, ++asked);
                const bool right = memory.holds(7, 0, 0, size) && memory.holds(7, size, size, size);
                memory.fill(9);
                put(me, 0, 0, 0, right ? 3 : 4);
            }
            await(me, 5, 1);
            me.session.close();
            return 0;
        }
        std::vector<double> trips;
        for (int i = 1; i <= kTrips; ++i) {
            const std::uint64_t start = monotonic_ns();
            put(me, 8, 0, 0, 0);
            await(me, 1, static_cast<std::uint64_t>(i));
            trips.push_back(static_cast<double>(monotonic_ns() - start) / 2e3);
        }
        std::printf("{\"half_round_trip_us\": %.2f, \"puts\": [", median(trips));
        std::uint64_t sent = 0;
        std::uint64_t checked = 0;
        for (const std::size_t size : kSizes) {
            std::vector<double> joined;
            std::vector<double> apart;
            for (int i = -1; i < kTurns; ++i) {  // turn -1 warms up
                const double one = turn(me, size, size, total, sent);
                const double other = turn(me, size, size + kGap, total, sent);
                if (i < 0) continue;
                joined.push_back(one);
                apart.push_back(other);
            }
            put(me, size, 0, 0, 2);
            put(me, size, size, size, 2);
            put(me, 0, 0, 0, 3);
            if (!me.session.flush(60)) throw std::runtime_error("flush");
            ++checked;
            const std::uint64_t deadline = monotonic_ns() + 60'000'000'000;
            while (me.pad.load(3) + me.pad.load(4) < checked) {
                if (monotonic_ns() > deadline) throw std::runtime_error("no answer");
            }
            std::printf("%s{\"nbytes\": %zu, \"gbs\": %.2f, \"apart_gbs\": %.2f}",
                        size == kSizes[0] ? "" : ", ", size, median(joined), median(apart));
        }
        std::printf("], \"right\": %s}\n", me.pad.load(4) == 0 ? "true" : "false");
        put(me, 0, 0, 0, 5);
        me.session.flush(10);
        me.session.close();
    } catch (const std::exception& error) {
        std::fprintf(stderr, "rank %u: %s\n", rank, error.what());
        return 1;
    }
    int status = 0;
    ::waitpid(child, &status, 0);
    return status == 0 ? 0 : 1;
}
