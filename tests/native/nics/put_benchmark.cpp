// How fast puts are on the software device, between two processes of this machine. Not a test: run
// it by hand or from bench/. Usage: put_benchmark LIBRARY [megabytes moved per size]
//
// Prints one JSON object: round-trip latency of an 8-byte put-with-signal in microseconds,
// bandwidth of 256 KiB and 1 MiB puts with the ratio to memcpy of the same bytes by one thread (the
// two take turns; medians of kTurns), 0-byte puts per second, and the CPU time of an idle pair of
// sessions.
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "hello.hpp"
#include "pair.hpp"

using namespace mkernel;
using namespace mkernel::nics;
using mkernel::transport::monotonic_ns;

namespace {

constexpr std::size_t kBuffer = 64u << 20;
constexpr int kRounds = 2000;
constexpr std::size_t kTurns = 7;

double cpu_seconds() {
    rusage use{};
    getrusage(RUSAGE_SELF, &use);
    return static_cast<double>(use.ru_utime.tv_sec + use.ru_stime.tv_sec) +
           static_cast<double>(use.ru_utime.tv_usec + use.ru_stime.tv_usec) / 1e6;
}

// The same bytes by one thread, in memory of the kind that puts go through.
class Copies {
  public:
    Copies() : from_(kBuffer), to_(kBuffer) {
        std::memset(from_.data(), 1, kBuffer);
        std::memset(to_.data(), 2, kBuffer);
    }
    double gbps(std::size_t size, std::size_t total) const {
        const std::uint64_t start = monotonic_ns();
        for (std::size_t done = 0; done < total; done += size) {
            std::memcpy(to_.data() + done % kBuffer, from_.data() + done % kBuffer, size);
        }
        return static_cast<double>(total) / static_cast<double>(monotonic_ns() - start);
    }

  private:
    testing::Memory from_;
    testing::Memory to_;
};

double median(std::vector<double> values) {
    std::sort(values.begin(), values.end());
    return values[values.size() / 2];
}

void echo(testing::Rank& me) {
    for (int i = 1; i <= kRounds; ++i) {
        if (!me.wait(0, static_cast<std::uint64_t>(i))) return;
        me.put(8, 0);
    }
}

}  // namespace

int main(int argc, char** argv) {
    if (argc < 2) return std::fprintf(stderr, "usage: put_benchmark LIBRARY [MB]\n"), 2;
    const std::string library = argv[1];
    const std::size_t total = std::max<std::size_t>(
        (argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 2048) << 20, kTurns * kBuffer);
    int to_child[2];
    int to_parent[2];
    if (::pipe(to_child) != 0 || ::pipe(to_parent) != 0) return 1;
    const pid_t child = ::fork();
    const std::uint32_t rank = child == 0 ? 1 : 0;
    const int out = child == 0 ? to_parent[1] : to_child[1];
    const int in = child == 0 ? to_child[0] : to_parent[0];
    {
        testing::Rank me(library, 1 - rank, kBuffer);
        std::memset(me.memory.data(), static_cast<int>(rank + 1), kBuffer);
        testing::say(out, me.endpoints[0], me.key);
        const testing::Hello peer = testing::hear(in);
        me.join({peer.endpoint}, peer.key);
        if (child == 0) {
            echo(me);
            me.wait(2, 1, 300);
            me.session.close();
            return 0;
        }
        std::vector<double> trips;
        for (int i = 1; i <= kRounds; ++i) {
            const std::uint64_t start = monotonic_ns();
            me.put(8, 0);
            if (!me.wait(0, static_cast<std::uint64_t>(i))) return 1;
            trips.push_back(static_cast<double>(monotonic_ns() - start) / 1e3);
        }
        std::sort(trips.begin(), trips.end());

        const double before = cpu_seconds();
        ::usleep(1'000'000);
        const double idle = cpu_seconds() - before;

        const Copies copies;
        double rates[2] = {};
        double ratios[2] = {};
        const std::size_t sizes[2] = {256 << 10, 1 << 20};
        for (int s = 0; s < 2; ++s) {
            std::vector<double> rate;
            std::vector<double> ratio;
            for (int turn = -1; turn < static_cast<int>(kTurns); ++turn) {  // turn -1 warms up
                const std::size_t moved = turn < 0 ? kBuffer : total / kTurns / kBuffer * kBuffer;
                const double copied = copies.gbps(sizes[s], moved);
                const std::uint64_t start = monotonic_ns();
                for (std::size_t done = 0; done < moved; done += sizes[s]) {
                    me.put(sizes[s], 1, 1, done % kBuffer, done % kBuffer);
                }
                if (!me.session.flush(60)) return 1;
                if (turn < 0) continue;
                rate.push_back(static_cast<double>(moved) /
                               static_cast<double>(monotonic_ns() - start));
                ratio.push_back(rate.back() / copied);
            }
            rates[s] = median(rate);
            ratios[s] = median(ratio);
        }
        constexpr int kSmall = 400'000;
        const std::uint64_t start = monotonic_ns();
        for (int i = 0; i < kSmall; ++i) me.put(0, 1);
        if (!me.session.flush(60)) return 1;
        const double small = kSmall * 1e9 / static_cast<double>(monotonic_ns() - start);
        me.put(0, 2);
        me.session.flush(10);
        me.session.close();
        std::printf(
            "{\"round_trip_us\": {\"p10\": %.2f, \"median\": %.2f, \"p99\": %.2f}, "
            "\"put_256KiB_GBps\": %.2f, \"put_256KiB_vs_memcpy\": %.2f, "
            "\"put_1MiB_GBps\": %.2f, \"put_1MiB_vs_memcpy\": %.2f, "
            "\"empty_puts_per_s\": %.0f, \"idle_cpu\": %.4f}\n",
            trips[trips.size() / 10], trips[trips.size() / 2], trips[trips.size() * 99 / 100],
            rates[0], ratios[0], rates[1], ratios[1], small, idle);
    }
    int status = 0;
    ::waitpid(child, &status, 0);
    return status == 0 ? 0 : 1;
}
