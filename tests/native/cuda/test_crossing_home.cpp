// Results of experts that come home between nodes as sums by rank, or in one node by slot, by the code of the kernels:
// results are those of the same additions, to the bit, and bytes those of whole sums and weights. Invariant results are
// those of the tree in every world.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>
#include <string_view>
#include <type_traits>

#include "tests/native/cuda/host_ranks.hpp"

#include "backends/accelerators/cuda/kernels/moe/far_slots.cuh"
#include "backends/accelerators/cuda/kernels/moe/home.cuh"

namespace cuda = mkernel::cuda;
namespace moe = mkernel::cuda::moe;
namespace transport = mkernel::transport;
using mkernel::host_kernels::launch;
using mkernel::host_kernels::Ranks;
using moe::narrow;
using moe::widen;

namespace {

constexpr int kWidth = 16;
constexpr unsigned kThreads = 64;

struct Shape {
    int nodes, local, tokens, top_k, experts, pieces;
    bool hierarchical, staged;
    int groups = 0;  // of experts, of invariant results
    [[nodiscard]] int world() const { return nodes * local; }
    [[nodiscard]] int places() const { return tokens * top_k; }
    [[nodiscard]] int piece_tokens() const { return (tokens + pieces - 1) / pieces; }
};

// Nothing to share among threads of a block.
struct None {};

inline void narrow(float x, float& to) {
    to = x;
}
template <class To>
To of_float(float x) {
    To found;
    narrow(x, found);
    return found;
}

// Calls on all ranks, with results that travel as `In`. A fault is planted beneath the kernels:
//   unadded   the last piece leaves before the relay has added it up
//   alone     a relay finds no results on its neighbours
//   stranger  weights that are passed on are those of the rank behind
//   moved     sums of neighbours lie one token further than they are read
//   slots     a rank adds the slots of its own tokens from the last one on
//   groups    its experts form twice as many groups
template <class In, bool kTree = false>
class World {
    using Out = std::conditional_t<sizeof(In) == 4, float, __nv_bfloat16>;

  public:
    World(const Shape& shape, std::string_view fault)
        : shape_(shape),
          fault_(fault),
          ranks_(shape.nodes, shape.local, shape.staged, outbox_offset() + shape.world() * slot(),
                 outbox_offset()),
          own_(shape.world()) {}

    // Runs a call; returns how many elements are not as they should be.
    int call(unsigned seed) {
        std::mt19937 random(seed);
        std::vector<std::int32_t> ids;
        for (int place = 0; place < shape_.world() * shape_.places(); ++place) {
            const int all = shape_.world() * shape_.experts;
            const int drawn = static_cast<int>(random() % (all + all / 3 + 1));
            ids.push_back(drawn < all ? drawn : -1);
        }
        std::uniform_real_distribution<float> values(-1, 1);
        for (int rank = 0; rank < shape_.world(); ++rank) {
            fill(rank, ids);
            Own& own = own_[rank];
            own.y.resize(own.rows * kWidth);
            for (In& each : own.y) each = of_float<In>(values(random));
            own.weights.resize(shape_.places());
            for (float& each : own.weights) each = values(random);
            if (kTree) cancel(own);
            own.out.assign(shape_.tokens * kWidth, of_float<Out>(7.0f));
            std::memset(ranks_[rank].data(), 0x5A, outbox_offset() + shape_.world() * slot());
            if (shape_.staged) std::memset(ranks_[rank].area(), 0x5A, outbox_offset());
        }
        ranks_.run([this](int rank) { shape_.nodes > 1 ? bring(rank) : bring_slots(rank); },
                   [](int) {});
        int wrong = 0;
        for (int rank = 0; rank < shape_.world(); ++rank) {
            for (int at = 0; at < shape_.tokens * kWidth; ++at) {
                const Out expected = kTree ? tree_for(rank, at / kWidth, at % kWidth)
                                           : sum_for(rank, at / kWidth, at % kWidth);
                wrong += std::memcmp(&own_[rank].out[at], &expected, sizeof expected) != 0;
            }
            judge_bytes(rank);
        }
        return wrong;
    }

  private:
    struct Own {
        std::vector<std::int32_t> words;
        moe::Tables tables;
        std::vector<In> y;
        std::vector<float> weights;
        std::vector<Out> out;
        int rows;
    };

