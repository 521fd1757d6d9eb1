// Keys and values that cross between nodes, by the code of the kernel: all ranks of a world are here, threads stand for
// those of blocks, and a thread a rank for its proxy and NIC. Proxies can be made to break what they promise.
#include <array>
#include <cstring>
#include <random>
#include <vector>

#include "tests/native/cuda/host_ranks.hpp"

#include "backends/accelerators/cuda/kernels/attention/crossing.cuh"

namespace cuda = mkernel::cuda;
namespace attention = mkernel::cuda::attention;
namespace transport = mkernel::transport;
using mkernel::host_kernels::launch;
using mkernel::host_kernels::Ranks;

namespace {

enum class Break { none, word_before_bytes, put_left_out, epoch_of_before };

struct Shape {
    int nodes, local, batch, heads, rows, chunk_rows;
    bool causal, hierarchical, staged, positions;  // positions: [batch, rows, heads, width]
    int row_bytes = 32;
    [[nodiscard]] int world() const { return nodes * local; }
    [[nodiscard]] std::uint64_t bytes() const {
        return std::uint64_t{1} * batch * heads * rows * row_bytes;
    }
    [[nodiscard]] std::uint64_t area_bytes() const { return 2 * bytes() * world(); }
    [[nodiscard]] int seen(int rank, int source) const {
        return causal && source < rank ? rows / 2 : rows;
    }
    // Bytes before a row of a tensor of a rank.
    [[nodiscard]] std::uint64_t row_at(int head, int row) const {
        const int before =
            positions ? (head / heads * rows + row) * heads + head % heads : head * rows + row;
        return std::uint64_t{1} * before * row_bytes;
    }
};

class World {
  public:
    explicit World(const Shape& shape, Break broken = Break::none)
        : shape_(shape),
          broken_(broken),
          ranks_(shape.nodes, shape.local, shape.staged, shape.area_bytes(), slots_bytes()),
          tensors_(shape.world()) {
        for (auto& each : tensors_) each.fill(std::vector<char>(shape.bytes()));
        if (broken == Break::put_left_out) ranks_.patience_ns = 300'000'000u;
        ranks_.deliver = [this](const Ranks::Step& bytes, const Ranks::Step& word) {
            carry(bytes, word);
        };
    }

    // Runs one call on all ranks; returns whether all that was read was right.
    bool call(unsigned seed) {
        std::mt19937 random(seed);
        for (int rank = 0; rank < shape_.world(); ++rank) {
            for (auto& tensor : tensors_[rank]) {
                for (char& byte : tensor) byte = static_cast<char>(random());
            }
            std::memset(ranks_[rank].data(), kPoison, slots_bytes());
        }
        right_ = true;
        ranks_.run([this](int rank) { cross(rank); }, [this](int rank) { read(rank); },
                   broken_ != Break::none);
        for (int rank = 0; rank < shape_.world(); ++rank) ++ranks_.control(rank).state.epoch;
        return right_;
    }

    // Checks, after a call that nothing broke, what was sent and left behind.
    void judge() {
        for (int rank = 0; rank < shape_.world(); ++rank) {
            CHECK(ranks_.control(rank).crossing == 0);
            for (int peer = 0; peer < shape_.world(); ++peer) {
                const bool exchanges = !ranks_.near(rank, peer) &&
                                       (!shape_.hierarchical || (peer - rank) % shape_.local == 0);
                const std::uint64_t seen = shape_.bytes() / shape_.rows * shape_.seen(peer, rank);
                CHECK(ranks_[rank].put[peer] == (exchanges ? 2 * seen : 0));
                if (peer == rank) continue;
                const char* const slot = slot_of(rank, peer);
                for (int row = shape_.seen(rank, peer); row < shape_.rows; ++row) {
                    CHECK(slot[row * shape_.row_bytes] == kPoison);
                }
            }
        }
    }

  private:
    static constexpr char kPoison = 0x5A;

    [[nodiscard]] std::uint64_t slots_bytes() const {
        return shape_.area_bytes() - 2 * shape_.bytes();
    }
    [[nodiscard]] const char* slot_of(int rank, int source) {
        const int slot = attention::slot_of(rank, source, shape_.world(), shape_.local);
        return ranks_[rank].data() + 2 * shape_.bytes() * slot;
    }

    [[nodiscard]] attention::KeysCrossing args(int rank) {
        attention::KeysCrossing made{};
        made.workspace = ranks_.workspace(rank);
        made.limits = ranks_.limits(rank);
        made.chunks = {shape_.batch * shape_.heads, shape_.rows, shape_.chunk_rows};
        const std::int64_t width = shape_.row_bytes / 2;
        const std::int64_t batch = width * shape_.heads * shape_.rows;
        const auto rows = [&](std::vector<char>& of) {
            return shape_.positions ? attention::Rows{of.data(), batch, width, width * shape_.heads}
                                    : attention::Rows{of.data(), batch, width * shape_.rows, width};
        };
        made.k = rows(tensors_[rank][0]);
        made.v = rows(tensors_[rank][1]);
        made.kv_heads = shape_.heads;
        made.row_bytes = shape_.row_bytes;
        made.put_blocks = 2;
        made.causal = shape_.causal;
        made.hierarchical = shape_.hierarchical;
        return made;
    }

