// Ascend's handshake in every interleaving: how a rank announces what is in place at another one
// (kernels/announce.hpp) and when it may write there again (kernels/release.hpp), of ranks of one node and, over
// NICs, of two.
#include <array>
#include <string>
#include <vector>

#include "backends/accelerators/ascend/kernels/release.hpp"
#include "backends/transport/signal.hpp"
#include "tests/native/model/protocol.hpp"

using namespace mkernel;
using mkernel::model::scenario;

namespace {

constexpr int kMostRanks = 3, kMostBlocks = 2;
constexpr std::uint32_t kWords = ascend::words_needed(kMostBlocks, 1);

// What is wrong with the calls.
enum class Planted {
    nothing,
    early,       // a block releases before it has read
    unreleased,  // a writer does not wait for the reader's release
    unread,      // an outbox is written again without the other node's release
    one_block,   // block 0 releases without waiting for the others
    one_memory,  // even and odd calls share an inbox
    one_word,    // even and odd calls share remote words
    no_count,    // waits are for what a call adds, whatever was there before
};

struct Words {
    std::array<transport::AddedWord, kWords> words;
    std::array<transport::ExpectedCount, kWords> expected;
};

// One block of one call, as kernels see their core.
class Core {
  public:
    Core(Words& own, std::uint32_t index, std::uint32_t count, bool counted,
         std::vector<transport::PutCommand>* commands, transport::AddedWord* pushed)
        : own_(own),
          index_(index),
          count_(count),
          counted_(counted),
          commands_(commands),
          pushed_(pushed) {}

    void annotate(std::uint32_t) {}
    void fence() {}  // simulated stores have taken effect; additions release
    [[nodiscard]] std::uint32_t index() const { return index_; }
    [[nodiscard]] std::uint32_t count() const { return count_; }

    void tnotify(std::uint32_t, std::byte* pad, std::uint32_t word, std::uint64_t value) {
        reinterpret_cast<Words*>(pad)->words[word].add(value);
    }
    bool nic_put(const transport::PutCommand& command) {
        commands_->push_back(command);
        pushed_->add(1);
        return true;
    }
    bool twait(std::uint32_t word, std::int64_t amount, std::uint32_t) {
        model::reads(&own_.expected[word]);
        const auto before =
            counted_ ? static_cast<std::int64_t>(own_.expected[word].value) : std::int64_t{0};
        const std::int64_t wanted = before + amount;
        while (static_cast<std::int64_t>(own_.words[word].load()) < wanted) model::yield();
        return true;
    }

  private:
    Words& own_;
    std::uint32_t index_, count_;
    bool counted_;
    std::vector<transport::PutCommand>* commands_;
    transport::AddedWord* pushed_;
};

// Calls of kernels on some ranks: each block of a sender writes into a slot of every peer's inbox and announces it;
// each block waits for what the senders announce to it, reads, and releases. Between nodes senders write their
// outbox, and a NIC, a thread of its rank, takes what is put. Who hears of everybody in every call is never two
// calls ahead; releases matter to senders that nobody answers.
class Calls : public model::Scenario {
  public:
    Calls(int ranks, int senders, int blocks, bool nodes, std::uint64_t calls, Planted planted)
        : ranks_(static_cast<std::uint32_t>(ranks)),
          senders_(static_cast<std::uint32_t>(senders)),
          blocks_(static_cast<std::uint32_t>(blocks)),
          nodes_(nodes),
          calls_(calls),
          planted_(planted) {
        for (Rank& rank : all_) {
            for (std::uint32_t word = 0; word < kWords; ++word) {
                const bool local = word == ascend::word_of(ascend::Local{0});
                model::name(&rank.pad.words[word], word < ascend::kMaxWorld ? "released"
                                                   : local                  ? "finished"
                                                                            : "announced");
            }
        }
    }

    std::vector<std::function<void()>> threads() override {
        std::vector<std::function<void()>> threads;
        for (std::uint32_t rank = 0; rank < ranks_; ++rank) {
            for (std::uint32_t block = 0; block < blocks_; ++block) {
                threads.emplace_back([this, rank, block] { run(rank, block); });
            }
            if (nodes_) threads.emplace_back([this, rank] { nic(rank); });
        }
        return threads;
    }

