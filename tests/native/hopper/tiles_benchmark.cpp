// How long a reduction between two nodes takes on the software device, and into how many copies of a device its
// tiles join: the puts of GEMM+ReduceScatter or GEMM+AllReduce of 8192 x 8192 x 7168, in the order and at the
// times at which clusters of two H100 make them, through the real proxies and engines, by a mover that moves
// nothing and takes the time that a GPU's copies take. Everything is slowed down, so that two cores suffice, and with
// it what proxies and engines themselves take goes to nothing: where there are five cores, 1 shows it.
// Not a test. Usage: tiles_benchmark LIBRARY cx7|efa rs|ar computed|rows [slower]
// computed, rows: in which order an owner's tiles are numbered. MKERNEL_SOFTVERBS_HOLD_NS is slowed down too.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <random>
#include <string>
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

// Copies to a peer that a host queues one after another.
constexpr double kCopyNs = 2200;
constexpr double kSubmitNs = 6000;
constexpr double kBytesPerNs = 370;

constexpr std::uint64_t kTileBytes = 64 << 10;
constexpr hopper::Raster kRaster{16, 32, 8};
constexpr int kClusters = 65;
constexpr int kBlocks = 2;  // of a cluster
constexpr double kTileNs = 79'000;
constexpr int kTiles = 2 * kRaster.cluster_rows * kRaster.columns;  // of clusters, of both owners
constexpr std::uint32_t kOwned = kBlocks * kTiles / 2;
constexpr std::uint32_t kSignals = 2 * kOwned;

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
            const std::lock_guard lock(of(self).mutex_);
            list().add({to, from, 0, bytes});
            return 0;
        };
        table_.submit = [](void* self, std::uint64_t* ticket) { return of(self).submit(*ticket); };
        table_.done = [](void* self, std::uint64_t ticket) {
            const std::lock_guard lock(of(self).mutex_);
            return static_cast<double>(monotonic_ns()) >= of(self).ends_[ticket - 1] ? 1 : 0;
        };
    }
    static TimedMover& of(void* self) { return *static_cast<TimedMover*>(self); }
    // Each receiver, that is each engine's thread, has copy engines of its own.
    static cuda::CopyList& list() {
        static thread_local cuda::CopyList list;
        return list;
    }
    int submit(std::uint64_t& ticket) {
        static thread_local double busy_until = 0;
        const std::lock_guard lock(mutex_);
        double takes = 0;
        for (const cuda::QueuedCopy& each : list().join()) {
            takes += kCopyNs + static_cast<double>(each.bytes) / kBytesPerNs;
            ++copies;
            bytes += each.bytes;
        }
        list().clear();
        ++batches;
        const auto now = static_cast<double>(monotonic_ns());
        busy_until = std::max(busy_until, now + kSubmitNs * slower) + takes * slower;
        ends_.push_back(busy_until);
        ticket = ends_.size();
        return 0;
    }

    transport::Mover table_;
    std::mutex mutex_;
    std::vector<double> ends_;
};

// What a cluster does at one place of its order.
struct Tile {
    bool own;
    int number;  // of its first block
    int next;    // between the numbers of its blocks
};

std::vector<Tile> tiles_of(bool all_reduce, bool computed) {
    const int rows = all_reduce ? 8 : kRaster.cluster_rows;  // as the plan cuts panels
    const int columns = all_reduce ? 8 : kRaster.columns;
    hopper::OwnerOrder order(kRaster, rows, columns, 2, 0, 2 * kRaster.cluster_rows);
    std::vector<Tile> tiles;
    for (int index = 0; index < kTiles; ++index) {
        int step = 0;
        int row = 0;
        int column = 0;
        int place = 0;
        order.at(index, step, row, column, place);
        tiles.push_back(
            computed ? Tile{step == 0, place * kBlocks, 1}
                     : Tile{step == 0, row * kBlocks * kRaster.columns + column, kRaster.columns});
    }
    return tiles;
}

