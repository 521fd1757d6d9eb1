// Ring attention: its steps see every key that it must, once; whole calls of several ranks in this
// process, meant to run under ThreadSanitizer too, whose results the conformance kit judges; every flag
// and fence of the kernels taken away in turn.
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "backends/accelerators/ascend/host/ops.hpp"
#include "backends/accelerators/ascend/kernels/ring_attention/comm.hpp"
#include "backends/accelerators/ascend/kernels/ring_attention/cube.hpp"
#include "backends/accelerators/ascend/kernels/ring_attention/vector.hpp"
#include "tests/native/ascend/check.hpp"
#include "tests/native/ascend/mutation.hpp"
#include "tests/native/ascend/whole_call.hpp"

using namespace mkernel;
using namespace mkernel::ascend;
using isa::DType;
using isa::GlobalView;
using ring_attention::Args;
using ring_attention::Geometry;
using sim::Role;

namespace {

// --- the steps ----------------------------------------------------------------------------------

// Position in the sequence of a rank's `row`th.
std::uint32_t position(const Geometry& g, std::uint32_t rank, std::uint32_t row) {
    if (!g.causal) return rank * g.rows + row;
    return g.piece(rank, row / g.piece_rows()) * g.piece_rows() + row % g.piece_rows();
}

void every_pair_is_seen_once(bool causal, std::uint32_t rows, std::uint32_t cubes) {
    const std::uint32_t world = 3;
    for (std::uint32_t rank = 0; rank < world; ++rank) {
        Args args;
        args.rank = rank;
        args.geometry = {.world = world,
                         .heads = 2,
                         .rows = rows,
                         .head_dim = 200,
                         .causal = causal,
                         .rows_per_chunk = 7,
                         .cubes = cubes};
        const Geometry& g = args.geometry;
        std::byte somewhere;
        const std::vector<Peer> peers{{&somewhere, &somewhere}, {&somewhere, &somewhere}, {}};
        const std::vector<std::uint32_t> order{rank, (rank + 1) % world, (rank + 2) % world};
        args.peers = peers.data();
        args.order = order.data();
        std::vector<std::uint32_t> seen(g.heads * rows * world * rows);
        for (std::uint32_t cube = 0; cube < cubes; ++cube) {
            ring_attention::Steps cursor(args, cube);
            const std::uint32_t size = cursor.size();
            std::uint32_t steps = 0, items = 0;
            bool open = false, others = false;
            std::set<std::pair<std::uint32_t, std::uint32_t>> paused;  // plane and row
            for (; !cursor.done(); cursor.advance(), ++steps) {
                const ring_attention::Step& step = cursor.step();
                CHECK(step.opens == !open && step.item == items);
                CHECK(step.opens == (step.first || step.resumes) && !(step.first && step.resumes));
                // Others' keys come after all own ones, and each tile is taken up where it was left.
                others = others || step.source != rank;
                CHECK(others == (step.source != rank) && (!step.resumes || others));
                if (step.resumes) CHECK(paused.erase({step.plane, step.row}) == 1);
                if (step.pauses) CHECK(paused.insert({step.plane, step.row}).second);
                // Each query sees a key of its first tile, so that it has a maximum from then on.
                CHECK(!step.first || !step.masked || step.diagonal >= 0);
                for (std::uint32_t i = 0; i < step.queries; ++i) {
                    const std::uint32_t query = position(g, rank, step.row + i);
                    for (std::uint32_t j = 0; j < step.keys; ++j) {
                        if (step.masked && static_cast<std::int32_t>(j) >
                                               static_cast<std::int32_t>(i) + step.diagonal) {
                            continue;
                        }
                        const std::uint32_t key =
                            position(g, step.source, step.piece * g.piece_rows() + step.at + j);
                        ++seen[((step.plane * rows) + step.row + i) * world * rows + key];
                        CHECK(!causal || key <= query);
                        CHECK(g.needs(rank, step.source, g.chunk_at(step.piece, step.at + j)));
                    }
                }
                CHECK(!(step.last && step.pauses));
                open = !step.last && !step.pauses;
                items += open ? 0 : 1;
            }
            CHECK(steps == size && !open && paused.empty());
        }
        for (std::uint32_t i = 0; i < seen.size(); ++i) {
            const std::uint32_t key = i % (world * rows),
                                query = position(g, rank, i / (world * rows) % rows);
            CHECK(seen[i] == (causal && key > query ? 0 : 1));
        }
    }
}

// --- whole calls --------------------------------------------------------------------------------

constexpr std::uint32_t kDim = 24;
constexpr std::uint32_t kCubes = 2;
constexpr float kScale = 0.3f;

struct Sizes {
    std::uint32_t heads, kv_heads, rows, rows_per_chunk;
};
constexpr Sizes kShort{4, 2, 74, 20};
// Tiles of queries of two row blocks; of the last ones' second block a few rows, and few keys.
constexpr Sizes kLong{1, 1, 1024 + 150, 400};

Geometry geometry(const Sizes& sizes, std::uint32_t world, bool causal,
                  DType dtype = DType::float32) {
    return {.world = world,
            .heads = sizes.heads,
            .kv_heads = sizes.kv_heads,
            .rows = sizes.rows,
            .head_dim = kDim,
            .causal = causal,
            .rows_per_chunk = sizes.rows_per_chunk,
            .cubes = kCubes,
            .dtype = dtype};
}

struct Rank {
    explicit Rank(const Sizes& sizes)
        : q(sizes.heads * sizes.rows * kDim),
          k(sizes.kv_heads * sizes.rows * kDim),
          v(k.size()),
          out(q.size()),
          lse(sizes.heads * sizes.rows) {}
    std::vector<float> q, k, v, out, lse;
};

class World {
  public:
    World(std::uint32_t world, bool causal, const Sizes& sizes = kShort)
        : g_(geometry(sizes, world, causal)),
          memory_(world, test::Sizes::of(g_)),
          ranks_(world, Rank(sizes)) {}

