#include "tests/native/model/explore.hpp"

#include <malloc.h>
#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <exception>
#include <map>
#include <stdexcept>
#include <unordered_map>
#include <utility>

namespace mkernel::model {
namespace {

constexpr std::size_t kMostThreads = 4;
constexpr std::size_t kMostWords = 160;
constexpr std::size_t kStackBytes = 128 << 10;
constexpr int kMostSteps = 5'000;  // of one execution
constexpr int kMostYields = 24;    // until a deadline passes
constexpr std::uint64_t kStart = 1'000'000'000;
constexpr std::uint64_t kHour = 3'600'000'000'000;

// What one thread knows of others': what happened before, and how far each word is.
struct Knowledge {
    std::array<std::uint32_t, kMostThreads> clock{};
    std::array<std::uint16_t, kMostWords> view{};

    // `words`: how many there are, which is far fewer than there may be.
    void join(const Knowledge& other, std::size_t words) {
        for (std::size_t i = 0; i < clock.size(); ++i) {
            clock[i] = std::max(clock[i], other.clock[i]);
        }
        for (std::size_t i = 0; i < words; ++i) view[i] = std::max(view[i], other.view[i]);
    }
};

struct Store {
    std::uint64_t value = 0;
    Knowledge carried;  // what an acquire of it takes over
};

struct Word {
    const void* address = nullptr;
    std::string name;
    std::vector<Store> stores;
    std::uint16_t in_order = 0;  // the newest that a sequentially consistent operation saw
};

struct Plain {
    std::size_t writer = 0;
    std::uint32_t written = 0;  // the writer's clock; 0: never
    std::array<std::uint32_t, kMostThreads> read{};
};

enum class State { ready, yielded, asleep, polling, ended };

struct Thread {
    std::function<void()> body;
    ucontext_t context{};  // where it starts
    jmp_buf place{};       // where it goes on
    State state = State::ready;
    Knowledge known;
    Knowledge fenced;    // what it knew at its latest fence
    Knowledge glimpsed;  // what the stores that it read carried: known from its next fence on
    bool begun = false;
    std::uint64_t waits_beyond = 0;   // yielded: until there are more stores
    const void* waits_for = nullptr;  // asleep
    int eventfd = -1;                 // polling
    // A load that repeats the last operation finds the same.
    const Word* last = nullptr;
    std::size_t last_stores = 0;
    std::uint64_t last_value = 0;
};

struct Choice {
    std::size_t picked = 0, options = 0;
};

// Ends a thread of an execution that is given up.
struct Abandoned {};

bool acquires(Order order) {
    return order == Order::acquire || order == Order::acq_rel || order == Order::seq_cst;
}
bool releases(Order order) {
    return order == Order::release || order == Order::acq_rel || order == Order::seq_cst;
}

std::uint64_t from_memory(const void* word, std::size_t bytes) {
    std::uint64_t value = 0;
    std::memcpy(&value, word, bytes);
    return value;
}
void to_memory(void* word, std::size_t bytes, std::uint64_t value) {
    std::memcpy(word, &value, bytes);
}

class Explorer {
  public:
    Explorer(const Make& make, const Settings& settings) : make_(make), settings_(settings) {
        for (auto& stack : stacks_) stack.resize(kStackBytes);
        ::mallopt(M_TRIM_THRESHOLD, 256 << 20);  // the next execution wants the same again
    }

    Found all() {
        do {
            if (++found_.executions > settings_.most_executions) {
                throw std::runtime_error("more executions than " +
                                         std::to_string(settings_.most_executions) +
                                         "; make the scenario smaller, or allow more");
            }
            execute();
        } while (found_.wrong.empty() && advance());
        return found_;
    }

    // Of the execution under way.
    void name(const void* word, const std::string& called) { names_[word] = called; }
    [[nodiscard]] bool in_thread() const { return running_ != nullptr; }