    // Every addition has come, and none that nobody waits for.
    std::string wrong() override {
        for (std::uint32_t rank = 0; rank < ranks_; ++rank) {
            for (std::uint32_t word = 0; word < kWords; ++word) {
                const Words& pad = all_[rank].pad;
                if (pad.words[word].value != pad.expected[word].value) {
                    return "a word is not what calls add to it";
                }
            }
        }
        return "";
    }

  private:
    using Slots = std::array<std::array<std::array<int, kMostBlocks>, kMostRanks>, 2>;
    struct Rank {
        Words pad;
        Slots inbox{}, outbox{};  // plain, by parity of the call, other rank and block
        std::vector<transport::PutCommand> commands;
        transport::AddedWord pushed;  // commands
        transport::AddedWord ended;   // blocks, of all calls
        transport::SetWord call{{1}};
    };

    // All calls of a block; the first one is the host too, which ends a call and starts the next.
    void run(std::uint32_t rank, std::uint32_t block) {
        Rank& own = all_[rank];
        for (std::uint64_t call = 1; call <= calls_; ++call) {
            while (!own.call.reached(call)) model::yield();
            kernel(rank, block, call);
            own.ended.add(1);
            if (block != 0) continue;
            while (!own.ended.reached(call * blocks_)) model::yield();
            end(rank, call);
            own.call.set(call + 1);
        }
    }

    // From how many ranks something comes to a block.
    [[nodiscard]] std::uint32_t heard_by(std::uint32_t rank) const {
        return rank < senders_ ? senders_ - 1 : senders_;
    }

    // As host/kernels.hpp says: what was added for this call, no more and no less.
    void end(std::uint32_t rank, std::uint64_t call) {
        const auto move_on = [&](std::uint32_t word, std::uint64_t amount) {
            model::writes(&all_[rank].pad.expected[word]);
            all_[rank].pad.expected[word].move_on(amount);
        };
        for (std::uint32_t peer = 0; peer < ranks_; ++peer) {
            if (peer != rank) move_on(peer, 1);
        }
        for (std::uint32_t block = 0; block < blocks_; ++block) {
            move_on(announced(block, call), heard_by(rank));
        }
        move_on(ascend::word_of(ascend::Local{0}), blocks_);
    }

    [[nodiscard]] std::uint32_t announced(std::uint32_t block, std::uint64_t call) const {
        return ascend::word_of(ascend::Remote{block}, planted_ == Planted::one_word ? 0 : call);
    }

    void kernel(std::uint32_t rank, std::uint32_t block, std::uint64_t call) {
        Rank& own = all_[rank];
        const std::size_t half = planted_ == Planted::one_memory ? 0 : call & 1;
        std::array<ascend::Peer, kMostRanks> peers{};
        for (std::uint32_t each = 0; each < ranks_; ++each) {
            if (!nodes_ || each == rank) {
                peers[each].pad = reinterpret_cast<std::byte*>(&all_[each].pad);
            }
        }
        ascend::CallArgs args;
        args.rank = rank;
        args.epoch = call;
        args.pad = reinterpret_cast<std::byte*>(&own.pad);
        args.peers = peers.data();
        Core core(own.pad, block, planted_ == Planted::one_block ? 1 : blocks_,
                  planted_ != Planted::no_count, &own.commands, &own.pushed);
        ascend::Released<Core> released(core, args, ranks_);
        if (nodes_ && rank < senders_ && planted_ != Planted::unread) {
            (void)released.wait_outbox();
        }
        for (std::uint32_t step = 1; rank < senders_ && step < ranks_; ++step) {
            const std::uint32_t peer = (rank + step) % ranks_;
            if (planted_ != Planted::unreleased && planted_ != Planted::unread) {
                (void)released.wait(peer);
            }
            model::writes(nodes_ ? &own.outbox[half][peer][block]
                                 : &all_[peer].inbox[half][rank][block]);
            core.fence();
            transport::Put put;
            if (nodes_) put = {half, slot(half, rank, block), 1};
            (void)ascend::announce(core, args, peer, announced(block, call), put);
        }
        const auto read = [&] {
            (void)core.twait(announced(block, call), heard_by(rank), rank);
            for (std::uint32_t peer = 0; peer < senders_; ++peer) {
                if (peer != rank) model::reads(&own.inbox[half][peer][block]);
            }
        };
        if (planted_ != Planted::early) read();
        (void)ascend::release(core, args, ranks_, ascend::Local{0});
        if (planted_ == Planted::early) read();
    }

