// Put-with-signal in every interleaving: the backends' own code between two ranks, over a network that
// does anything a queue pair may. What is to hold is named in nics/verbs/verbs_nic.hpp.
#include <algorithm>
#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "backends/nics/cx7/rc_nic.hpp"
#include "backends/nics/efa/srd_nic.hpp"
#include "backends/transport/signal.hpp"
#include "tests/native/model/protocol.hpp"
#include "tests/native/model/wire.hpp"

using namespace mkernel;
using mkernel::model::Broken;
using mkernel::model::kBlock;
using nics::PutResult;
using transport::PutCommand;

namespace {

constexpr std::uint32_t kRegion = 7, kBlocks = 16, kSignals = 4;

// One put: so many blocks from this one on, at the same place there; it adds `value` to its signal.
struct Sent {
    std::uint32_t first = 0, blocks = 0, signal = 0, value = 1;
};

struct Shape {
    bool srd = false;
    std::uint32_t lanes = 1;
    std::vector<Sent> puts;
    std::uint32_t depth = 16, receives = 16;
    std::uint64_t message_blocks = 1;  // that one message carries
    std::uint32_t stripe_blocks = 2;   // of a put that is spread
    Broken broken = Broken::nothing;
    std::uint32_t receives_claimed = 0;  // beside those there are
};

class Puts : public model::Scenario, nics::SignalSink {
  public:
    explicit Puts(Shape shape)
        : shape_(std::move(shape)), network_(shape_.message_blocks * kBlock, shape_.broken) {
        for (std::uint32_t i = 0; i < kBlocks; ++i) {
            sender_.data[i * kBlock] = static_cast<std::byte>(i + 1);
        }
        for (Rank* rank : {&sender_, &receiver_}) {
            network_.data(address(*rank), kBlocks * kBlock);
            rank->nic = make();
        }
        const std::vector<std::uint32_t> rails(shape_.lanes, 0);
        auto there = receiver_.nic->add_peer(0, rails);
        const auto here = sender_.nic->add_peer(1, rails);
        for (nics::Endpoint& each : there) each.receives += shape_.receives_claimed;
        sender_.nic->connect(1, there);
        receiver_.nic->connect(0, here);
        sender_.nic->register_memory(kRegion, {address(sender_), kBlocks * kBlock});
        const auto key =
            receiver_.nic->register_memory(kRegion, {address(receiver_), kBlocks * kBlock});
        sender_.nic->bind(kRegion, 1, key);
        for (transport::AddedWord& word : words_) model::name(&word, "signal");
        for (const Sent& put : shape_.puts) wanted_[put.signal] += put.value;
    }

    std::vector<std::function<void()>> threads() override {
        return {[this] { send(); }, [this] { carry(); }, [this] { receive(); }, [this] { read(); }};
    }
    std::string wrong() override {
        for (std::uint32_t i = 0; i < kSignals; ++i) {
            if (words_[i].value != wanted_[i]) return "a signal stands at another value";
        }
        return "";
    }

  private:
    struct Rank {
        alignas(kBlock) std::array<std::byte, kBlocks * kBlock> data{};
        std::unique_ptr<nics::Nic> nic;
    };

    static std::uint64_t address(const Rank& rank) {
        return reinterpret_cast<std::uint64_t>(rank.data.data());
    }

    [[nodiscard]] std::unique_ptr<nics::Nic> make() const {
        // This executable, which has the network's verbs.
        static const auto verbs = nics::verbs::Verbs::load("");
        nics::verbs::Options options;
        options.queue_depth = shape_.depth;
        options.receive_depth = shape_.receives;
        options.stripe_bytes = shape_.stripe_blocks * kBlock;
        const std::vector<nics::verbs::PortName> ports{{"model0", 1}};
        if (shape_.srd) return std::make_unique<nics::efa::SrdNic>(verbs, "", ports, options);
        return std::make_unique<nics::cx7::RcNic>(verbs, ports, options);
    }

    static void works(const nics::Nic& nic) {
        if (const auto failure = nic.failure()) throw std::runtime_error(failure->message);
    }

    // The sender's proxy, and its kernel, which writes over what it sent as soon as that is complete.
    void send() {
        nics::Nic& nic = *sender_.nic;
        const auto poll = [&] {
            const int got = nic.poll(*this);
            works(nic);
            if (got == 0) model::yield();
        };
        for (const Sent& put : shape_.puts) {
            PutCommand command;
            command.local_offset = command.remote_offset = put.first * kBlock;
            command.bytes = put.blocks * kBlock;
            command.peer = 1;
            command.region = kRegion;
            command.signal = put.signal;
            command.value = put.value;
            nics::PutCursor cursor;
            while (nic.put(command, cursor) == PutResult::busy) {
                nic.ring();
                poll();
            }
            works(nic);
        }
        nic.ring();
        nic.mark(0);
        while (!nic.reached_mark(0)) poll();
        for (const Sent& put : shape_.puts) {
            model::writes_bytes(address(sender_) + put.first * kBlock, put.blocks * kBlock);
            std::fill_n(sender_.data.begin() + put.first * kBlock, put.blocks * kBlock,
                        std::byte{0xff});
        }
        transport::store_release(&sent_, 1);
    }

    void carry() {
        while (transport::load_acquire(&sent_) == 0 || transport::load_acquire(&read_) == 0) {
            if (!network_.step()) model::yield();
        }
    }