    void cross(int rank) {
        const attention::KeysCrossing made = args(rank);
        using Shared = attention::CrossingShared;
        launch<Shared>(5, 32, [&](Shared& shared) { attention::cross_keys(made, shared); });
    }

    // Reads, as the kernel does, the chunks of each other rank as soon as it may.
    void read(int rank) {
        const attention::KeysCrossing made = args(rank);
        const cuda::Workspace& workspace = made.workspace;
        const auto waiter =
            cuda::waiter_of(workspace, made.limits, transport::Waiter::compute_kernel);
        const std::uint64_t epoch =
            workspace.control().state.epoch - (broken_ == Break::epoch_of_before ? 1 : 0);
        const auto arrives = [&](std::uint32_t flag) {
            const bool here = waiter.until(workspace.flags(rank)[flag], epoch, {flag, 0, flag});
            if (!here) right_ = false;
            return here;
        };
        if (!arrives(attention::kCrossingFlag)) return;
        for (int head = 0; head < shape_.batch * shape_.heads; ++head) {
            for (int source = 0; source < shape_.world(); ++source) {
                if (source == rank) continue;
                for (int row = 0; row < shape_.seen(rank, source); ++row) {
                    const int chunk = head * made.chunks.of_head() + row / shape_.chunk_rows;
                    if (!arrives(made.chunks.flag(source, chunk))) return;
                    for (int which = 0; which < 2; ++which) {
                        const char* const at = slot_of(rank, source) + which * shape_.bytes() +
                                               (head * shape_.rows + row) * shape_.row_bytes;
                        const char* const from =
                            tensors_[source][which].data() + shape_.row_at(head, row);
                        if (std::memcmp(at, from, shape_.row_bytes) != 0) right_ = false;
                    }
                }
            }
        }
    }

    void carry(const Ranks::Step& bytes, const Ranks::Step& word) {
        const bool left_out = broken_ == Break::put_left_out && ++puts_ == 3;
        if (broken_ == Break::word_before_bytes) {
            word();
            std::this_thread::sleep_for(std::chrono::milliseconds(20));
        }
        if (!left_out) bytes();
        if (broken_ != Break::word_before_bytes && !left_out) word();
        // Who does not wait for both puts of a chunk reads before the second.
        std::this_thread::sleep_for(std::chrono::microseconds(200));
    }

    Shape shape_;
    Break broken_;
    int puts_ = 0;
    Ranks ranks_;
    std::vector<std::array<std::vector<char>, 2>> tensors_;  // keys, values
    std::atomic<bool> right_ = true;
};

void crosses(const Shape& shape) {
    World world(shape);
    for (unsigned call = 0; call < 2; ++call) {
        CHECK(world.call(call));
        world.judge();
    }
}

TEST(one_rank_a_node) {
    crosses({2, 1, 2, 2, 24, 8, false, false, false, false});
    crosses({3, 1, 1, 3, 20, 7, true, false, true, true});
}

TEST(directly_to_each_rank) {
    crosses({2, 2, 1, 2, 16, 4, true, false, false, true});
    crosses({2, 3, 2, 1, 8, 3, false, false, true, false});
}

TEST(once_to_each_node_and_from_there_to_its_ranks) {
    crosses({2, 2, 1, 3, 16, 5, true, true, false, false});
    crosses({3, 2, 2, 1, 12, 4, true, true, true, true});
}

TEST(slots_are_in_the_order_of_reading) {
    for (int local : {1, 2, 4, 8}) {
        for (int rank = 0; rank < 8; ++rank) {
            int found = 0;
            for (const bool near : {true, false}) {
                for (int step = 1; step < 8; ++step) {
                    const int source = (rank - step + 8) % 8;
                    if ((source / local == rank / local) != near) continue;
                    CHECK(attention::slot_of(rank, source, 8, local) == found);
                    ++found;
                }
            }
        }
    }
}

TEST(a_word_before_its_bytes_is_seen) {
    CHECK(
        !World({2, 1, 1, 2, 16, 8, false, false, false, false}, Break::word_before_bytes).call(7));
    CHECK(!World({2, 2, 1, 2, 16, 8, false, true, true, false}, Break::word_before_bytes).call(7));
}

TEST(a_chunk_that_is_left_out_is_waited_for_in_vain) {
    CHECK(!World({2, 2, 1, 2, 16, 8, false, true, false, false}, Break::put_left_out).call(7));
}

TEST(a_flag_of_the_call_before_is_seen) {
    CHECK(!World({2, 1, 1, 2, 16, 8, false, false, true, false}, Break::epoch_of_before).call(7));
}

}  // namespace

int main(int argc, char** argv) {
    return mkernel::nics::testing::run(argc, argv);
}