    [[nodiscard]] std::uint64_t slot() const { return shape_.tokens * kWidth * sizeof(In); }
    [[nodiscard]] std::uint64_t weights_bytes() const { return shape_.places() * sizeof(float); }
    [[nodiscard]] std::uint64_t rows_offset() const {
        return (shape_.world() * weights_bytes() + 255) / 256 * 256;
    }
    [[nodiscard]] std::uint64_t outbox_offset() const {
        return rows_offset() + shape_.world() * slot();
    }
    [[nodiscard]] cuda::FarSlots weights() const {
        return {0, weights_bytes(), 0, weights_bytes(), shape_.hierarchical, shape_.hierarchical};
    }
    [[nodiscard]] cuda::FarSlots sums() const {
        return {rows_offset(), slot(), static_cast<std::uint32_t>(2 * shape_.world()),
                shape_.piece_tokens() * kWidth * sizeof(In), shape_.hierarchical};
    }

    // Makes terms of the first two slots large, and their sum zero: in another order they take the others' bits.
    void cancel(Own& own) const {
        for (int place = 0; place < shape_.places(); place += shape_.top_k) {
            own.weights[place] *= 1 << 24;
            own.weights[place + 1] = -own.weights[place];
        }
        for (int row = 0; row < own.rows; ++row) {
            const int place = own.tables.row_place()[row];
            std::minstd_rand drawn(1 + place - (place % shape_.top_k == 1 ? 1 : 0));
            for (int column = 0; column < kWidth; ++column) {
                own.y[row * kWidth + column] =
                    of_float<In>(static_cast<float>(drawn() % 255) / 128);
            }
        }
    }

    // Makes the tables of a routing: a row of this rank for each place that it has the expert of, in their order.
    void fill(int rank, const std::vector<std::int32_t>& ids) {
        Own& own = own_[rank];
        own.tables = {nullptr, shape_.world(), shape_.tokens, shape_.top_k, shape_.experts};
        own.words.assign(static_cast<std::size_t>(own.tables.count()), 0);
        own.tables.words = own.words.data();
        own.rows = 0;
        for (int place = 0; place < static_cast<int>(ids.size()); ++place) {
            own.tables.ids()[place] = ids[place];
            const bool here = ids[place] >= 0 && ids[place] / shape_.experts == rank;
            own.tables.place_row()[place] = here ? own.rows : -1;
            if (here) own.tables.row_place()[own.rows++] = place;
        }
        own.tables.rows() = own.rows;
    }

    [[nodiscard]] moe::HomeArgs args_of(int rank) {
        Own& own = own_[rank];
        return {
            .workspace = ranks_.workspace(rank),
            .limits = ranks_.limits(rank),
            .tables = own.tables,
            .y = reinterpret_cast<const char*>(own.y.data()),
            .weights = own.weights.data(),
            .out = reinterpret_cast<char*>(own.out.data()),
            .weights_offset = 0,
            .rows_offset = rows_offset(),
            .outbox_offset = outbox_offset(),
            .width = kWidth,
            .first = 0,
            .end = shape_.tokens,
            .pieces = shape_.pieces,
            .groups = shape_.groups,
            .half = sizeof(In) == 2,
            .wide = sizeof(In) == 4,
            .waits = true,
            .hierarchical = shape_.hierarchical,
        };
    }

