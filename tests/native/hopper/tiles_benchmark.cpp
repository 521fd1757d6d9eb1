// How long tiles take between two nodes on the software device, and into how many copies of a device they
// join: puts as GEMM+ReduceScatter makes them, through the real proxies and engines, by a mover that moves
// nothing and takes the time that copies of a GPU take. Everything is slowed down, so that two cores suffice.
// Not a test. Usage: tiles_benchmark LIBRARY cx7|efa rows|computed [slower]
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "backends/accelerators/hopper/tile/raster.cuh"
#include "backends/cuda/copy_list.hpp"
#include "pair.hpp"
#include "setting.hpp"

using namespace mkernel;
using namespace mkernel::nics;
using mkernel::transport::monotonic_ns;

namespace {

double slower = 1000;

// facts of copies to a peer that a host queues one after another
constexpr double kCopyNs = 2200;
constexpr double kSubmitNs = 6000;
constexpr double kBytesPerNs = 370;

class TimedMover {
  public:
    static TimedMover& get() {
        static TimedMover mover;
        return mover;
    }
    static void set(const std::string& library) {
        const verbs::Library opened(library);
        int (*tell)(transport::Mover*) = opened.need("mkernel_softverbs_set_mover", nullptr, "");
        if (tell(&get().table_) != 0) throw std::runtime_error("set_mover");
    }
    std::uint64_t copies = 0, batches = 0, bytes = 0;

  private:
    TimedMover() {
        table_.self = this;
        table_.owns = [](void*, std::uint64_t, std::uint64_t) { return 1; };
        table_.export_memory = [](void*, std::uint64_t address, std::uint64_t bytes,
                                  transport::ExportedMemory* exported, int* fd) {
            exported->bytes = bytes;
            exported->offset = address;  // attached where it is
            *fd = ::memfd_create("nothing", MFD_CLOEXEC);
            return 0;
        };
        table_.attach = [](void*, const transport::ExportedMemory* exported, int,
                           std::uint64_t* address) {
            *address = exported->offset;
            return 0;
        };
        table_.detach = [](void*, std::uint64_t) {};
        table_.copy = [](void* self, std::uint64_t to, std::uint64_t from, std::uint64_t bytes) {
            auto& me = of(self);
            const std::lock_guard lock(me.mutex_);
            me.list_.add({to, from, 0, bytes});
            return 0;
        };
        table_.submit = [](void* self, std::uint64_t* ticket) {
            auto& me = of(self);
            const std::lock_guard lock(me.mutex_);
            double takes = 0;
            for (const cuda::QueuedCopy& each : me.list_.join()) {
                takes += kCopyNs + static_cast<double>(each.bytes) / kBytesPerNs;
                ++me.copies;
                me.bytes += each.bytes;
            }
            me.list_.clear();
            ++me.batches;
            const auto now = static_cast<double>(monotonic_ns());
            me.busy_until_ = std::max(me.busy_until_, now + kSubmitNs * slower) + takes * slower;
            me.ends_.push_back(me.busy_until_);
            *ticket = me.ends_.size();
            return 0;
        };
        table_.done = [](void* self, std::uint64_t ticket) {
            auto& me = of(self);
            const std::lock_guard lock(me.mutex_);
            return static_cast<double>(monotonic_ns()) >= me.ends_[ticket - 1] ? 1 : 0;
        };
    }
    static TimedMover& of(void* self) { return *static_cast<TimedMover*>(self); }

    transport::Mover table_;
    std::mutex mutex_;
    cuda::CopyList list_;
    double busy_until_ = 0;
    std::vector<double> ends_;
};

struct Rank {
    Rank(const std::string& library, std::uint32_t peer, std::size_t bytes,
         const testing::Setup& setup)
        : memory(::mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)),
          pad_memory(transport::SignalPad::bytes(4096)),
          pad(transport::SignalPad::format(pad_memory.data(), 4096)),
          session(setup.nic(library), setup.slots),
          endpoints(session.nic().add_peer(peer, setup.rails())) {
        const int dmabuf = ::dup(0);
        key = session.nic().register_memory(
            0, {reinterpret_cast<std::uint64_t>(memory), bytes, true, dmabuf, 0, nullptr});
        ::close(dmabuf);
    }
    void join(std::uint32_t peer, const Rank& other) {
        session.nic().connect(peer, other.endpoints);
        session.nic().bind(0, peer, other.key);
        session.start(reinterpret_cast<std::uint64_t>(pad_memory.data()), {});
    }
    void* memory;
    testing::Memory pad_memory;
    transport::SignalPad pad;
    Session session;
    std::vector<Endpoint> endpoints;
    RemoteKey key;
};

}  // namespace

