// Whole calls of the GEMM ops, several ranks in this process. Meant to run under ThreadSanitizer too:
// ranks, cores and epochs meet only through signals. The conformance kit judges their results.
#include <memory>
#include <vector>

#include "backends/accelerators/ascend/host/ops.hpp"
#include "tests/native/ascend/check.hpp"
#include "tests/native/ascend/whole_call.hpp"

using namespace mkernel;
using namespace mkernel::ascend;

namespace {

// An op's geometry and the rows of its tensors.
struct AllGather {
    using Args = ag_gemm::Args;
    ag_gemm::Geometry g;
    [[nodiscard]] std::uint32_t rows_of_a() const { return g.m_local; }
    [[nodiscard]] std::uint32_t rows_of_out() const { return g.world * g.m_local; }
};

struct Reduce {
    using Args = gemm_reduce::Args;
    gemm_reduce::Geometry g;
    [[nodiscard]] std::uint32_t rows_of_a() const { return g.m; }
    [[nodiscard]] std::uint32_t rows_of_out() const { return g.grid_rows(); }
};

template <class Op>
class World {
  public:
    explicit World(const Op& op) : op_(op), memory_(op.g.world, test::Sizes::of(op.g)) {
        for (std::uint32_t r = 0; r < op.g.world; ++r) {
            a_.emplace_back(op.rows_of_a() * op.g.k);
            b_.emplace_back(op.g.k * op.g.n);
            out_.emplace_back(op.rows_of_out() * op.g.n);
        }
    }

    host::Call prepared(std::uint32_t rank, std::uint64_t epoch, host::View view) {
        const auto& g = op_.g;
        host::Call call = test::call_of(memory_, rank, epoch, view);
        typename Op::Args args;
        args.geometry = g;
        args.a = {bytes(a_[rank]), g.dtype, op_.rows_of_a(), g.k, g.k, 1};
        args.b = {bytes(b_[rank]), g.dtype, g.k, g.n, g.n, 1};
        args.out = {bytes(out_[rank]), g.dtype, op_.rows_of_out(), g.n, g.n, 1};
        call.kernels = host::kernels_of(args, test::order_from(rank, g.world));
        call.blocks = {.comm = 7, .cube = 5};
        return call;
    }

    [[nodiscard]] const test::WorldMemory& memory() const { return memory_; }

  private:
    static std::byte* bytes(std::vector<float>& values) {
        return reinterpret_cast<std::byte*>(values.data());
    }

    Op op_;
    test::WorldMemory memory_;
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

constexpr gemm_reduce::Geometry reduce_geometry(std::uint32_t world, bool replicated,
                                                std::uint32_t segments = 0) {
    return {.world = world,
            .m = replicated ? 131 : 71 * world,
            .n = 100,
            .k = 72,
            .tile_m = 32,
            .tile_n = 64,
            .tile_k = 64,
            .step_k = 32,
            .tiles_per_chunk = 2,
            .replicated = replicated,
            .dtype = isa::DType::float32,
            .band = 2,
            .segments = segments};
}

void geometry_covers_a_slot_once() {
    for (std::uint32_t tiles_per_chunk = 1; tiles_per_chunk < 15; ++tiles_per_chunk) {
        ag_gemm::Geometry g = geometry(3);
        g.tiles_per_chunk = tiles_per_chunk;
        std::uint64_t at = 0;
        for (std::uint32_t chunk = 0; chunk < g.chunks(); ++chunk) {
            const Range range = g.chunk_range(chunk);
            CHECK(range.offset == at && range.bytes > 0);
            at += range.bytes;
        }
        CHECK(at == 71 * 200 * 4);
        CHECK(g.slot_bytes() >= at && g.slot_bytes() % kSlotAlignment == 0);
        CHECK(g.words() == kMaxWorld + 3 * (3 * g.chunks()));
    }
}

// Every tile has one owner and one chunk, and an owner's tiles lie one after another in its slot.
void reduce_geometry_covers_every_tile_once(bool replicated) {
    for (const std::uint32_t world : {1u, 3u, 8u}) {
        gemm_reduce::Geometry g = reduce_geometry(world, replicated);
        for (g.tiles_per_chunk = 1; g.tiles_per_chunk < 6; ++g.tiles_per_chunk) {
            std::uint64_t elements = 0;
            for (std::uint32_t owner = 0; owner < world; ++owner) {
                std::uint32_t next = g.first(owner);
                std::uint64_t at = 0;
                for (std::uint32_t chunk = 0; chunk < g.chunks(); ++chunk) {
                    CHECK(g.chunk_begin(owner, chunk) == next);
                    CHECK(g.chunk_range(owner, chunk).offset == at);
                    at += g.chunk_range(owner, chunk).bytes;
                    next = g.chunk_end(owner, chunk);
                }
                CHECK(next == g.end(owner) && at <= g.slot_bytes());
                elements += at / sizeof(float);
            }
            CHECK(elements == std::uint64_t{g.m} * g.n);
        }
    }
}

template <class Op>
void every_wait_is_needed(const char* name, const Op& op) {
    test::every_wait_is_needed(
        name, [&] { return std::make_unique<World<Op>>(op); },
        [&](const auto& records, std::size_t at) {
            return records[at].signal < kMaxWorld || records[at].signal == word_of(op.g.finished());
        });
}

}  // namespace

int main() {
    geometry_covers_a_slot_once();
    sim::Scheduler::process().set_slots(3);
    for (const bool replicated : {false, true}) reduce_geometry_covers_every_tile_once(replicated);
    for (const std::uint32_t ranks : {1u, 2u, 4u}) {
        test::all_views(World<AllGather>({geometry(ranks)}));
        for (const bool replicated : {false, true}) {
            test::all_views(World<Reduce>({reduce_geometry(ranks, replicated)}));
            test::all_views(World<Reduce>({reduce_geometry(ranks, replicated, 4)}));
        }
    }
    every_wait_is_needed("AllGather", AllGather{geometry(3)});
    for (const bool replicated : {false, true}) {
        every_wait_is_needed("Reduce", Reduce{reduce_geometry(3, replicated)});
        every_wait_is_needed("Reduce", Reduce{reduce_geometry(2, replicated, 8)});
    }
    test::run_all_but_one(World<AllGather>({geometry(3)}));
    for (const bool replicated : {false, true}) {
        test::run_all_but_one(World<Reduce>({reduce_geometry(3, replicated)}));
    }
    sim::Scheduler::shutdown_process();
    return test::finish();
}
