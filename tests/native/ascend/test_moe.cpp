// MoE: routing tables against a plain computation; whole layers of several ranks in this process, meant
// to run under ThreadSanitizer too, whose results the conformance kit judges; every wait, flag and fence
// of the kernels taken away in turn.
#include <algorithm>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "backends/accelerators/ascend/host/ops.hpp"
#include "backends/accelerators/ascend/kernels/moe/comm.hpp"
#include "backends/accelerators/ascend/kernels/moe/cube.hpp"
#include "backends/accelerators/ascend/kernels/moe/vector.hpp"
#include "backends/accelerators/ascend/kernels/moe_combine/comm.hpp"
#include "backends/accelerators/ascend/kernels/moe_combine/vector.hpp"
#include "tests/native/ascend/check.hpp"
#include "tests/native/ascend/mutation.hpp"
#include "tests/native/ascend/whole_call.hpp"

using namespace mkernel;
using namespace mkernel::ascend;
using isa::DType;
using isa::GlobalView;
using sim::Role;

namespace {

constexpr std::uint32_t kTokens = 37, kTopK = 3, kExperts = 2, kHidden = 72, kFeatures = 104;
constexpr std::uint32_t kRanks = 3, kVectorBlocks = 4;

moe::Geometry geometry(std::uint32_t world, bool far) {
    return {.routing = {.world = world, .tokens = kTokens, .top_k = kTopK, .experts = kExperts},
            .world = world,
            .hidden = kHidden,
            .features = kFeatures,
            .rows_per_chunk = 8,
            .far = far,
            .tile_m = 16,
            .tile_n = 64,
            .tile_k = 64,
            .step_k = 32,
            .dtype = DType::float32};
}

moe_combine::Geometry combine_geometry(std::uint32_t world, bool far) {
    return {.routing = geometry(world, far).routing,
            .world = world,
            .features = kFeatures,
            .rows_per_chunk = 11,
            .far = far,
            .dtype = DType::float32,
            .out_dtype = DType::float16};
}

// Ids of all ranks; some name no expert.
std::vector<std::int32_t> ids_of_all(std::uint32_t world, unsigned seed) {
    std::mt19937 random(seed);
    std::vector<std::int32_t> ids(world * kTokens * kTopK);
    for (std::int32_t& id : ids) {
        id = static_cast<std::int32_t>(random() % (world * kExperts + (seed == 0 ? 0 : 1)));
    }
    return ids;
}

GlobalView floats(std::vector<float>& values, std::uint32_t rows, std::uint32_t cols) {
    return {reinterpret_cast<std::byte*>(values.data()), DType::float32, rows, cols, cols, 1};
}

GlobalView words(std::vector<std::int32_t>& values, std::uint32_t rows) {
    const auto cols = static_cast<std::uint32_t>(values.size() / rows);
    return {reinterpret_cast<std::byte*>(values.data()), DType::int32, rows, cols, cols, 1};
}

// --- tables -------------------------------------------------------------------------------------

// A dry call of one rank, alone: tables and ids are real, the rest is addresses.
class Alone : public test::DryRank {
  public:
    Alone(std::uint32_t world, std::uint32_t near, unsigned seed)
        : DryRank(kRank, world, near), ids_(ids_of_all(world, seed)) {
        args_.geometry = geometry(world, near < world);
        const moe::Geometry& g = args_.geometry;
        const std::uint32_t rows = g.routing.most_rows();
        tables_.resize(g.table_words(), -1);
        args_.x = view(1, kTokens, kHidden, DType::float32);
        args_.w = view(2, kExperts * kHidden, kFeatures, DType::float32);
        args_.grouped = view(3, rows, kHidden, DType::float32);
        args_.out = view(4, rows, kFeatures, DType::float32);
        args_.tables = words(tables_, 1);
        args_.routing = words(ids_, world);
        args_.own_ids = args_.slot_ids(args_.routing.at(kRank, 0));
        home_.geometry = combine_geometry(world, near < world);
        home_.y = view(5, rows, kFeatures, DType::float32);
        home_.weights = view(6, kTokens, kTopK, DType::float32);
        home_.tables = args_.tables;
        home_.out = view(7, kTokens, kFeatures, DType::float16);
        bind(args_);
        bind(home_);
        real_ = {{args_.tables.base, tables_.size() * 4, true},
                 {args_.routing.base, ids_.size() * 4, false}};
    }

