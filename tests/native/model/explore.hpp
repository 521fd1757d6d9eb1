// Runs a few threads in every order that matters, and says what went wrong in one of them.
//
// A *scenario* makes its state, names its threads and, when all have ended, checks what they left. Its
// threads run one at a time on stacks of their own and are changed at atomic operations only. The headers
// under test are the real ones; they reach their words through `transport::shared`, and the includes of
// `shadow/` put this model there.
//
// What an operation sees. Each location keeps all its stores. A thread has a *view*, the oldest store of
// each location that it may still read, and a clock of what happened before. A release leaves both with
// its store, read-modify-writes pass on what the store they replace carried (the release sequence), and an
// acquire takes them over. A fence makes releases of the plain stores behind it, and an acquire of the plain
// loads before it. A load may read any store from its view on; a sequentially consistent one, none
// older than what such operations saw before it. Plain data has no views: an access that is not ordered
// after another one, of which one writes, is a race. Modification order is the order of execution.
//
// How much is tried. Every choice is tried depth first: which thread goes on at each operation, which store
// each load reads. All executions with at most `deviations` choices off the plain course (a thread is left
// that could go on; of those that can when one cannot, another goes on than the next in turn; a store is
// read that is not the newest) are run, and none twice.
//
// Waiting. A thread that yields goes on when something was stored since, and by then sees what is newest,
// unordered: time passes. One that sleeps goes on when it is woken. Where nobody can go on, or threads have
// yielded often, the scenario's deadline passes, if it has one; else the run is stuck where nobody can.
#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

namespace mkernel::model {

struct Scenario {
    virtual ~Scenario() = default;
    // One function a thread. Called once, before any runs.
    virtual std::vector<std::function<void()>> threads() = 0;
    // After all have ended: what is wrong, or nothing.
    virtual std::string wrong() { return {}; }
};

enum class Order { relaxed, acquire, release, acq_rel, seq_cst };

// One kind of operation (load, store, change) on the words of one name, and its order; or, as a planted
// bug, less than its order.
struct Operation {
    std::string word;
    std::string kind;
    Order order;
    auto operator<=>(const Operation&) const = default;
};
struct Weaker {
    Operation of;
    Order to;
};

struct Settings {
    int deviations = 3;
    bool deadline = false;  // waits may time out
    std::uint64_t most_executions = 3'000'000;
    std::optional<Weaker> weaker;
};

struct Found {
    std::uint64_t executions = 0;
    std::string wrong;               // of the first execution that was; empty: of none
    std::set<Operation> operations;  // all of named words
};

using Make = std::function<std::unique_ptr<Scenario>()>;
Found explore(const Make& make, const Settings& settings = {});

// Every way to do one operation of those with less order.
std::vector<Weaker> weaker(const std::set<Operation>& operations);
std::string text(const Weaker& weaker);

// ---- for scenarios

// The word is called so in `Weaker`. Words that have no name are not weakened.
void name(const void* word, const std::string& called);
// An access of plain data; the address stands for all of it.
void reads(const void* data);
void writes(const void* data);
// What is wrong already; the execution ends here.
void require(bool held, const char* what);
// One of so many ways to go on, below `options`; any but 0 is a deviation.
std::size_t choose(std::size_t options);
// Until the eventfd was rung. Sleeps as poll does.
void poll(int eventfd);

// ---- for what stands in the shadow of the transport's headers

std::uint64_t load(const void* word, std::size_t bytes, Order order);
void store(void* word, std::size_t bytes, std::uint64_t value, Order order);
// `next`: what to store in place of what is there, or nothing. Returns what was there.
std::uint64_t change(void* word, std::size_t bytes, Order order,
                     const std::function<std::optional<std::uint64_t>(std::uint64_t)>& next);
// A thread's fence for all it did and does, an acquire and a release.
void fence();
// Planted: false, and fences do nothing.
inline bool fences = true;
void sleep_while(const void* word, std::uint32_t seen);
void wake_all(const void* word);
void ring(int eventfd);
void hush(int eventfd);
void yield();
std::uint64_t now_ns();

}  // namespace mkernel::model
