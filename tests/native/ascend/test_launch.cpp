// Whole calls of AllGather+GEMM, several ranks in this process, against float64. Meant to run under
// ThreadSanitizer too: ranks, cores and epochs meet only through signals.
#include <cmath>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "backends/accelerators/ascend/host/launch.hpp"
#include "tests/native/ascend/check.hpp"

using namespace mkernel;
using namespace mkernel::ascend;

namespace {

// Zeroed, page-aligned memory.
struct Pages {
    explicit Pages(std::size_t bytes)
        : memory(static_cast<std::byte*>(
                     std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096 + 4096)),
                 &std::free) {
        std::memset(memory.get(), 0, bytes);
    }
    std::unique_ptr<std::byte, decltype(&std::free)> memory;
};

class World {
  public:
    static constexpr std::uint32_t kSignals = 4096;

    explicit World(const ag_gemm::Geometry& geometry) : g_(geometry) {
        for (std::uint32_t r = 0; r < g_.world; ++r) {
            pads_.emplace_back(runtime::SignalPad::bytes(kSignals));
            runtime::SignalPad::format(pads_[r].memory.get(), kSignals);
            workspaces_.emplace_back(g_.workspace_bytes());
            a_.emplace_back(g_.m_local * g_.k);
            b_.emplace_back(g_.k * g_.n);
            out_.emplace_back(g_.world * g_.m_local * g_.n);
        }
    }

    std::shared_ptr<host::Launch> start(std::uint32_t rank, std::uint64_t epoch, host::View view) {
        host::Call call;
        call.args.geometry = g_;
        call.args.rank = rank;
        call.args.epoch = epoch;
        call.args.a = {bytes(a_[rank]), isa::DType::float32, g_.m_local, g_.k, g_.k, 1};
        call.args.b = {bytes(b_[rank]), isa::DType::float32, g_.k, g_.n, g_.n, 1};
        call.args.out = {
            bytes(out_[rank]), isa::DType::float32, g_.world * g_.m_local, g_.n, g_.n, 1};
        call.args.pad = pads_[rank].memory.get();
        call.args.workspace = workspaces_[rank].memory.get();
        for (std::uint32_t i = 0; i < g_.world; ++i) {
            call.peers.push_back({pads_[i].memory.get(), workspaces_[i].memory.get()});
            call.source_order.push_back((rank + i) % g_.world);
        }
        call.compute_blocks = 5;
        call.comm_blocks = 7;
        call.timeout_ns = 20'000'000'000;
        call.view = view;
        call.trace = epoch % 2 == 0;
        return host::Launch::start(std::move(call));
    }

    void call(std::uint64_t epoch, host::View view) {
        std::mt19937 random(static_cast<unsigned>(epoch));
        std::uniform_real_distribution<float> uniform(-1, 1);
        for (std::uint32_t r = 0; r < g_.world; ++r) {
            for (float& x : a_[r]) x = uniform(random);
            for (float& x : b_[r]) x = uniform(random);
            for (float& x : out_[r]) x = NAN;
        }
        std::vector<std::shared_ptr<host::Launch>> launches;
        for (std::uint32_t r = 0; r < g_.world; ++r) launches.push_back(start(r, epoch, view));
        for (auto& launch : launches) CHECK(launch->wait(30'000'000'000));
        for (std::uint32_t r = 0; r < g_.world; ++r) CHECK(error(r) < 1e-5);
    }

    void leave_one_out() {
        std::vector<std::shared_ptr<host::Launch>> launches;
        for (std::uint32_t r = 1; r < g_.world; ++r) {
            launches.push_back(start(r, 1, host::View::pipelined));
        }
        CHECK(!launches[0]->wait(20'000'000));
        host::Launch::cancel_all();
        for (auto& launch : launches) CHECK(launch->wait(5'000'000'000));
    }

  private:
    static std::byte* bytes(std::vector<float>& values) {
        return reinterpret_cast<std::byte*>(values.data());
    }

    double error(std::uint32_t rank) const {
        double off = 0, all = 0;
        for (std::uint32_t row = 0; row < g_.world * g_.m_local; ++row) {
            const float* a = a_[row / g_.m_local].data() + (row % g_.m_local) * g_.k;
            for (std::uint32_t col = 0; col < g_.n; ++col) {
                double want = 0;
                for (std::uint32_t p = 0; p < g_.k; ++p) {
                    want += static_cast<double>(a[p]) * b_[rank][p * g_.n + col];
                }
                const double got = out_[rank][row * g_.n + col];
                off += (got - want) * (got - want);
                all += want * want;
            }
        }
        return std::sqrt(off / all);
    }

    ag_gemm::Geometry g_;
    std::vector<Pages> pads_, workspaces_;
    std::vector<std::vector<float>> a_, b_, out_;
};

constexpr ag_gemm::Geometry geometry(std::uint32_t world) {
    return {.world = world,
            .m_local = 71,
            .n = 100,
            .k = 200,
            .tile_m = 32,
            .tile_n = 64,
            .tile_k = 64,
            .step_k = 32,
            .tiles_per_chunk = 3,
            .dtype = isa::DType::float32};
}

void geometry_covers_a_slot_once() {
    for (std::uint32_t tiles_per_chunk = 1; tiles_per_chunk < 15; ++tiles_per_chunk) {
        ag_gemm::Geometry g = geometry(3);
        g.tiles_per_chunk = tiles_per_chunk;
        std::uint64_t at = 0;
        for (std::uint32_t chunk = 0; chunk < g.chunks(); ++chunk) {
            const ag_gemm::Range range = g.chunk_range(chunk);
            CHECK(range.offset == at && range.bytes > 0);
            at += range.bytes;
        }
        CHECK(at == 71 * 200 * 4);
        CHECK(g.slot_bytes() >= at && g.slot_bytes() % ag_gemm::kSlotAlignment == 0);
        CHECK(g.signals() == 2 * 3 * g.chunks() + 2 * 3 + 3 + 1);
    }
}

}  // namespace

int main() {
    geometry_covers_a_slot_once();
    sim::Scheduler::process().set_slots(3);
    for (const std::uint32_t ranks : {1u, 2u, 4u}) {
        World world(geometry(ranks));
        for (std::uint64_t epoch = 1; epoch <= 6; ++epoch) {
            world.call(epoch, epoch == 3 ? host::View::sequential : host::View::pipelined);
        }
    }
    World(geometry(3)).leave_one_out();
    sim::Scheduler::shutdown_process();
    return test::finish();
}