    [[nodiscard]] const test::WorldMemory& memory() const { return memory_; }

    host::Call prepared(std::uint32_t rank, std::uint64_t epoch, host::View view) {
        host::Call call = test::call_of(memory_, rank, epoch, view);
        Rank& own = ranks_[rank];
        Args args;
        args.geometry = g_;
        args.q = view_of(own.q, kDim);
        args.k = view_of(own.k, kDim);
        args.v = view_of(own.v, kDim);
        args.out = view_of(own.out, kDim);
        args.lse = view_of(own.lse, 1);
        args.scale = kScale;
        call.kernels = host::kernels_of(args, test::order_from(rank, g_.world));
        call.blocks = {
            .comm = 3, .cube = kCubes, .vector = kCubes * ring_attention::kVectorsPerCube};
        return call;
    }

  private:
    static GlobalView view_of(std::vector<float>& values, std::uint32_t cols) {
        return {reinterpret_cast<std::byte*>(values.data()),
                DType::float32,
                static_cast<std::uint32_t>(values.size()) / cols,
                cols,
                cols,
                1};
    }

    Geometry g_;
    test::WorldMemory memory_;
    std::vector<Rank> ranks_;
};

// --- mutations ----------------------------------------------------------------------------------

// Dry kernels of rank 1 for the mutation test.
class Alone : public test::DryRank {
  public:
    Alone(const Sizes& sizes, std::uint32_t world, std::uint32_t near, bool causal, DType dtype)
        : DryRank(1, world, near) {
        const auto heads_at = [&](std::size_t number, std::uint32_t heads) {
            return view(number, heads * sizes.rows, kDim, dtype);
        };
        args_.geometry = geometry(sizes, world, causal, dtype);
        args_.q = heads_at(1, sizes.heads);
        args_.k = heads_at(2, sizes.kv_heads);
        args_.v = heads_at(3, sizes.kv_heads);
        args_.out = heads_at(4, sizes.heads);
        args_.lse = view(5, sizes.heads * sizes.rows, 1, DType::float32);
        bind(args_);
    }

    std::string run(Role role, std::uint32_t index, std::vector<std::uint32_t> without) {
        const std::uint32_t blocks = role == Role::vector ? kCubes * 2 : kCubes;
        return says(role, index, blocks, std::move(without), [&](sim::Core& core) {
            return role == Role::comm   ? ring_attention::comm(core, args_)
                   : role == Role::cube ? ring_attention::cube(core, args_)
                                        : ring_attention::vector(core, args_);
        });
    }

  private:
    Args args_;
};

void every_sync_is_needed(const char* name, const Sizes& sizes, std::uint32_t near, bool causal,
                          DType dtype) {
    Alone rank(sizes, 4, near, causal, dtype);
    const test::Mutations comm = test::every_sync_is_needed(name, rank, Role::comm);
    CHECK(comm.idle_syncs == 0);
    // The last step's fence is followed by the release's, with nothing between; those of all steps
    // also order what the halves of buffers wait for.
    const test::Mutations cube = test::every_sync_is_needed(name, rank, Role::cube);
    CHECK(cube.idle_syncs == 2 && cube.pairs > 2 * cube.idle_pairs);
    const test::Mutations vector = test::every_sync_is_needed(name, rank, Role::vector);
    CHECK(vector.idle_syncs == 0 && vector.idle_pairs == 0);
}

}  // namespace

int main() {
    for (const bool causal : {false, true}) {
        every_pair_is_seen_once(causal, 90, 3);
        every_pair_is_seen_once(causal, 2, 5);
        every_pair_is_seen_once(causal, 1100, 1);
    }
    sim::Scheduler::process().set_slots(3);
    for (const std::uint32_t ranks : {1u, 3u}) {
        for (const bool causal : {false, true}) test::all_views(World(ranks, causal));
    }
    for (const bool causal : {false, true}) {
        World longer(2, causal, kLong);
        test::run_all(longer, 1, host::View::pipelined);
    }
    test::run_all_but_one(World(3, true));
    for (const bool causal : {false, true}) {
        const Geometry g = geometry(kShort, 3, causal);
        // A core that sends several chunks sends the last one last.
        test::every_wait_is_needed(
            causal ? "causal" : "all keys", [&] { return std::make_unique<World>(3, causal); },
            [&](const auto& records, std::size_t at) {
                const std::uint32_t signal = records[at].signal;
                if (signal < kMaxWorld || signal == word_of(g.finished())) return true;
                const std::uint32_t number = (signal - kMaxWorld) / 3;
                return signal != word_of(Local{number}) && number % g.chunks() != g.chunks() - 1;
            });
    }
    every_sync_is_needed("one node", kShort, 4, false, DType::float16);
    every_sync_is_needed("two nodes, causal", kShort, 2, true, DType::float32);
    if (!kSanitized) every_sync_is_needed("two blocks", kLong, 4, false, DType::float16);
    sim::Scheduler::shutdown_process();
    return test::finish();
}
