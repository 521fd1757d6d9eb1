// Words, the waits for them and the ends of calls in every interleaving: who sees a word sees the data, no
// wake-up is lost, and no call's data is overwritten while somebody still reads it.
#include <array>

#include "backends/transport/republish.hpp"
#include "backends/transport/signal.hpp"
#include "backends/transport/signal_pad.hpp"
#include "tests/native/model/protocol.hpp"
#include "tests/native/nics/pair.hpp"

using namespace mkernel;
using mkernel::model::scenario;
using mkernel::transport::SignalPad;
using mkernel::transport::WaitResult;

namespace {

constexpr std::uint64_t kTimeout = 1'000'000'000;

// A pad in memory of its own.
class Padded : public model::Scenario {
  public:
    Padded() : memory_(SignalPad::bytes(1)), pad(SignalPad::format(memory_.data(), 1)) {
        auto* header = reinterpret_cast<transport::SignalPadHeader*>(memory_.data());
        model::name(pad.word(0), "word");
        model::name(&header->bells[0].rung, "rung");
        model::name(&header->bells[0].sleepers, "sleepers");
        model::name(&header->abort.code, "abort");
    }

  private:
    nics::testing::Memory memory_;

  protected:
    SignalPad pad;
};

// Two threads each write data and add to a word; a third waits for both.
class Wait : public Padded {
  public:
    std::vector<std::function<void()>> threads() override {
        const auto add = [this](int writer) {
            model::writes(&data_[writer]);
            pad.add(0, 1);
        };
        return {[=] { add(0); }, [=] { add(1); },
                [this] {
                    const auto deadline = transport::monotonic_ns() + kTimeout;
                    model::require(pad.wait(0, 2, deadline, {}) == WaitResult::ok,
                                   "a wait gave up");
                    for (const int& each : data_) model::reads(&each);
                }};
    }

  private:
    std::array<int, 2> data_{};
};

// Nobody adds. Two wait, one of whom passes its deadline, or a third thread aborts.
class Ended : public Padded {
  public:
    explicit Ended(bool aborts) : aborts_(aborts) {}

    std::vector<std::function<void()>> threads() override {
        const auto wait = [this] {
            const auto deadline = transport::monotonic_ns() + kTimeout;
            ++ended_[static_cast<int>(pad.wait(0, 1, deadline, {}))];
        };
        if (!aborts_) return {wait, wait};
        return {wait, wait, [this] { pad.abort(transport::AbortCode::cancelled, {}); }};
    }
    std::string wrong() override {
        const auto code = pad.aborted();
        if (ended_[0] != 0) return "a wait found what nobody added";
        if (aborts_) {
            return ended_[1] == 2 && code == transport::AbortCode::cancelled ? "" : "not aborted";
        }
        return ended_[2] > 0 && code == transport::AbortCode::timeout ? "" : "no time-out";
    }

  private:
    bool aborts_;
    int ended_[3]{};
};

// The host adds to a word, a thread republishes it, another waits for the copy.
class Republish : public Padded {
  public:
    Republish() { model::name(&copy_, "copy"); }

    std::vector<std::function<void()>> threads() override {
        return {[this] {
                    model::writes(&data_);
                    pad.add(0, 1);
                },
                [this] {
                    const transport::Republished run{pad.word(0), &expected_, &copy_, {1}};
                    model::require(
                        transport::republish(run, 7, {&abort_, kTimeout}) == WaitResult::ok,
                        "a wait gave up");
                },
                [this] {
                    while (!copy_.reached(7)) transport::yield();
                    model::reads(&data_);
                }};
    }
    std::string wrong() override {
        return expected_.value == 1 ? "" : "the expected count was not moved on";
    }

  private:
    transport::ExpectedCount expected_;
    transport::SetWord copy_;
    std::uint32_t abort_ = 0;
    int data_ = 0;
};

// How a call ends, and what is wrong with it.
enum class End {
    handshake,       // every rank hears that every other is done
    brief,           // nobody waits; memory of even and of odd calls
    not_waited_for,  // as handshake, but who has told its peers goes on
    one_memory,      // as brief, with the same memory in every call
    told_too_early,  // as handshake, told before what the call brought was read
};

// Ranks that exchange data in several calls (device/call.cuh): each writes into every peer's memory, says
// so by a set word, waits for all of its own, and reads.
template <int kRanks>
class Calls : public model::Scenario {
  public:
    Calls(End end, std::uint64_t calls) : end_(end), calls_(calls) {
        for (Rank& each : ranks_) {
            for (int peer = 0; peer < kRanks; ++peer) {
                model::name(&each.arrived[peer], "arrived");
                model::name(&each.finished[peer], "finished");
            }
        }
    }