    std::uint64_t load(const void* address, std::size_t bytes, Order order) {
        Word& word = at(address, bytes);
        order = noted(word, "load", order);
        Thread& self = *running_;
        if (self.last == &word && self.last_stores == word.stores.size()) return self.last_value;
        point();
        const std::size_t newest = word.stores.size() - 1;
        std::size_t oldest = self.known.view[index_of(word)];
        if (order == Order::seq_cst) oldest = std::max<std::size_t>(oldest, word.in_order);
        const std::size_t seen = newest - choose(newest - oldest + 1);
        see(word, seen, order);
        self.last = &word;
        self.last_stores = word.stores.size();
        return self.last_value = word.stores[seen].value;
    }

    void store(void* address, std::size_t bytes, std::uint64_t value, Order order) {
        Word& word = at(address, bytes);
        order = noted(word, "store", order);
        point();
        add(word, value, order, nullptr);
        to_memory(address, bytes, value);
    }

    std::uint64_t change(void* address, std::size_t bytes, Order order,
                         const std::function<std::optional<std::uint64_t>(std::uint64_t)>& next) {
        Word& word = at(address, bytes);
        order = noted(word, "change", order);
        point();
        const std::size_t newest = word.stores.size() - 1;
        const std::uint64_t before = word.stores[newest].value;
        see(word, newest, order);
        if (const auto value = next(before)) {
            const Knowledge passed_on = word.stores[newest].carried;
            add(word, *value, order, &passed_on);
            to_memory(address, bytes, *value);
        }
        return before;
    }

    void plain(const void* data, bool writing) {
        Thread& self = *running_;
        const std::size_t me = number_of(self);
        Plain& found = plains_[data];
        const auto unordered = [&](std::size_t other, std::uint32_t when) {
            return other != me && when > self.known.clock[other];
        };
        if (found.written != 0 && unordered(found.writer, found.written)) {
            fail("a race: plain data is touched that another thread wrote, unordered");
        }
        if (writing) {
            for (std::size_t other = 0; other < kMostThreads; ++other) {
                if (unordered(other, found.read[other])) {
                    fail("a race: plain data is written that another thread read, unordered");
                }
            }
            found.writer = me;
            found.written = ++self.known.clock[me];
        } else {
            found.read[me] = ++self.known.clock[me];
        }
    }

    void sleep_while(const void* address, std::uint32_t seen) {
        point();
        const auto number = words_of_.find(address);
        const std::uint64_t now = number == words_of_.end()
                                      ? from_memory(address, sizeof(seen))
                                      : words_[number->second].stores.back().value;
        if (static_cast<std::uint32_t>(now) != seen) return;
        running_->state = State::asleep;
        running_->waits_for = address;
        leave();
    }
    void wake_all(const void* address) {
        point();
        for (Thread& each : threads_) {
            if (each.state == State::asleep && each.waits_for == address) each.state = State::ready;
        }
    }
    void poll(int eventfd) {
        point();
        if (rung_[eventfd]) return;
        running_->state = State::polling;
        running_->eventfd = eventfd;
        leave();
    }
    void ring(int eventfd) {
        point();
        rung_[eventfd] = true;
        for (Thread& each : threads_) {
            if (each.state == State::polling && each.eventfd == eventfd) each.state = State::ready;
        }
    }
    void hush(int eventfd) {
        point();
        rung_[eventfd] = false;
    }
    void yield() {
        Thread& self = *running_;
        if (settings_.deadline && !passed_ && ++yields_ == kMostYields) pass_deadline();
        self.state = State::yielded;
        // Who does not know of all that is there has another look at once.
        const bool knows = std::all_of(words_.begin(), words_.end(), [&](const Word& word) {
            return self.known.view[index_of(word)] + std::size_t{1} == word.stores.size();
        });
        self.waits_beyond = knows ? stores_ : 0;
        leave();
        for (const Word& word : words_) {
            self.known.view[index_of(word)] = static_cast<std::uint16_t>(word.stores.size() - 1);
        }
    }
    void fence() {
        point();
        running_->known.join(running_->glimpsed, words_.size());
        running_->fenced = running_->known;
    }
    // One of so many, 0 first; any other is a deviation.
    std::size_t choose(std::size_t options) {
        if (options < 2 || deviations_ == settings_.deviations) return 0;
        if (next_choice_ == choices_.size()) choices_.push_back({0, options});
        const Choice& now = choices_[next_choice_++];
        if (now.options != options) throw std::logic_error("the scenario is not deterministic");
        if (now.picked != 0) ++deviations_;
        return now.picked;
    }
    [[nodiscard]] std::uint64_t now() const { return now_; }