    // The vector part by `blocks` blocks, one after another. Tables that they share are there.
    void build(std::uint32_t blocks) {
        for (std::uint32_t i = 0; i < blocks; ++i) {
            sim::Environment environment = dry();
            sim::Core core(environment, Role::vector, i, blocks, memory_, nullptr);
            CHECK(moe::vector(core, args_));
        }
    }

    [[nodiscard]] std::int32_t word(std::uint64_t index) const { return tables_[index]; }
    [[nodiscard]] const std::vector<std::int32_t>& ids() const { return ids_; }
    [[nodiscard]] const moe::Geometry& g() const { return args_.geometry; }

    // For the mutation test: of two blocks of a kernel of the dispatch (or the combine).
    bool combine = false;
    std::string run(Role role, std::uint32_t index, std::vector<std::uint32_t> without) {
        return says(role, index, 2, std::move(without), [&](sim::Core& core) {
            if (combine && role == Role::comm) return moe_combine::comm(core, home_);
            if (combine) return moe_combine::vector(core, home_);
            return role == Role::comm   ? moe::comm(core, args_)
                   : role == Role::cube ? moe::cube(core, args_)
                                        : moe::vector(core, args_);
        });
    }

    static constexpr std::uint32_t kRank = 1;

  private:
    std::vector<std::int32_t> ids_, tables_;
    moe::Args args_;
    moe_combine::Args home_;
};

// Every table against what a plain loop over all ids finds.
void tables_say_what_the_ids_say() {
    for (const unsigned seed : {0u, 1u, 2u}) {
        for (const std::uint32_t world : {2u, 5u}) {
            Alone rank(world, world, seed);
            const moe::Geometry& g = rank.g();
            const moe::Routing& r = g.routing;
            const auto id = [&](std::uint32_t source, std::uint32_t place) {
                return rank.ids()[source * r.places() + place];
            };
            rank.build(1);
            for (const std::uint32_t blocks : {1u, 3u, 8u}) {
                rank.build(blocks);
                std::int32_t row = 0;
                std::vector<std::uint32_t> seen(world);  // places here of each source
                for (std::uint32_t expert = 0; expert < kExperts; ++expert) {
                    CHECK(rank.word(r.base(expert)) == row);
                    for (std::uint32_t source = 0; source < world; ++source) {
                        for (std::uint32_t place = 0; place < r.places(); ++place) {
                            const auto wanted = Alone::kRank * kExperts + expert;
                            if (id(source, place) != static_cast<std::int32_t>(wanted)) continue;
                            // Its number among the places of its source that come here.
                            std::uint32_t number = 0;
                            for (std::uint32_t before = 0; before < place; ++before) {
                                number += r.owner(id(source, before)) == Alone::kRank ? 1 : 0;
                            }
                            CHECK(rank.word(r.rows(source, number)) == row);
                            ++row;
                            ++seen[source];
                        }
                    }
                }
                CHECK(rank.word(r.base(kExperts)) == row);
                for (std::uint32_t source = 0; source < world; ++source) {
                    CHECK(rank.word(r.begin(source, kTokens)) ==
                          static_cast<std::int32_t>(seen[source]));
                    std::int32_t lower = 0;
                    for (std::uint32_t place = 0; place < r.places(); ++place) {
                        lower += r.owner(id(source, place)) < Alone::kRank ? 1 : 0;
                    }
                    CHECK(rank.word(r.start(source)) == lower);
                    CHECK(rank.word(g.first(source, g.chunks(), kExperts - 1)) ==
                          rank.word(source + 1 < world ? g.first(source + 1, 0, kExperts - 1)
                                                       : r.base(kExperts)));
                }
                std::vector<bool> taken(r.places());
                for (std::uint32_t place = 0; place < r.places(); ++place) {
                    const auto at = static_cast<std::uint32_t>(rank.word(r.home(place)));
                    CHECK(at < r.places() && !taken[at]);
                    taken[at] = true;
                    for (std::uint32_t before = 0; before < place; ++before) {
                        const bool earlier =
                            r.owner(id(Alone::kRank, before)) <= r.owner(id(Alone::kRank, place));
                        CHECK((rank.word(r.home(before)) < static_cast<std::int32_t>(at)) ==
                              earlier);
                    }
                }
            }
        }
    }
}

// --- whole layers -------------------------------------------------------------------------------

struct Rank {
    explicit Rank(std::uint32_t world)
        : x(kTokens * kHidden),
          w(kExperts * kHidden * kFeatures),
          grouped(geometry(world, false).routing.most_rows() * kHidden),
          out(geometry(world, false).routing.most_rows() * kFeatures),
          weights(kTokens * kTopK),
          result(kTokens * kFeatures),
          tables(geometry(world, false).table_words()) {}
    std::vector<float> x, w, grouped, out, weights, result;
    std::vector<std::int32_t> tables;
};

class World {
  public:
    // One of a layer's calls: the dispatch, or the combine.
    struct Half {
        World& world;
        std::uint32_t which;
        host::Call prepared(std::uint32_t rank, std::uint64_t epoch, host::View view) {
            return world.prepared(which, rank, epoch, view);
        }
        [[nodiscard]] const test::WorldMemory& memory() const { return world.memory_; }
    };