    std::vector<std::function<void()>> threads() override {
        std::vector<std::function<void()>> all;
        for (int rank = 0; rank < kRanks; ++rank) {
            all.emplace_back([this, rank] {
                for (std::uint64_t epoch = 1; epoch <= calls_; ++epoch) call(rank, epoch);
            });
        }
        return all;
    }

  private:
    struct Rank {
        std::array<transport::SetWord, kRanks> arrived, finished;
        int inbox[kRanks][2]{};  // plain, by writer and by parity of the call
    };

    void call(int rank, std::uint64_t epoch) {
        const bool twice = end_ == End::brief;
        const std::size_t half = twice ? epoch & 1 : 0;
        const auto peers = [&](const auto& visit) {
            for (int step = 1; step < kRanks; ++step) visit((rank + step) % kRanks);
        };
        const auto told = [&](std::array<transport::SetWord, kRanks> Rank::*words) {
            peers([&](int peer) { (ranks_[peer].*words)[rank].set(epoch); });
        };
        const auto heard = [&](std::array<transport::SetWord, kRanks> Rank::*words) {
            peers([&](int peer) {
                while (!(ranks_[rank].*words)[peer].reached(epoch)) transport::yield();
            });
        };
        peers([&](int peer) { model::writes(&ranks_[peer].inbox[rank][half]); });
        told(&Rank::arrived);
        if (end_ == End::told_too_early) told(&Rank::finished);
        heard(&Rank::arrived);
        peers([&](int peer) { model::reads(&ranks_[rank].inbox[peer][half]); });
        if (end_ == End::handshake || end_ == End::not_waited_for) told(&Rank::finished);
        if (end_ == End::handshake || end_ == End::told_too_early) heard(&Rank::finished);
    }

    End end_;
    std::uint64_t calls_;
    std::array<Rank, kRanks> ranks_{};
};

// Ranks that send each other mail in several calls (hopper's device/mailbox.cuh): a word that is not zero has
// come, and its reader writes zero back, which must be ordered before what is sent there next. `halves`: areas,
// by the number of the call. That a grid begins when the grid before has completed stands here in the orders of
// sending and looking.
template <int kRanks>
class Mail : public model::Scenario {
  public:
    Mail(std::uint64_t halves, std::uint64_t calls) : halves_(halves), calls_(calls) {
        for (auto& of_rank : words_) {
            for (auto& from : of_rank) {
                for (std::uint64_t& word : from) model::name(&word, "mail");
            }
        }
    }

    std::vector<std::function<void()>> threads() override {
        std::vector<std::function<void()>> all;
        for (int rank = 0; rank < kRanks; ++rank) {
            all.emplace_back([this, rank] {
                for (std::uint64_t epoch = 1; epoch <= calls_; ++epoch) call(rank, epoch);
            });
        }
        return all;
    }
    std::string wrong() override {
        for (const auto& of_rank : words_) {
            for (const auto& from : of_rank) {
                for (const std::uint64_t& word : from) {
                    if (transport::load_relaxed(&word) != 0) return "the area is not all zeros";
                }
            }
        }
        return "";
    }

  private:
    void call(int rank, std::uint64_t epoch) {
        const std::uint64_t half = epoch % halves_;
        for (int step = 1; step < kRanks; ++step) {
            const int peer = (rank + step) % kRanks;
            model::writes(&places_[peer][rank][half]);
            transport::store_release(&words_[peer][rank][half], epoch);
        }
        for (int step = 1; step < kRanks; ++step) {
            const int peer = (rank + step) % kRanks;
            std::uint64_t& word = words_[rank][peer][half];
            std::uint64_t found = 0;
            while ((found = transport::load_acquire(&word)) == 0) transport::yield();
            model::require(found == epoch, "mail of another call");
            model::writes(&places_[rank][peer][half]);
            transport::store_relaxed(&word, 0);
        }
    }

    template <class Each>
    using Areas = std::array<std::array<std::array<Each, 2>, kRanks>, kRanks>;  // to, from, half