    // Queues what a rank's executor does.
    void bring(int rank) {
        moe::HomeArgs args = args_of(rank);
        const cuda::Workspace& here = args.workspace;
        const std::uint64_t epoch = here.control().state.epoch;
        const std::uint64_t own = rank * weights_bytes();
        const int from = fault_ == "stranger" ? (rank + 1) % shape_.world() : rank;
        for (int other = here.first; other < here.first + here.local; ++other) {
            if (other == rank) continue;
            std::memcpy(here.data(other) + own, own_[rank].weights.data(), weights_bytes());
            transport::fence_system();
            here.flags(other)[rank].set(epoch);
        }
        std::memcpy(here.network.area + own, own_[from].weights.data(), weights_bytes());
        on_device(1, [&] { put(args, own, 0, weights(), 0); });
        on_device(1, [&] { land_slots(here, args.limits, weights()); });
        moe::HomeArgs behind = args;
        const int skew = shape_.hierarchical ? 1 : 0;
        for (int piece = 0; piece < shape_.pieces + skew; ++piece) {
            args.first = piece * shape_.piece_tokens();
            args.end = std::min(args.first + shape_.piece_tokens(), shape_.tokens);
            if (piece < shape_.pieces) sum_rows(args);
            const bool last = piece == shape_.pieces;
            if (skew != 0 && piece > 0 && !(last && fault_ == "unadded")) relay(behind);
            if (piece >= skew) {
                const auto leaves = static_cast<std::uint32_t>(piece - skew);
                on_device(1, [&] { put(args, args.outbox_offset, slot(), sums(), leaves); });
            }
            behind.first = args.first, behind.end = args.end;
        }
        on_device(1, [&] { land_slots(here, args.limits, sums()); });
        on_device(2, [&] {
            if (shape_.hierarchical) {
                moe::sum_ranks_of_call<Out, In, kTree, true>(args);
            } else {
                moe::sum_ranks_of_call<Out, In, kTree, false>(args);
            }
        });
    }
    // The same where results come home by slot.
    void bring_slots(int rank) {
        const moe::HomeArgs args = args_of(rank);
        on_device(2, [&] { moe::send_rows_of_call<In>(args); });
        on_device(2, [&] { moe::sum_slots_of_call<Out, In, kTree>(args); });
    }
    void sum_rows(moe::HomeArgs args) {
        std::vector<std::int32_t> words = own_[args.workspace.rank].words;
        std::vector<float> weights = own_[args.workspace.rank].weights;
        args.tables.words = words.data();
        args.weights = weights.data();
        if (fault_ == "groups") args.groups *= 2;
        for (int at = 0; fault_ == "slots" && at < shape_.places(); at += shape_.top_k) {
            const int place = args.workspace.rank * shape_.places() + at;
            std::reverse(weights.begin() + at, weights.begin() + at + shape_.top_k);
            for (std::int32_t* const of : {args.tables.ids(), args.tables.place_row()}) {
                std::reverse(of + place, of + place + shape_.top_k);
            }
        }
        on_device(2, [&] { moe::sum_rows_of_call<In, kTree>(args); });
    }
    void relay(moe::HomeArgs args) {
        std::vector<std::int32_t> words = own_[args.workspace.rank].words;
        args.tables.words = words.data();
        if (fault_ == "alone") {
            for (std::int64_t place = 0; place < args.tables.places(); ++place) {
                const bool own = args.tables.place_row()[place] >= 0;
                if (!own) args.tables.ids()[place] = -1;
            }
        }
        if (fault_ == "moved") args.rows_offset += kWidth * sizeof(In);
        on_device(2, [&] { moe::relay_sums_of_call<In, kTree>(args); });
    }
    static void put(const moe::HomeArgs& args, std::uint64_t from, std::uint64_t step,
                    const cuda::FarSlots& slots, std::uint32_t piece) {
        if (threadIdx.x == 0) put_slots(args.workspace, args.limits, from, step, slots, piece);
    }
    template <class Body>
    static void on_device(unsigned blocks, Body&& body) {
        launch<None>(blocks, kThreads, [&](None&) { body(); });
    }

