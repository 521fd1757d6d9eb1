// What we ourselves cost: the command FIFO, and a put from the FIFO to its completion on a provider
// that takes no time. Usage: own_work_benchmark NULL_VERBS_LIBRARY
//
// Prints one JSON object, medians of kRounds:
//   fifo_commands_per_s            a producer and a drainer, wherever the scheduler puts them
//   fifo_one_core_commands_per_s   both on one core, taking turns; a second of its time, so that it does
//                                  not matter who else runs there
//   own_ns_per_put                 proxy: drain, post, completion, arrival, signal; with what the
//                                  null provider needs
#include <sched.h>
#include <time.h>

#include <algorithm>
#include <cstdio>
#include <string>
#include <thread>
#include <vector>

#include "pair.hpp"

using namespace mkernel;
using namespace mkernel::nics;
using mkernel::transport::monotonic_ns;
using mkernel::transport::SignalPad;
using mkernel::transport::WaitResult;

namespace {

constexpr int kRounds = 7;
constexpr std::uint64_t kSecond = 1'000'000'000;

double median(std::vector<double> values) {
    std::sort(values.begin(), values.end());
    return values[values.size() / 2];
}

double cpu_s() {
    timespec now{};
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
    return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

double wall_s() {
    return static_cast<double>(monotonic_ns()) * 1e-9;
}

// Commands a second of `clock`.
double fifo_rate(double (*clock)()) {
    constexpr std::uint64_t kCommands = 1'000'000;
    transport::Fifo fifo(1024);
    const testing::Memory memory(SignalPad::bytes(64));
    const SignalPad pad = SignalPad::format(memory.data(), 64);
    const double start = clock();
    const std::uint64_t deadline = monotonic_ns() + 30 * kSecond;
    std::thread producer([&] {
        transport::PutCommand c;
        for (c.bytes = 0; c.bytes < kCommands; ++c.bytes) {
            if (fifo.handle().push(c, pad, deadline, {}) != WaitResult::ok) return;
        }
    });
    std::uint64_t drained = 0;
    transport::PutCommand c;
    while (drained < kCommands && monotonic_ns() < deadline) {
        int n = 0;
        while (n < Proxy::kBatch && fifo.host().pop(c)) ++n;
        fifo.release();
        drained += static_cast<std::uint64_t>(n);
        if (n == 0) std::this_thread::yield();
    }
    producer.join();
    if (drained != kCommands) throw std::runtime_error("commands were lost");
    return static_cast<double>(kCommands) / (clock() - start);
}

class OneCore {
  public:
    OneCore() {
        sched_getaffinity(0, sizeof(before_), &before_);
        cpu_set_t one;
        CPU_ZERO(&one);
        CPU_SET(sched_getcpu(), &one);
        sched_setaffinity(0, sizeof(one), &one);
    }
    ~OneCore() { sched_setaffinity(0, sizeof(before_), &before_); }
    OneCore(const OneCore&) = delete;
    OneCore& operator=(const OneCore&) = delete;

  private:
    cpu_set_t before_;
};

double own_ns_per_put(const std::string& library) {
    constexpr std::uint64_t kPuts = 1 << 17;
    const testing::Memory memory(1 << 20);
    const testing::Memory signals(SignalPad::bytes(testing::kSignals));
    const SignalPad pad = SignalPad::format(signals.data(), testing::kSignals);
    Session session(
        std::make_unique<cx7::RcNic>(verbs::Verbs::load(library),
                                     std::vector<verbs::PortName>{{"null0"}}, verbs::Options{}),
        kPuts);
    session.nic().connect(0, session.nic().add_peer(0, testing::kOneLane));
    session.nic().bind(0, 0, session.nic().register_memory(0, {memory.address(), memory.bytes()}));
    // The proxy finds a full ring: nobody else runs beside it.
    const auto& fifo = *reinterpret_cast<const transport::FifoHandle*>(session.fifo());
    transport::PutCommand c;
    c.bytes = 4096;
    c.value = 1;
    for (std::uint64_t i = 0; i < kPuts; ++i) {
        c.local_offset = c.remote_offset = i * 4096 % memory.bytes();
        c.signal = static_cast<std::uint32_t>(i % testing::kSignals);
        if (fifo.push(c, pad, monotonic_ns() + kSecond, {}) != WaitResult::ok) {
            throw std::runtime_error("the ring is too small");
        }
    }
    const std::uint64_t start = monotonic_ns();
    session.start(signals.address(), {});
    const bool flushed = session.flush(30);
    const auto taken = static_cast<double>(monotonic_ns() - start);
    const ProxyStatistics seen = session.statistics();
    if (!flushed || seen.puts != kPuts || seen.signals_raised != kPuts ||
        pad.load(1) != kPuts / testing::kSignals) {
        throw std::runtime_error("puts were lost");
    }
    return taken / static_cast<double>(kPuts);
}

template <typename Measure>
double rounds(Measure measure) {
    std::vector<double> values;
    for (int i = 0; i < kRounds; ++i) values.push_back(measure());
    return median(values);
}

}  // namespace

int main(int argc, char** argv) {
    if (argc < 2) return std::fprintf(stderr, "usage: own_work_benchmark NULL_VERBS_LIBRARY\n"), 2;
    const std::string library = argv[1];
    try {
        const double free = rounds([] { return fifo_rate(wall_s); });
        double one = 0;
        {
            const OneCore pinned;
            one = rounds([] { return fifo_rate(cpu_s); });
        }
        const double own = rounds([&] { return own_ns_per_put(library); });
        std::printf(
            "{\"fifo_commands_per_s\": %.0f, \"fifo_one_core_commands_per_s\": %.0f, "
            "\"own_ns_per_put\": %.1f}\n",
            free, one, own);
    } catch (const std::exception& error) {
        return std::fprintf(stderr, "%s\n", error.what()), 1;
    }
    return 0;
}