    std::uint64_t halves_, calls_;
    Areas<std::uint64_t> words_{};
    Areas<char> places_{};  // the words again, as data whose stores must be ordered
};

// Two writers add to one word of a reader's, call after call, each to say that its data is there.
class Added : public model::Scenario {
  public:
    // `ends`: writers wait for the end of the call before they add for the next.
    explicit Added(bool ends) : ends_(ends) {
        model::name(&word_, "word");
        model::name(&over_, "over");
    }

    std::vector<std::function<void()>> threads() override {
        const auto write = [this](int writer) {
            for (std::uint64_t call = 1; call <= kCalls; ++call) {
                model::writes(&data_[writer][place(call)]);
                word_.add(1);
                while (ends_ && !over_.reached(call)) transport::yield();
            }
        };
        return {[=] { write(0); }, [=] { write(1); },
                [this] {
                    for (std::uint64_t call = 1; call <= kCalls; ++call) {
                        while (!word_.reached(expected_.after(2))) transport::yield();
                        model::reads(&data_[0][place(call)]);
                        model::reads(&data_[1][place(call)]);
                        expected_.move_on(2);
                        over_.set(call);
                    }
                }};
    }

  private:
    static constexpr std::uint64_t kCalls = 2;

    // Data of a call that ended may be written over.
    [[nodiscard]] std::uint64_t place(std::uint64_t call) const { return ends_ ? 0 : call; }

    bool ends_;
    transport::AddedWord word_;
    transport::SetWord over_;
    transport::ExpectedCount expected_;
    int data_[2][kCalls + 1]{};
};

model::Settings late() {
    model::Settings settings;
    settings.deviations = 2;
    settings.deadline = true;
    return settings;
}

bool right(const char* what, const model::Make& make, const model::Settings& settings = {}) {
    return model::holds(what, make, settings).wrong.empty();
}

TEST(a_wait_ends) {
    CHECK(right("by its word", scenario<Wait>()));
    CHECK(right("by an abort", scenario<Ended>(true), late()));
    CHECK(right("by its deadline", scenario<Ended>(false), late()));
    CHECK(right("by a copy of its word", scenario<Republish>()));
}

TEST(orders_of_a_wait) {
    const auto surprises = model::orders_count(
        {{scenario<Wait>(), {}}, {scenario<Ended>(true), late()}, {scenario<Republish>(), {}}},
        {{"load of abort, acquire as relaxed", "it is for who reads the diagnosis"},
         {"store of abort, release as relaxed", "likewise"},
         {"change of rung, seq_cst as acq_rel", "the count of sleepers orders the two sides"},
         {"load of rung, seq_cst as acquire", "likewise"}});
    CHECK(surprises.empty());
}

TEST(a_call_ends) {
    CHECK(right("2 ranks, handshake", scenario<Calls<2>>(End::handshake, 3u)));
    CHECK(right("3 ranks, handshake", scenario<Calls<3>>(End::handshake, 2u), late()));
    CHECK(right("2 ranks, brief", scenario<Calls<2>>(End::brief, 5u)));
    CHECK(right("3 ranks, brief", scenario<Calls<3>>(End::brief, 3u), late()));
    CHECK(!right("told, not waited for", scenario<Calls<2>>(End::not_waited_for, 3u)));
    CHECK(!right("brief, one memory", scenario<Calls<2>>(End::one_memory, 3u)));
    CHECK(!right("told too early", scenario<Calls<2>>(End::told_too_early, 3u)));
}

TEST(mail_of_several_calls) {
    CHECK(right("2 ranks", scenario<Mail<2>>(2u, 5u)));
    CHECK(right("3 ranks", scenario<Mail<3>>(2u, 3u), late()));
    CHECK(!right("one area", scenario<Mail<2>>(1u, 3u)));
}

TEST(additions_of_several_calls) {
    CHECK(right("ended calls", scenario<Added>(true)));
    CHECK(!right("a fast writer's next addition", scenario<Added>(false)));
}

TEST(orders_of_calls) {
    const auto surprises = model::orders_count({{scenario<Calls<2>>(End::handshake, 3u), {}},
                                                {scenario<Calls<2>>(End::brief, 5u), {}},
                                                {scenario<Mail<2>>(2u, 5u), {}},
                                                {scenario<Added>(true), {}}},
                                               {});
    CHECK(surprises.empty());
}

}  // namespace

int main(int argc, char** argv) {
    return nics::testing::run(argc, argv);
}