    [[noreturn]] void fail(const std::string& what) {
        if (found_.wrong.empty()) found_.wrong = what;
        throw Abandoned{};
    }

  private:
    // ---- one execution

    void execute() {
        words_.clear();
        words_.reserve(kMostWords);
        words_of_.clear();
        names_.clear();
        plains_.clear();
        rung_.clear();
        threads_.clear();
        steps_ = deviations_ = yields_ = 0;
        next_choice_ = 0;
        stores_ = 0;
        now_ = kStart;
        passed_ = false;
        last_ = kMostThreads - 1;
        const auto scenario = make_();
        auto bodies = scenario->threads();
        if (bodies.size() > kMostThreads) throw std::length_error("too many threads");
        threads_.resize(bodies.size());
        for (std::size_t i = 0; i < bodies.size(); ++i) {
            threads_[i].body = std::move(bodies[i]);
            threads_[i].known.clock[i] = 1;
            begin(threads_[i], stacks_[i]);
        }
        while (Thread* next = next_free()) resume(*next);
        if (found_.wrong.empty()) {
            found_.wrong = scenario->wrong();
        } else {
            for (Thread& each : threads_) {
                if (each.begun && each.state != State::ended) resume(each);
            }
        }
    }

    void begin(Thread& thread, std::vector<char>& stack) {
        ::getcontext(&thread.context);
        thread.context.uc_stack.ss_sp = stack.data();
        thread.context.uc_stack.ss_size = stack.size();
        const auto self = reinterpret_cast<std::uintptr_t>(this);
        ::makecontext(&thread.context, reinterpret_cast<void (*)()>(&Explorer::enter), 2,
                      static_cast<unsigned>(self), static_cast<unsigned>(self >> 32));
    }

    static void enter(unsigned low, unsigned high) {
        auto* self = reinterpret_cast<Explorer*>(std::uintptr_t{low} | std::uintptr_t{high} << 32);
        try {
            self->running_->body();
        } catch (const Abandoned&) {
        } catch (const std::exception& error) {
            if (self->found_.wrong.empty()) self->found_.wrong = error.what();
        }
        self->running_->state = State::ended;
        ::_longjmp(self->scheduler_, 1);
    }

    void resume(Thread& thread) {
        running_ = &thread;
        last_ = number_of(thread);
        switch_to(thread);
        running_ = nullptr;
    }

    // By _setjmp, which, unlike swapcontext, makes no system call.
    [[gnu::noinline]] void switch_to(Thread& thread) {
        if (::_setjmp(scheduler_) != 0) return;
        if (thread.begun) ::_longjmp(thread.place, 1);
        thread.begun = true;
        ::setcontext(&thread.context);
    }
    [[gnu::noinline]] void switch_back(Thread& self) {
        if (::_setjmp(self.place) == 0) ::_longjmp(scheduler_, 1);
    }

    // The thread that runs stops; whoever is chosen then goes on.
    void leave() {
        Thread& self = *running_;
        self.last = nullptr;
        switch_back(self);
        if (!found_.wrong.empty()) throw Abandoned{};
    }

    [[nodiscard]] bool can_run(const Thread& thread) const {
        return thread.state == State::ready ||
               (thread.state == State::yielded && stores_ > thread.waits_beyond);
    }

    // Before an operation of the thread that runs: another may go first.
    void point() {
        Thread& self = *running_;
        if (++steps_ > kMostSteps) fail("it does not end");
        self.last = nullptr;
        if (deviations_ == settings_.deviations) return;
        std::array<Thread*, kMostThreads> others{};
        std::size_t count = 0;
        for (Thread& each : threads_) {
            if (&each != &self && can_run(each)) others[count++] = &each;
        }
        const std::size_t picked = choose(count + 1);
        if (picked == 0) return;
        wanted_ = others[picked - 1];
        switch_back(self);
        if (!found_.wrong.empty()) throw Abandoned{};
    }