    // What a call adds, in its order and with its roundings.
    [[nodiscard]] Out sum_for(int source, int token, int column) const {
        float total = 0;
        for (int node = 0; node < shape_.nodes; ++node) {
            float of_node = 0;
            for (int rank = node * shape_.local; rank < (node + 1) * shape_.local; ++rank) {
                const float part = rounded(of_rank(rank, source, token, column));
                if (shape_.hierarchical)
                    of_node += part;
                else
                    total += part;
            }
            const bool own = node == source / shape_.local;
            if (shape_.hierarchical) total += own ? of_node : rounded(of_node);
        }
        return of_float<Out>(total);
    }
    [[nodiscard]] float of_rank(int rank, int source, int token, int column) const {
        float sum = 0;
        for (int slot = 0; slot < shape_.top_k; ++slot) {
            const int place = token * shape_.top_k + slot;
            const int row = own_[rank].tables.place_row()[source * shape_.places() + place];
            if (row < 0) continue;
            sum = std::fmaf(own_[source].weights[place], widen(own_[rank].y[row * kWidth + column]),
                            sum);
        }
        return sum;
    }
    // What invariant results are: of the leaves, one for each group of experts, the tree.
    [[nodiscard]] Out tree_for(int source, int token, int column) const {
        std::vector<float> nodes(shape_.groups);
        for (int slot = 0; slot < shape_.top_k; ++slot) {
            const int place = token * shape_.top_k + slot;
            const int all = source * shape_.places() + place;
            const int expert = own_[0].tables.ids()[all];
            if (expert < 0) continue;
            const Own& owner = own_[expert / shape_.experts];
            float& leaf = nodes[expert * shape_.groups / (shape_.world() * shape_.experts)];
            leaf = std::fmaf(own_[source].weights[place],
                             widen(owner.y[owner.tables.place_row()[all] * kWidth + column]), leaf);
        }
        for (float& each : nodes) each = rounded(each);
        for (; nodes.size() > 1; nodes.resize(nodes.size() / 2)) {
            for (std::size_t at = 0; at < nodes.size() / 2; ++at) {
                nodes[at] = rounded(nodes[2 * at] + nodes[2 * at + 1]);
            }
        }
        return of_float<Out>(nodes[0]);
    }
    static float rounded(float x) { return widen(of_float<In>(x)); }

    void judge_bytes(int rank) {
        for (int peer = 0; peer < shape_.world(); ++peer) {
            const bool rail = peer % shape_.local == rank % shape_.local;
            const bool exchanges = !ranks_.near(rank, peer) && (!shape_.hierarchical || rail);
            CHECK(ranks_[rank].put[peer] == (exchanges ? weights_bytes() + slot() : 0));
        }
    }

    Shape shape_;
    std::string_view fault_;
    Ranks ranks_;
    std::vector<Own> own_;
};

template <class In, bool kTree = false>
int wrong(const Shape& shape, std::string_view fault = "") {
    World<In, kTree> world(shape, fault);
    int found = 0;
    for (unsigned call = 0; call < 2; ++call) found += world.call(call);
    return found;
}

TEST(sums_for_each_rank_cross_directly) {
    CHECK(wrong<__half>({2, 2, 21, 3, 2, 3, false, true}) == 0);
    CHECK(wrong<float>({3, 1, 16, 2, 2, 4, false, false}) == 0);
}

TEST(sums_of_a_node_cross_once) {
    CHECK(wrong<__half>({2, 2, 21, 3, 2, 3, true, true}) == 0);
    CHECK(wrong<float>({2, 3, 19, 8, 2, 4, true, false}) == 0);
    CHECK(wrong<__half>({3, 2, 9, 4, 2, 1, true, false}) == 0);
}

TEST(faults_of_relays_are_seen) {
    for (const std::string_view fault : {"unadded", "alone", "stranger", "moved"}) {
        CHECK(wrong<__half>({2, 2, 12, 3, 2, 3, true, fault.size() % 2 == 0}, fault) > 0);
    }
}

int wrong_in_tree(const Shape& shape, std::string_view fault = "") {
    return wrong<__nv_bfloat16, true>(shape, fault);
}

TEST(invariant_results_are_those_of_the_tree) {
    for (const int groups : {4, 8, 64}) {
        CHECK(wrong_in_tree({1, 4, 21, 8, 3, 0, false, false, groups}) == 0);
        CHECK(wrong_in_tree({2, 2, 21, 8, 3, 3, false, true, groups}) == 0);
        CHECK(wrong_in_tree({2, 2, 21, 8, 3, 3, true, true, groups}) == 0);
    }
    CHECK(wrong_in_tree({1, 2, 19, 4, 24, 0, false, false, 8}) == 0);
    CHECK(wrong_in_tree({4, 2, 9, 8, 3, 2, true, false, 16}) == 0);
}

TEST(other_orders_of_invariant_results_are_seen) {
    for (const bool relays : {false, true}) {
        for (const std::string_view fault : {"slots", "groups"}) {
            CHECK(wrong_in_tree({2, 2, 21, 8, 3, 3, relays, true, 4}, fault) > 0);
        }
    }
}

}  // namespace

int main(int argc, char** argv) {
    return mkernel::nics::testing::run(argc, argv);
}
