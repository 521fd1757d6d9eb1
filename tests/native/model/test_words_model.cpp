// Words and the waits for them in every interleaving: who sees a word sees the data, no wake-up is lost, and
// no call's data is overwritten while somebody still reads it. The ends of calls are in test_call_end_model.cpp.
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
    Padded() : memory_(SignalPad::bytes(1), false), pad(SignalPad::format(memory_.data(), 1)) {
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

// Ranks that send each other mail in several calls (cuda's device/mailbox.cuh): a word that is not zero has
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

// Calls of two exchanges by mail: owners add up what comes from all ranks and send sums to all (cuda's
// kernels/collectives/mail.hpp). Nothing but two things orders one word with another: a grid begins when
// the grid before it on its device has completed, and a sum is made of what has come; each is a fence here.
// A reader clears words late, behind the sums that it sends. All ranks own something in odd calls, and
// `owners` in even ones, where the others hear of each other through these. `epoch_each`: an exchange is an
// epoch, with all of that epoch's area. Of several rows, the next one's terms are sent before the terms of this one
// are awaited, and those before the sums of the row before.
template <int kRanks, int kRows = 1>
class MailTwice : public model::Scenario {
  public:
    MailTwice(int owners, std::uint64_t calls, bool epoch_each)
        : owners_(owners), calls_(calls), epoch_each_(epoch_each) {}

    std::vector<std::function<void()>> threads() override {
        std::vector<std::function<void()>> all;
        for (int rank = 0; rank < kRanks; ++rank) {
            all.emplace_back([this, rank] {
                for (std::uint64_t call = 1; call <= calls_; ++call) run(rank, call);
            });
        }
        return all;
    }
    std::string wrong() override {
        for (const auto& of_rank : places_) {
            for (const auto& from : of_rank) {
                for (const Place& each : from) {
                    if (transport::load_relaxed(&each.word) != 0)
                        return "the area is not all zeros";
                }
            }
        }
        return "";
    }

  private:
    static constexpr std::uint64_t kMostEpochs = 8;

    struct Place {
        std::uint64_t word = 0;
        char zeros[kMostEpochs + 1]{};  // that were written back after the mail of an epoch
    };
    struct Exchange {
        std::uint64_t epoch;
        std::size_t place;
    };

    Exchange exchange(std::uint64_t call, int which, int row) const {
        if (epoch_each_) {
            const std::uint64_t epoch = 2 * call - 1 + which;
            return {epoch, epoch % 2 * kRows + row};
        }
        return {call, (call % 2 * 2 + which) * kRows + row};
    }
    void send(int rank, int peer, const Exchange& exchange) {
        Place& place = places_[peer][rank][exchange.place];
        if (exchange.epoch > 2) model::reads(&place.zeros[exchange.epoch - 2]);
        model::require(transport::load_relaxed(&place.word) == 0, "mail on mail");
        transport::store_relaxed(&place.word, exchange.epoch);
    }
    void look(int rank, int peer, const Exchange& exchange) {
        std::uint64_t found = 0;
        while ((found = transport::load_relaxed(&places_[rank][peer][exchange.place].word)) == 0) {
            transport::yield();
        }
        model::require(found == exchange.epoch, "mail of another call");
    }
    void clear(int rank, int peer, const Exchange& exchange) {
        Place& place = places_[rank][peer][exchange.place];
        model::writes(&place.zeros[exchange.epoch]);
        transport::store_relaxed(&place.word, 0);
    }
    void run(int rank, std::uint64_t call) {
        const auto parts = [&](int row) { return exchange(call, 0, row); };
        const auto sums = [&](int row) { return exchange(call, 1, row); };
        const int owners = call % 2 == 1 ? kRanks : owners_;
        const auto peers = [&](int upto, const auto& visit) {
            for (int step = 1; step < kRanks; ++step) {
                if (const int peer = (rank + step) % kRanks; peer < upto) visit(peer);
            }
        };
        model::fence();
        for (int turn = 0; turn < kRows + 2; ++turn) {
            if (turn < kRows) peers(owners, [&](int peer) { send(rank, peer, parts(turn)); });
            if (const int row = turn - 1; 0 <= row && row < kRows && rank < owners) {
                peers(kRanks, [&](int peer) { look(rank, peer, parts(row)); });
                model::fence();
                peers(kRanks, [&](int peer) { send(rank, peer, sums(row)); });
                peers(kRanks, [&](int peer) { clear(rank, peer, parts(row)); });
            }
            if (const int row = turn - 2; 0 <= row) {
                peers(owners, [&](int peer) { look(rank, peer, sums(row)); });
                peers(owners, [&](int peer) { clear(rank, peer, sums(row)); });
            }
        }
    }

    int owners_;
    std::uint64_t calls_;
    bool epoch_each_;
    std::array<std::array<std::array<Place, 4 * kRows>, kRanks>, kRanks> places_{};  // to, from
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

TEST(mail_of_several_calls) {
    CHECK(right("2 ranks", scenario<Mail<2>>(2u, 5u)));
    CHECK(right("3 ranks", scenario<Mail<3>>(2u, 3u), late()));
    CHECK(!right("one area", scenario<Mail<2>>(1u, 3u)));
}

TEST(calls_of_two_exchanges_by_mail) {
    CHECK(right("2 ranks", scenario<MailTwice<2>>(2, 3u, false)));
    CHECK(right("2 ranks, of which 1 owns", scenario<MailTwice<2>>(1, 4u, false)));
    CHECK(right("3 ranks, of which 1 owns", scenario<MailTwice<3>>(1, 3u, false), late()));
    CHECK(right("2 ranks, 2 rows", scenario<MailTwice<2, 2>>(2, 3u, false), late()));
    CHECK(
        right("2 ranks, of which 1 owns, 3 rows", scenario<MailTwice<2, 3>>(1, 3u, false), late()));
    CHECK(!right("an epoch each", scenario<MailTwice<2>>(2, 2u, true)));
    model::fences = false;
    const bool unordered = right("grids without order", scenario<MailTwice<2>>(2, 3u, false));
    const bool of_rows =
        right("the same of 2 rows", scenario<MailTwice<2, 2>>(2, 3u, false), late());
    model::fences = true;
    CHECK(!unordered);
    CHECK(!of_rows);
}

TEST(additions_of_several_calls) {
    CHECK(right("ended calls", scenario<Added>(true)));
    CHECK(!right("a fast writer's next addition", scenario<Added>(false)));
}

TEST(orders_of_calls) {
    const auto surprises =
        model::orders_count({{scenario<Mail<2>>(2u, 5u), {}}, {scenario<Added>(true), {}}}, {});
    CHECK(surprises.empty());
}

}  // namespace

int main(int argc, char** argv) {
    return nics::testing::run(argc, argv);
}