    // The receiver's proxy.
    void receive() {
        while (transport::load_acquire(&read_) == 0) {
            const int got = receiver_.nic->poll(*this);
            works(*receiver_.nic);
            if (got == 0) model::yield();
        }
    }
    bool raise(std::uint32_t peer, std::uint32_t signal, std::uint64_t value) override {
        model::require(peer == 0 && signal < kSignals, "a signal of nobody");
        words_[signal].add(value);
        model::require(words_[signal].load() <= wanted_[signal], "a signal is raised twice");
        return true;
    }

    // The receiver's kernel.
    void read() {
        for (std::uint32_t signal = 0; signal < kSignals; ++signal) {
            while (!words_[signal].reached(wanted_[signal])) model::yield();
            for (const Sent& put : shape_.puts) {
                if (put.signal != signal) continue;
                model::reads_bytes(address(receiver_) + put.first * kBlock, put.blocks * kBlock);
                for (std::uint32_t i = put.first; i < put.first + put.blocks; ++i) {
                    model::require(receiver_.data[i * kBlock] == static_cast<std::byte>(i + 1),
                                   "bytes are not there although their signal is");
                }
            }
        }
        transport::store_release(&read_, 1);
    }

    Shape shape_;
    model::Network network_;
    Rank sender_, receiver_;
    std::array<transport::AddedWord, kSignals> words_{};
    std::array<std::uint64_t, kSignals> wanted_{};
    std::uint64_t sent_ = 0, read_ = 0;
};

Shape broken(Shape shape, Broken how) {
    shape.broken = how;
    return shape;
}

// Puts of one queue pair that are cut into messages; whole ones and one that needs a group on SRD.
Shape one_lane(bool srd) {
    return {.srd = srd, .puts = {{0, 2, 0}, {2, 1, 1}}};
}
// A put spread over two queue pairs, whose group's number is used a third time, and small ones between.
Shape two_lanes(bool srd) {
    return {.srd = srd, .lanes = 2, .puts = {{0, 2, 0}, {2, 2, 1}, {4, 1, 2}, {5, 2, 1}}};
}
// More immediates than there are receives.
Shape few_receives(bool srd) {
    return {.srd = srd, .puts = {{0, 1, 0}, {1, 1, 0}, {2, 1, 0}, {3, 1, 1}}, .receives = 2};
}
// A queue that is full in the middle of a put.
Shape short_queue(bool srd) {
    return {.srd = srd, .puts = {{0, 3, 0}, {3, 2, 1}}, .depth = 2, .stripe_blocks = 8};
}
// A value that no immediate holds beside its signal.
Shape large_value(bool srd) {
    return {.srd = srd, .lanes = 2, .puts = {{0, 1, 0, 1000}, {1, 0, 1, 300}}};
}

bool right(const char* what, const Shape& shape, int deviations) {
    model::Settings settings;
    settings.deviations = deviations;
    return model::holds(what, model::scenario<Puts>(shape), settings).wrong.empty();
}

// One put that is cut into two messages, more closely.
Shape one_put(bool srd) {
    return {.srd = srd, .puts = {{0, 2, 0}}};
}

TEST(one_queue_pair) {
    for (const bool srd : {false, true}) {
        CHECK(right("one put", one_put(srd), 2));
        CHECK(right("two", one_lane(srd), srd ? 1 : 2));
    }
}

// One that is spread.
Shape spread_put(bool srd) {
    return {.srd = srd, .lanes = 2, .puts = {{0, 2, 0}}};
}

TEST(several_queue_pairs) {
    CHECK(right("RC", two_lanes(false), 1));
    CHECK(right("SRD", two_lanes(true), 1));
    CHECK(right("one put, RC", spread_put(false), 2));
    CHECK(right("one put, SRD", spread_put(true), 2));
}

TEST(what_is_short) {
    for (const bool srd : {false, true}) {
        CHECK(right("receives", few_receives(srd), 1));
        CHECK(right("requests", short_queue(srd), 1));
        CHECK(right("bits of a value", large_value(srd), 1));
    }
}

// Groups on SRD, of which the third has the first one's number.
Shape three_groups() {
    return {.srd = true, .puts = {{0, 2, 0}, {2, 2, 1}, {4, 2, 2}}};
}

TEST(numbers_of_groups) {
    CHECK(right("SRD", three_groups(), 1));
}

TEST(planted) {
    CHECK(!right("SRD as RC", broken(one_lane(false), Broken::rc_reorders), 2));
    for (const bool srd : {false, true}) {
        CHECK(!right("complete too early", broken(one_lane(srd), Broken::completes_early), 1));
        CHECK(!right("the same, spread", broken(two_lanes(srd), Broken::completes_early), 1));
        CHECK(!right("arrived too early", broken(one_lane(srd), Broken::arrives_early), 1));
        Shape generous = few_receives(srd);
        generous.receives_claimed = 2;
        CHECK(!right("sent without a receive", generous, 1));
    }
    // Its number is used again when some of it is still on its way.
    CHECK(!right("a group's number too early", broken(three_groups(), Broken::holds_one_back), 0));
    CHECK(!right("a group of one less", broken(one_lane(true), Broken::loses_the_last), 1));
    CHECK(!right("the same, spread", broken(two_lanes(false), Broken::loses_the_last), 1));
}

}  // namespace

int main(int argc, char** argv) {
    return nics::testing::run(argc, argv);
}
