// The model itself: of known small programs it finds the outcomes that C++ allows, and no other.
#include <array>
#include <set>

#include "backends/transport/shared_word.hpp"
#include "tests/native/model/protocol.hpp"

using namespace mkernel;

namespace {

using Outcome = std::array<std::uint64_t, 2>;

// Two words, two threads, each of which comes to a number. What all executions came to is kept in `seen`.
class Litmus : public model::Scenario {
  public:
    using Body = std::uint64_t (*)(std::uint64_t& x, std::uint64_t& y);
    Litmus(Body one, Body other, std::set<Outcome>* seen) : bodies_{one, other}, seen_(seen) {}

    std::vector<std::function<void()>> threads() override {
        return {[this] { found_[0] = bodies_[0](x_, y_); },
                [this] { found_[1] = bodies_[1](x_, y_); }};
    }
    std::string wrong() override {
        seen_->insert(found_);
        return "";
    }

  private:
    std::array<Body, 2> bodies_;
    std::set<Outcome>* seen_;
    std::uint64_t x_ = 0, y_ = 0;
    Outcome found_{};
};

std::set<Outcome> outcomes(Litmus::Body one, Litmus::Body other) {
    std::set<Outcome> seen;
    model::Settings settings;
    settings.deviations = 1000;  // all
    CHECK(model::explore(model::scenario<Litmus>(one, other, &seen), settings).wrong.empty());
    return seen;
}

template <std::memory_order kStore, bool kFence = false>
std::uint64_t publish(std::uint64_t& x, std::uint64_t& y) {
    transport::shared(x).store(1, std::memory_order_relaxed);
    if (kFence) model::fence();
    transport::shared(y).store(1, kStore);
    return 0;
}

// 3: saw the flag and not the data.
template <std::memory_order kLoad, bool kFence = false>
std::uint64_t look(std::uint64_t& x, std::uint64_t& y) {
    const std::uint64_t flag = transport::shared(y).load(kLoad);
    if (kFence) model::fence();
    const std::uint64_t data = transport::shared(x).load(std::memory_order_relaxed);
    return flag == 1 && data == 0 ? 3 : flag + data;
}

TEST(messages_are_passed) {
    const Outcome stale{0, 3};
    CHECK(outcomes(publish<std::memory_order_release>, look<std::memory_order_acquire>)
              .count(stale) == 0);
    CHECK(outcomes(publish<std::memory_order_relaxed>, look<std::memory_order_acquire>)
              .count(stale) == 1);
    CHECK(outcomes(publish<std::memory_order_release>, look<std::memory_order_relaxed>)
              .count(stale) == 1);
    CHECK(outcomes(publish<std::memory_order_relaxed, true>, look<std::memory_order_relaxed, true>)
              .count(stale) == 0);
    CHECK(outcomes(publish<std::memory_order_relaxed, true>, look<std::memory_order_relaxed>)
              .count(stale) == 1);
    CHECK(outcomes(publish<std::memory_order_relaxed>, look<std::memory_order_relaxed, true>)
              .count(stale) == 1);
}

template <std::memory_order kStore, std::memory_order kLoad>
std::uint64_t mine_then_yours(std::uint64_t& mine, std::uint64_t& yours) {
    transport::shared(mine).store(1, kStore);
    return transport::shared(yours).load(kLoad);
}
template <std::memory_order kStore, std::memory_order kLoad>
std::uint64_t yours_then_mine(std::uint64_t& yours, std::uint64_t& mine) {
    return mine_then_yours<kStore, kLoad>(mine, yours);
}

TEST(stores_are_buffered) {
    const Outcome both_miss{0, 0};
    CHECK(outcomes(mine_then_yours<std::memory_order_release, std::memory_order_acquire>,
                   yours_then_mine<std::memory_order_release, std::memory_order_acquire>)
              .count(both_miss) == 1);
    CHECK(outcomes(mine_then_yours<std::memory_order_seq_cst, std::memory_order_seq_cst>,
                   yours_then_mine<std::memory_order_seq_cst, std::memory_order_seq_cst>)
              .count(both_miss) == 0);
    CHECK(outcomes(mine_then_yours<std::memory_order_seq_cst, std::memory_order_seq_cst>,
                   yours_then_mine<std::memory_order_seq_cst, std::memory_order_acquire>)
              .count(both_miss) == 1);
}

std::uint64_t twice(std::uint64_t& x, std::uint64_t&) {
    transport::shared(x).store(1, std::memory_order_relaxed);
    transport::shared(x).store(2, std::memory_order_relaxed);
    return 0;
}
// With something between, since the model has loads that follow each other find the same.
std::uint64_t in_turn(std::uint64_t& x, std::uint64_t& y) {
    const std::uint64_t first = transport::shared(x).load(std::memory_order_relaxed);
    (void)transport::shared(y).load(std::memory_order_relaxed);
    const std::uint64_t second = transport::shared(x).load(std::memory_order_relaxed);
    return 10 * first + second;
}

TEST(one_word_never_goes_back) {
    const auto seen = outcomes(twice, in_turn);
    for (const std::uint64_t allowed : {0, 1, 2, 11, 12, 22}) CHECK(seen.count({0, allowed}) == 1);
    CHECK(seen.size() == 6);
}

std::uint64_t add(std::uint64_t& x, std::uint64_t&) {
    return transport::shared(x).fetch_add(1, std::memory_order_relaxed);
}

TEST(additions_are_atomic) {
    CHECK((outcomes(add, add) == std::set<Outcome>{{0, 1}, {1, 0}}));
}

}  // namespace

int main(int argc, char** argv) {
    return nics::testing::run(argc, argv);
}