class Rank {
  public:
    Rank(const std::string& library, std::uint32_t peer, const testing::Setup& setup)
        : peer_(peer),
          memory_(::mmap(nullptr, kBytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)),
          pad_memory_(transport::SignalPad::bytes(kSignals)),
          pad_(transport::SignalPad::format(pad_memory_.data(), kSignals)),
          session_(setup.nic(library), setup.slots),
          endpoints_(session_.nic().add_peer(peer, setup.rails())),
          random_(peer) {
        const int dmabuf = ::dup(0);
        key_ = session_.nic().register_memory(
            0, {reinterpret_cast<std::uint64_t>(memory_), kBytes, true, dmabuf, 0, nullptr});
        ::close(dmabuf);
        for (int i = 0; i < kClusters; ++i) {  // they are not in step
            clusters_.push_back({i, 0.1 * chance() * kTileNs});
            clusters_.back().ends += time();
        }
    }
    ~Rank() { session_.close(); }
    void join(const Rank& other) {
        session_.nic().connect(peer_, other.endpoints_);
        session_.nic().bind(0, peer_, other.key_);
        session_.start(reinterpret_cast<std::uint64_t>(pad_memory_.data()), {});
    }
    // Goes on to `now`, in ns of the GPU. False: all is done.
    bool run(const std::vector<Tile>& tiles, bool all_reduce, double now) {
        bool more = false;
        for (Cluster& each : clusters_) {
            while (each.index < kTiles && each.ends <= now) {
                const Tile& tile = tiles[each.index];
                if (tile.own && !(come(tile.number) && come(tile.number + tile.next))) {
                    each.ends = now;
                    break;
                }
                for (int block = 0; block < kBlocks; ++block) {
                    const auto number = static_cast<std::uint32_t>(tile.number + block * tile.next);
                    if (!tile.own) put(number, 0);
                    if (tile.own && all_reduce) put(number, kOwned);
                }
                last_ = std::max(last_, each.ends);
                each.index += kClusters;
                each.ends += time();
            }
            more = more || each.index < kTiles;
        }
        if (more) return true;
        for (std::uint32_t i = 0; all_reduce && i < kOwned; ++i) {
            if (pad_.load(kOwned + i) == 0) return true;
        }
        last_ = all_reduce ? std::max(last_, now) : last_;
        return false;
    }
    [[nodiscard]] double last() const { return last_; }

  private:
    static constexpr std::size_t kBytes = std::size_t{1} << 30;
    struct Cluster {
        int index;
        double ends;
    };
    [[nodiscard]] bool come(int number) const {
        return pad_.load(static_cast<std::uint32_t>(number)) != 0;
    }
    void put(std::uint32_t number, std::uint32_t first) {
        transport::PutCommand c;
        c.local_offset = c.remote_offset = (first + number) * kTileBytes;
        c.bytes = kTileBytes;
        c.peer = peer_;
        c.signal = first + number;
        c.value = 1;
        session_.put(c, 60);
    }
    double chance() { return static_cast<double>(random_() % 1000) / 1000; }
    double time() { return kTileNs * (1 + 0.03 * chance()); }

    std::uint32_t peer_;
    void* memory_;
    testing::Memory pad_memory_;
    transport::SignalPad pad_;
    Session session_;
    std::vector<Endpoint> endpoints_;
    RemoteKey key_;
    std::mt19937_64 random_;
    std::vector<Cluster> clusters_;
    double last_ = 0;
};

}  // namespace

int main(int argc, char** argv) {
    if (argc < 5) {
        return std::fprintf(stderr, "usage: LIBRARY cx7|efa rs|ar computed|rows [slower]\n"), 2;
    }
    const std::string library = argv[1];
    const bool all_reduce = std::string(argv[3]) == "ar";
    const auto tiles = tiles_of(all_reduce, std::string(argv[4]) == "computed");
    if (argc > 5) slower = std::atof(argv[5]);
    const auto slowed = [](double ns) { return std::to_string(static_cast<long>(ns * slower)); };
    const char* hold = std::getenv("MKERNEL_SOFTVERBS_HOLD_NS");
    const std::array settings{
        testing::Setting("MKERNEL_SOFTVERBS_BANDWIDTH_MBPS",
                         std::to_string(static_cast<long>(400'000 / slower))),
        testing::Setting("MKERNEL_SOFTVERBS_LATENCY_NS", slowed(3000)),
        testing::Setting("MKERNEL_SOFTVERBS_HOLD_NS", slowed(hold ? std::atof(hold) : 40'000))};
    testing::Setup setup;
    setup.srd = std::string(argv[2]) == "efa";
    TimedMover::set(library);
    Rank one(library, 1, setup);
    Rank other(library, 0, setup);
    one.join(other);
    other.join(one);

    const std::uint64_t start = monotonic_ns();
    for (bool going = true; going;) {
        const double now = static_cast<double>(monotonic_ns() - start) / slower;
        going = one.run(tiles, all_reduce, now);
        going = other.run(tiles, all_reduce, now) || going;
        ::usleep(static_cast<useconds_t>(slower / 5));
    }
    const auto& mover = TimedMover::get();
    std::printf("%s %s %s: %llu copies in %llu batches, %.0f KiB each; %.0f us\n", argv[2], argv[3],
                argv[4], static_cast<unsigned long long>(mover.copies),
                static_cast<unsigned long long>(mover.batches),
                static_cast<double>(mover.bytes) / 1024 / static_cast<double>(mover.copies),
                std::max(one.last(), other.last()) / 1e3);
    return 0;
}