int main(int argc, char** argv) {
    if (argc < 4) return std::fprintf(stderr, "usage: see above\n"), 2;
    const std::string library = argv[1];
    const bool srd = std::string(argv[2]) == "efa";
    const bool computed = std::string(argv[3]) == "computed";
    if (argc > 4) slower = std::atof(argv[4]);
    const auto slowed = [](double ns) { return std::to_string(static_cast<long>(ns * slower)); };
    const testing::Setting rate("MKERNEL_SOFTVERBS_BANDWIDTH_MBPS",
                                std::to_string(static_cast<long>(400000 / slower)));
    const testing::Setting late("MKERNEL_SOFTVERBS_LATENCY_NS", slowed(3000));
    const char* hold_us = std::getenv("HOLD_US");
    const testing::Setting hold("MKERNEL_SOFTVERBS_HOLD_NS",
                                slowed(1e3 * (hold_us ? std::atof(hold_us) : 40)));
    const testing::Setting patience("MKERNEL_SOFTVERBS_SRD_TIMEOUT_MS", "60000");

    // 8192 x 8192 x 7168 on two H100: see bench/results/hopper_nodes_2_h100_cx7.json.
    constexpr int kTile = 64 << 10;
    const hopper::Raster raster{16, 32, 8};
    const int panel_rows = 16;
    const int panel_columns = 32;
    constexpr int kClusters = 65;
    constexpr double kTileNs = 79'000;
    const int tiles = 2 * raster.tiles();

    testing::Setup setup;
    setup.srd = srd;
    if (const char* depth = std::getenv("DEPTH")) setup.options.queue_depth = std::atoi(depth);
    TimedMover::set(library);
    Rank one(library, 1, std::size_t{1} << 30, setup);
    Rank other(library, 0, std::size_t{1} << 30, setup);
    one.join(1, other);
    other.join(0, one);

    struct Finished {
        double at;
        int number;
    };
    std::vector<Finished> puts;
    std::vector<int> numbers;  // by the owner's order
    std::mt19937_64 random(1);
    std::vector<double> phase(kClusters);
    for (double& each : phase) each = 0.1 * static_cast<double>(random() % 1000) / 1000;
    hopper::OwnerOrder order(raster, panel_rows, panel_columns, 2);
    struct Own {
        int index, number;
    };
    std::vector<Own> own;
    for (int index = 0; index < tiles; ++index) {
        int step = 0, row = 0, column = 0, place = 0;
        order.at(index, step, row, column, place);
        for (int block = 0; block < 2; ++block) {
            const int number =
                computed ? place * 2 + block : (row * 2 + block) * raster.columns + column;
            if (step == 0) {
                own.push_back({index, number});
                continue;
            }
            const double jitter = 0.03 * static_cast<double>(random() % 1000) / 1000;
            const double wave = index / kClusters + 1 + phase[index % kClusters] + jitter;
            puts.push_back({wave * kTileNs, number});
        }
    }
    std::ranges::sort(puts, {}, &Finished::at);

    std::vector<double> come(puts.size());
    const std::uint64_t start = monotonic_ns() + 200'000'000;
    std::thread sender([&] {
        for (const Finished& each : puts) {
            while (static_cast<double>(monotonic_ns() - start) < each.at * slower ||
                   monotonic_ns() < start) {
                ::usleep(100);
            }
            transport::PutCommand c;
            c.local_offset = c.remote_offset = static_cast<std::uint64_t>(each.number) * kTile;
            c.bytes = kTile;
            c.peer = 1;
            c.signal = static_cast<std::uint32_t>(each.number);
            c.value = 1;
            one.session.put(c, 60);
        }
    });
    std::size_t seen = 0;
    while (seen < come.size()) {
        const double now = static_cast<double>(monotonic_ns() - start) / slower;
        for (std::size_t i = 0; i < come.size(); ++i) {
            if (come[i] != 0 || other.pad.load(static_cast<std::uint32_t>(i)) == 0) continue;
            come[i] = now;
            ++seen;
        }
        ::usleep(200);
    }
    sender.join();
    // The owner's tiles: each ends when it is computed and its part is there.
    std::vector<double> free(kClusters);
    double end = 0;
    for (const Own& each : own) {
        double& at = free[each.index % kClusters];
        if (each.number % 2 == 0 || !computed) {
            at = std::max(at, (each.index / kClusters + 1) * kTileNs);
        }
        at = std::max(at, come[each.number]);
        end = std::max(end, at);
    }
    const auto& mover = TimedMover::get();
    std::printf(
        "%s %s: %zu puts, %lu copies in %lu batches, %.0f KiB each, %.1f MB; last arrival %.0f us, "
        "call %.0f us\n",
        argv[2], argv[3], puts.size(), mover.copies, mover.batches,
        static_cast<double>(mover.bytes) / 1024 / static_cast<double>(mover.copies),
        static_cast<double>(mover.bytes) / 1e6, *std::ranges::max_element(come) / 1e3, end / 1e3);
    one.session.close();
    other.session.close();
    return 0;
}