    // A slot as a put names it.
    static std::uint64_t slot(std::size_t half, std::uint32_t rank, std::uint32_t block) {
        return (half * kMostRanks + rank) * kMostBlocks + block;
    }

    // Takes the rank's commands in their order: each block of a sender announces and the first block releases, to each
    // peer in each call.
    void nic(std::uint32_t rank) {
        Rank& own = all_[rank];
        const std::uint32_t a_call = (rank < senders_ ? blocks_ : 0) + 1;
        const std::uint64_t all = calls_ * a_call * (ranks_ - 1);
        for (std::uint64_t taken = 0; taken < all; ++taken) {
            while (!own.pushed.reached(taken + 1)) model::yield();
            const transport::PutCommand command = own.commands[taken];
            Rank& peer = all_[command.peer];
            if (command.bytes != 0) {
                const auto block = command.remote_offset % kMostBlocks;
                const auto from = command.remote_offset / kMostBlocks % kMostRanks;
                model::reads(&own.outbox[command.local_offset][command.peer][block]);
                model::writes(&peer.inbox[command.local_offset][from][block]);
            }
            peer.pad.words[command.signal].add(command.value);
        }
    }

    std::uint32_t ranks_, senders_, blocks_;
    bool nodes_;
    std::uint64_t calls_;
    Planted planted_;
    std::array<Rank, kMostRanks> all_{};
};

struct World {
    const char* what;
    int ranks, senders, blocks;
    bool nodes;
    std::uint64_t calls = 3;  // the third is the first that writes where another one has read
    int deviations = 2;
};

constexpr World kNode{"one node", 2, 1, 2, false};
constexpr World kNodes{"two nodes", 2, 1, 1, true};
constexpr World kAnswered{"one node, both send", 2, 2, 1, false};
constexpr World kThree{"three ranks, all send", 3, 3, 1, false};
constexpr World kWorlds[] = {kNode, kNodes, kAnswered, kThree};

model::Settings settings_of(const World& world) {
    model::Settings settings;
    settings.deviations = world.deviations;
    return settings;
}

model::Make calls(const World& world, Planted planted = Planted::nothing) {
    return scenario<Calls>(world.ranks, world.senders, world.blocks, world.nodes, world.calls,
                           planted);
}

bool right(const World& world, Planted planted = Planted::nothing) {
    return model::holds(world.what, calls(world, planted), settings_of(world)).wrong.empty();
}

TEST(what_is_announced_is_there_and_is_not_written_before_it_was_read) {
    for (const World& world : kWorlds) CHECK(right(world));
}

TEST(orders) {
    std::vector<std::pair<model::Make, model::Settings>> worlds;
    for (const World& world : kWorlds) worlds.emplace_back(calls(world), settings_of(world));
    const auto surprises = model::orders_count(worlds, {});
    CHECK(surprises.empty());
}

TEST(planted) {
    CHECK(!right(kNode, Planted::early));
    CHECK(!right(kNode, Planted::unreleased));
    CHECK(!right(kNode, Planted::one_block));
    CHECK(!right(kNode, Planted::one_memory));
    CHECK(!right(kNode, Planted::no_count));
    CHECK(!right(kNodes, Planted::early));
    CHECK(!right(kNodes, Planted::unread));
    CHECK(!right(kThree, Planted::one_word));
}

}  // namespace

int main(int argc, char** argv) {
    return nics::testing::run(argc, argv);
}