    // Who goes on where the thread that ran cannot, or gave way.
    Thread* next_free() {
        if (!found_.wrong.empty()) return nullptr;
        if (Thread* wanted = std::exchange(wanted_, nullptr)) return ready(*wanted);
        while (true) {
            // In turn, lest threads that yield to each other keep a third from what they wait for.
            std::array<Thread*, kMostThreads> able{};
            std::size_t count = 0;
            bool over = true;
            for (std::size_t step = 1; step <= threads_.size(); ++step) {
                Thread& each = threads_[(last_ + step) % threads_.size()];
                over = over && each.state == State::ended;
                if (can_run(each)) able[count++] = &each;
            }
            if (over) return nullptr;
            if (count > 0) return ready(*able[choose(count)]);
            if (passed_ || !settings_.deadline) {
                found_.wrong = "stuck: " + stuck();
                return nullptr;
            }
            pass_deadline();
            for (Thread& each : threads_) {
                if (each.state != State::ended) each.state = State::ready;
            }
        }
    }

    void pass_deadline() {
        passed_ = true;
        now_ += kHour;
    }

    static Thread* ready(Thread& thread) {
        thread.state = State::ready;
        return &thread;
    }

    [[nodiscard]] std::string stuck() const {
        std::string found;
        for (const Thread& each : threads_) {
            if (each.state == State::ended) continue;
            const char* how = each.state == State::asleep    ? " sleeps"
                              : each.state == State::polling ? " polls"
                                                             : " looks on";
            found += (found.empty() ? "thread " : ", thread ") +
                     std::to_string(&each - threads_.data()) + how;
        }
        return found;
    }

    // ---- choices

    // To the next execution. False: that was the last.
    bool advance() {
        choices_.resize(next_choice_);
        while (!choices_.empty() && choices_.back().picked + 1 == choices_.back().options) {
            choices_.pop_back();
        }
        if (choices_.empty()) return false;
        ++choices_.back().picked;
        return true;
    }

    // ---- memory

    Word& at(const void* address, std::size_t bytes) {
        const auto [known, is_new] = words_of_.try_emplace(address, words_.size());
        if (is_new) {
            if (words_.size() == kMostWords) throw std::length_error("too many words");
            Word& made = words_.emplace_back();
            made.address = address;
            if (const auto named = names_.find(address); named != names_.end()) {
                made.name = named->second;
            }
            made.stores.push_back({from_memory(address, bytes), {}});
        }
        Word& word = words_[known->second];
        // A thread that has it to itself may have set it as plain data.
        const std::uint64_t now = from_memory(address, bytes);
        if (now != word.stores.back().value) word.stores.push_back({now, {}});
        return word;
    }
    [[nodiscard]] std::size_t index_of(const Word& word) const {
        return static_cast<std::size_t>(&word - words_.data());
    }
    [[nodiscard]] std::size_t number_of(const Thread& thread) const {
        return static_cast<std::size_t>(&thread - threads_.data());
    }

    // The order that the operation is done with.
    Order noted(const Word& word, const char* kind, Order order) {
        if (word.name.empty()) return order;
        Operation operation{word.name, kind, order};
        if (settings_.weaker && settings_.weaker->of == operation) return settings_.weaker->to;
        found_.operations.insert(std::move(operation));
        return order;
    }

    void see(Word& word, std::size_t seen, Order order) {
        Knowledge& known = running_->known;
        known.view[index_of(word)] = static_cast<std::uint16_t>(seen);
        running_->glimpsed.join(word.stores[seen].carried, words_.size());
        if (acquires(order)) known.join(word.stores[seen].carried, words_.size());
        if (order == Order::seq_cst) {
            word.in_order = std::max(word.in_order, static_cast<std::uint16_t>(seen));
        }
    }

    void add(Word& word, std::uint64_t value, Order order, const Knowledge* passed_on) {
        Thread& self = *running_;
        ++stores_;
        const auto number = static_cast<std::uint16_t>(word.stores.size());
        self.known.view[index_of(word)] = number;
        ++self.known.clock[number_of(self)];
        Store made{value, {}};
        if (passed_on != nullptr) made.carried = *passed_on;
        made.carried.join(releases(order) ? self.known : self.fenced, words_.size());
        word.stores.push_back(made);
        if (order == Order::seq_cst) word.in_order = number;
    }

