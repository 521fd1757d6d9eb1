// Tokens that cross between nodes, by the code of the kernels: all ranks of a world are here, threads stand for those of
// blocks, and a thread a rank for its proxy and NIC.
#include <set>

#include "tests/native/cuda/host_ranks.hpp"

#include "backends/accelerators/cuda/kernels/moe/crossing.cuh"
#include "backends/accelerators/cuda/kernels/moe/token_rows.cuh"

namespace cuda = mkernel::cuda;
namespace moe = mkernel::cuda::moe;
namespace transport = mkernel::transport;
using mkernel::host_kernels::launch;
using mkernel::host_kernels::Ranks;

namespace {

struct Shape {
    int nodes, local, tokens, top_k, experts, pieces;
    bool hierarchical, staged;
    int row_bytes = 48;
    [[nodiscard]] int world() const { return nodes * local; }
    [[nodiscard]] std::uint64_t slot() const { return std::uint64_t{1} * tokens * row_bytes; }
    [[nodiscard]] std::uint64_t ids_offset() const { return (world() * slot() + 255) / 256 * 256; }
    [[nodiscard]] std::uint64_t ids_bytes() const { return std::uint64_t{4} * tokens * top_k; }
    [[nodiscard]] std::uint64_t lists_offset() const {
        return (ids_offset() + world() * ids_bytes() + 255) / 256 * 256;
    }
    [[nodiscard]] std::uint64_t outbox_offset() const {
        const moe::CrossingLists lists{nullptr, world(), tokens, pieces};
        return (lists_offset() + 4 * lists.count() + 255) / 256 * 256;
    }
    [[nodiscard]] std::uint64_t area_bytes() const { return outbox_offset() + world() * slot(); }
};

// The fields that functions of token_rows.cuh read.
struct Reads {
    cuda::Workspace workspace;
    moe::Tables tables;
    moe::Crossing crossing;
    const char* a;
    std::int64_t row_bytes;
    bool waits;
};

struct Tokens {
    std::vector<char> x;
    std::vector<std::int32_t> ids;
};

class World {
  public:
    explicit World(const Shape& shape)
        : shape_(shape),
          ranks_(shape.nodes, shape.local, shape.staged, shape.area_bytes(), shape.lists_offset()),
          tokens_(shape.world(), {std::vector<char>(shape.slot()),
                                  std::vector<std::int32_t>(shape.tokens * shape.top_k)}) {
        ranks_.held = [this](std::uint32_t word) {
            const moe::CrossingLists lists{nullptr, shape_.world(), shape_.tokens, shape_.pieces};
            const std::int64_t flag = std::int64_t{word} - cuda::kFirstArrival - lists.flag(0, 0);
            const bool last = flag >= 0 && flag % shape_.pieces == shape_.pieces - 1;
            return last && started_ < shape_.world();
        };
    }

    // Runs one call on all ranks. No rank's last piece leaves before all have read the rows of their first expert.
    void call(unsigned seed) {
        std::mt19937 random(seed);
        started_ = 0;
        for (int rank = 0; rank < shape_.world(); ++rank) {
            for (char& byte : tokens_[rank].x) byte = static_cast<char>(random());
            for (int token = 0; token < shape_.tokens; ++token) {
                draw(tokens_[rank], token, random);
            }
            std::memset(ranks_[rank].data(), 0x5A, shape_.outbox_offset());
        }
        ranks_.run([this](int rank) { send_and_land(rank); }, [this](int rank) { read(rank); });
        for (int rank = 0; rank < shape_.world(); ++rank) {
            judge_bytes(rank);
            ++ranks_.control(rank).state.epoch;
        }
    }

  private:
    // Of a token: different experts, some of which are nobody's; at times of one rank alone, or none.
    void draw(Tokens& rank, int token, std::mt19937& random) const {
        const int all = shape_.world() * shape_.experts;
        std::vector<std::int32_t> experts(all);
        for (int i = 0; i < all; ++i) experts[i] = i;
        std::shuffle(experts.begin(), experts.end(), random);
        const unsigned kind = random() % 4;
        for (int slot = 0; slot < shape_.top_k; ++slot) {
            std::int32_t& id = rank.ids[token * shape_.top_k + slot];
            id = kind == 0 ? experts[0] : experts[slot];
            if (random() % 4 == 0) id = slot % 2 == 0 ? -1 : all + 7;
        }
    }

    [[nodiscard]] bool wants(int source, int token, int first, int ranks) const {
        const Tokens& from = tokens_[source];
        for (int slot = 0; slot < shape_.top_k; ++slot) {
            const int id = from.ids[token * shape_.top_k + slot];
            if (id >= first * shape_.experts && id < (first + ranks) * shape_.experts) return true;
        }
        return false;
    }