    explicit World(std::uint32_t world)
        : g_(geometry(world, false)),
          memory_(world, test::Sizes::of(g_, combine_geometry(world, false))) {
        for (std::uint32_t i = 0; i < world; ++i) ranks_.emplace_back(world);
    }

    // A layer: a dispatch and its combine.
    void call(std::uint64_t epoch, host::View view) {
        ids_ = ids_of_all(g_.world, 0);
        std::shuffle(ids_.begin(), ids_.end(), std::mt19937(static_cast<unsigned>(epoch)));
        for (const std::uint32_t which : {0u, 1u}) {
            Half half{*this, which};
            test::run_all(half, 2 * epoch - 1 + which, view);
        }
    }

    host::Call prepared(std::uint32_t which, std::uint32_t rank, std::uint64_t epoch,
                        host::View view) {
        host::Call call = test::call_of(memory_, rank, epoch, view);
        call.kernels = kernels(which, rank);
        call.blocks = {.comm = 3, .cube = which == 0 ? 3u : 0u, .vector = kVectorBlocks};
        return call;
    }

  private:
    std::shared_ptr<host::Kernels> kernels(std::uint32_t which, std::uint32_t rank) {
        const std::vector<std::uint32_t> order = test::order_from(rank, g_.world);
        Rank& own = ranks_[rank];
        const moe::Routing& r = g_.routing;
        if (which == 0) {
            moe::Args args;
            args.geometry = g_;
            args.x = floats(own.x, kTokens, kHidden);
            args.own_ids = args.slot_ids(reinterpret_cast<std::byte*>(ids_.data()) +
                                         std::size_t{rank} * r.places() * sizeof(std::int32_t));
            args.w = floats(own.w, kExperts * kHidden, kFeatures);
            args.grouped = floats(own.grouped, r.most_rows(), kHidden);
            args.out = floats(own.out, r.most_rows(), kFeatures);
            args.tables = words(own.tables, 1);
            return host::kernels_of(args, order);
        }
        moe_combine::Args args;
        args.geometry = combine_geometry(g_.world, false);
        args.geometry.out_dtype = DType::float32;
        const auto rows = static_cast<std::uint32_t>(own.tables[r.base(kExperts)]);
        args.y = floats(own.out, rows, kFeatures);
        args.weights = floats(own.weights, kTokens, kTopK);
        args.tables = words(own.tables, 1);
        args.out = floats(own.result, kTokens, kFeatures);
        return host::kernels_of(args, order);
    }