    const Make& make_;
    const Settings& settings_;
    Found found_;
    std::array<std::vector<char>, kMostThreads> stacks_;
    jmp_buf scheduler_{};
    std::vector<Thread> threads_;
    Thread* running_ = nullptr;
    Thread* wanted_ = nullptr;
    std::vector<Choice> choices_;
    std::size_t next_choice_ = 0, last_ = 0;
    int steps_ = 0, deviations_ = 0, yields_ = 0;
    std::vector<Word> words_;
    std::unordered_map<const void*, std::size_t> words_of_;
    std::unordered_map<const void*, std::string> names_;
    std::unordered_map<const void*, Plain> plains_;
    std::map<int, bool> rung_;
    std::uint64_t stores_ = 0, now_ = kStart;
    bool passed_ = false;
};

Explorer* exploring = nullptr;

bool modelled() {
    return exploring != nullptr && exploring->in_thread();
}

}  // namespace

Found explore(const Make& make, const Settings& settings) {
    Explorer explorer(make, settings);
    exploring = &explorer;
    try {
        const Found found = explorer.all();
        exploring = nullptr;
        return found;
    } catch (...) {
        exploring = nullptr;
        throw;
    }
}

std::vector<Weaker> weaker(const std::set<Operation>& operations) {
    std::vector<Weaker> found;
    for (const Operation& each : operations) {
        const auto less = [&](Order to) { found.push_back({each, to}); };
        const bool loads = each.kind == "load", stores = each.kind == "store";
        switch (each.order) {
            case Order::relaxed:
                continue;
            case Order::seq_cst:
                less(loads ? Order::acquire : stores ? Order::release : Order::acq_rel);
                break;
            case Order::acq_rel:
                less(Order::acquire);
                less(Order::release);
                break;
            default:
                break;
        }
        less(Order::relaxed);
    }
    return found;
}

std::string text(const Weaker& weaker) {
    constexpr const char* kOrders[] = {"relaxed", "acquire", "release", "acq_rel", "seq_cst"};
    return weaker.of.kind + " of " + weaker.of.word + ", " +
           kOrders[static_cast<int>(weaker.of.order)] + " as " +
           kOrders[static_cast<int>(weaker.to)];
}

void name(const void* word, const std::string& called) {
    exploring->name(word, called);
}
void reads(const void* data) {
    if (modelled()) exploring->plain(data, false);
}
void writes(const void* data) {
    if (modelled()) exploring->plain(data, true);
}
void require(bool held, const char* what) {
    if (!held) exploring->fail(what);
}
std::size_t choose(std::size_t options) {
    return exploring->choose(options);
}
void poll(int eventfd) {
    exploring->poll(eventfd);
}

std::uint64_t load(const void* word, std::size_t bytes, Order order) {
    return modelled() ? exploring->load(word, bytes, order) : from_memory(word, bytes);
}
void store(void* word, std::size_t bytes, std::uint64_t value, Order order) {
    if (modelled()) {
        exploring->store(word, bytes, value, order);
    } else {
        to_memory(word, bytes, value);
    }
}
std::uint64_t change(void* word, std::size_t bytes, Order order,
                     const std::function<std::optional<std::uint64_t>(std::uint64_t)>& next) {
    if (modelled()) return exploring->change(word, bytes, order, next);
    const std::uint64_t before = from_memory(word, bytes);
    if (const auto value = next(before)) to_memory(word, bytes, *value);
    return before;
}
void fence() {
    if (modelled() && fences) exploring->fence();
}
void sleep_while(const void* word, std::uint32_t seen) {
    if (modelled()) exploring->sleep_while(word, seen);
}
void wake_all(const void* word) {
    if (modelled()) exploring->wake_all(word);
}
void ring(int eventfd) {
    if (modelled()) exploring->ring(eventfd);
}
void hush(int eventfd) {
    if (modelled()) exploring->hush(eventfd);
}
void yield() {
    if (modelled()) exploring->yield();
}
std::uint64_t now_ns() {
    return exploring == nullptr ? kStart : exploring->now();
}

}  // namespace mkernel::model