    void send_and_land(int rank) {
        const Tokens& own = tokens_[rank];
        const moe::CrossingArgs args{
            .workspace = ranks_.workspace(rank),
            .limits = ranks_.limits(rank),
            .crossing = {shape_.lists_offset(), shape_.pieces},
            .x = own.x.data(),
            .ids = own.ids.data(),
            .ids_offset = shape_.ids_offset(),
            .outbox_offset = shape_.outbox_offset(),
            .row_bytes = shape_.row_bytes,
            .tokens = shape_.tokens,
            .top_k = shape_.top_k,
            .experts = shape_.experts,
            .hierarchical = shape_.hierarchical,
        };
        const auto peers = static_cast<unsigned>(moe::rails_in(args).peers());
        using Shared = moe::CrossingShared;
        launch<Shared>(peers, 64, [&](Shared& shared) { moe::list_leaving(args, shared); });
        launch<Shared>(3, 64, [&](Shared&) { moe::put_lists(args); });
        launch<Shared>(2, 64, [&](Shared& shared) { moe::land_lists(args, shared); });
    }

    // Reads, as the next kernels do, the rows of each expert in turn as soon as they may: those of tokens of one other
    // rank at a time.
    void read(int rank) {
        const Tokens& own = tokens_[rank];
        const int top_k = shape_.top_k;
        const int places = shape_.world() * shape_.tokens * top_k;
        Reads reads{.workspace = ranks_.workspace(rank),
                    .tables = {},
                    .crossing = {shape_.lists_offset(), shape_.pieces},
                    .a = own.x.data(),
                    .row_bytes = shape_.row_bytes,
                    .waits = true};
        moe::Tables& tables = reads.tables;
        tables = {nullptr, shape_.world(), shape_.tokens, top_k, shape_.experts};
        std::vector<std::int32_t> words(static_cast<std::size_t>(tables.count()));
        tables.words = words.data();
        for (int place = 0; place < places; ++place) {
            const int id =
                tokens_[place / (shape_.tokens * top_k)].ids[place % (shape_.tokens * top_k)];
            tables.ids()[place] = id >= shape_.world() * shape_.experts ? -1 : id;
        }
        const auto lists = moe::lists_for(reads);
        const auto waiter = cuda::waiter_of(reads.workspace, ranks_.limits(rank),
                                            transport::Waiter::compute_kernel);
        const std::uint64_t epoch = reads.workspace.control().state.epoch;
        CHECK(waiter.until(reads.workspace.flags(rank)[lists.listed_flag()], epoch, {0, 0, 0}));
        for (int other = 0; other < shape_.world(); ++other) {  // whose tokens nobody sends here
            if (ranks_.near(other, rank)) reads.workspace.flags(rank)[other].set(epoch);
        }
        int rows = 0;
        for (int expert = 0; expert < shape_.experts; ++expert) {
            const int first = rows;
            for (int place = 0; place < places; ++place) {
                if (tables.ids()[place] != rank * shape_.experts + expert) continue;
                if (ranks_.near(place / (shape_.tokens * top_k), rank)) continue;
                tables.row_place()[rows++] = place;
            }
            if (rows == first) continue;
            moe::wait_for_tokens(reads, waiter, epoch, first, rows - first);
            for (int row = first; row < rows; ++row) {
                const int token = tables.row_place()[row] / top_k;
                const char* const from = tokens_[token / shape_.tokens].x.data() +
                                         token % shape_.tokens * shape_.row_bytes;
                CHECK(std::memcmp(moe::token_row(reads, row), from, shape_.row_bytes) == 0);
            }
            if (first == 0) ++started_;
        }
        CHECK(rows > 0);  // else nothing would start
        moe::wait_for_all_tokens(reads, waiter, epoch);
    }

    // A rank's puts: its ids, and each token once to each rank, or each node on the own rail, that wants it.
    void judge_bytes(int rank) {
        for (int peer = 0; peer < shape_.world(); ++peer) {
            const bool exchanges =
                !ranks_.near(rank, peer) &&
                (!shape_.hierarchical || peer % shape_.local == rank % shape_.local);
            std::uint64_t bytes = 0;
            if (exchanges) {
                const int first = shape_.hierarchical ? peer / shape_.local * shape_.local : peer;
                bytes = shape_.ids_bytes();
                for (int token = 0; token < shape_.tokens; ++token) {
                    if (wants(rank, token, first, shape_.hierarchical ? shape_.local : 1)) {
                        bytes += shape_.row_bytes;
                    }
                }
            }
            CHECK(ranks_[rank].put[peer] == bytes);
        }
    }

    Shape shape_;
    std::atomic<int> started_ = 0;
    Ranks ranks_;
    std::vector<Tokens> tokens_;
};

void crosses(const Shape& shape) {
    World world(shape);
    for (unsigned call = 0; call < 2; ++call) world.call(call);
}

TEST(directly_to_each_rank) {
    crosses({2, 2, 100, 3, 5, 4, false, true});
    crosses({2, 1, 70, 2, 40, 16, false, false});
}

TEST(once_to_each_node_and_from_there_to_those_that_want_it) {
    crosses({2, 2, 70, 2, 40, 7, true, false});
    crosses({3, 2, 40, 4, 2, 3, true, true});
}

}  // namespace

int main(int argc, char** argv) {
    return mkernel::nics::testing::run(argc, argv);
}