    moe::Geometry g_;
    test::WorldMemory memory_;  // of both plans
    std::vector<Rank> ranks_;
    std::vector<std::int32_t> ids_;
};

// One of the two calls of a layer, of ranks that have been through a layer.
class LaterHalf : public World {
  public:
    LaterHalf(std::uint32_t world, std::uint32_t which) : World(world), half_{*this, which} {
        call(1, host::View::pipelined);
    }
    host::Call prepared(std::uint32_t rank, std::uint64_t epoch, host::View view) {
        return half_.prepared(rank, 2 + epoch, view);
    }
    [[nodiscard]] const test::WorldMemory& memory() const { return half_.memory(); }

  private:
    Half half_;
};

// A vector block spreads its chunks one after the other. So a cube block that waits for a later chunk
// of the same vector block before it next loads needs no wait for an earlier one. This says whether
// rank 0's wait at that place is such an earlier one.
bool spread_before_another(const std::vector<sim::Record>& records, std::size_t at) {
    const std::vector<std::uint32_t> order = test::order_from(0, kRanks);
    moe::Args args;
    args.geometry = geometry(kRanks, false);
    args.order = order.data();
    const moe::Geometry& g = args.geometry;
    const std::uint32_t items = kRanks * g.chunks();
    // The item of work whose chunk the record waits for; `items`: it waits for none.
    const auto item = [&](const sim::Record& record) {
        std::uint32_t found = record.kind == sim::Kind::twait ? 0 : items;
        for (; found < items; ++found) {
            const auto [source, number] = args.chunk(found);
            if (word_of(g.spread(source, number)) == record.signal) break;
        }
        return found;
    };
    const std::uint32_t own = item(records[at]);
    if (own == items) return false;
    const auto here = records.begin() + static_cast<std::ptrdiff_t>(at);
    const auto loads = std::find_if(here, records.end(), [](const sim::Record& record) {
        return record.kind == sim::Kind::tload;
    });
    return std::any_of(records.begin(), loads, [&](const sim::Record& other) {
        const std::uint32_t its = item(other);
        return &other != &*here && its < items && its >= own &&
               its % kVectorBlocks == own % kVectorBlocks;
    });
}

// Whether a record waits for what a rank has released, or for the own blocks before that is said.
bool between_calls(const sim::Record& record) {
    return record.signal < kMaxWorld ||
           record.signal == word_of(geometry(kRanks, false).finished());
}

void every_wait_is_needed() {
    test::every_wait_is_needed(
        "dispatch", [] { return std::make_unique<LaterHalf>(kRanks, 0); },
        [](const auto& records, std::size_t at) {
            return between_calls(records[at]) || spread_before_another(records, at);
        });
    test::every_wait_is_needed(
        "combine", [] { return std::make_unique<LaterHalf>(kRanks, 1); },
        [](const auto& records, std::size_t at) { return between_calls(records[at]); });
}

// --- mutations ----------------------------------------------------------------------------------

void every_sync_is_needed(const char* name, std::uint32_t world, std::uint32_t near) {
    Alone rank(world, near, 1);
    rank.build(1);
    // Empty chunks, and blocks that end without a chunk to spread, have fences with nothing before.
    (void)test::every_sync_is_needed(name, rank, Role::comm);
    (void)test::every_sync_is_needed(name, rank, Role::vector);
    const test::Mutations cube = test::every_sync_is_needed(name, rank, Role::cube);
    CHECK(cube.idle_pairs == 2 * 2 * 8);  // both ends of all stages and halves, in two blocks
    rank.combine = true;
    (void)test::every_sync_is_needed(name, rank, Role::comm);
    const test::Mutations sums = test::every_sync_is_needed(name, rank, Role::vector);
    CHECK(sums.idle_syncs == 0 && sums.pairs > sums.idle_pairs);
}

}  // namespace

int main() {
    tables_say_what_the_ids_say();
    for (const std::uint32_t ranks : {1u, 3u}) test::all_views(World(ranks));
    every_wait_is_needed();
    every_sync_is_needed("one node", 3, 3);
    every_sync_is_needed("two nodes", 4, 2);
    return test::finish();
}
