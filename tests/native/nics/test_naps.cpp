// What an idle proxy costs where a device may push, and how soon it sees a command that nothing announced.
//
// How busy the machine is decides nothing: a sleep's CPU time grows where others took its caches, so that the
// cheapest of several times counts, which what costs too much at every time misses; and where the proxy is to
// sleep as long as it may, sleeps are counted too, of which naps make many more and spinning none. Of the times
// to the sight of a command the median counts, which sleeps without naps miss by far.
#include <time.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <optional>
#include <thread>
#include <vector>

#include "backends/nics/proxy.hpp"
#include "backends/transport/fifo_device.hpp"
#include "check.hpp"
#include "counting_nic.hpp"
#include "idle_nic.hpp"
#include "pair.hpp"
#include "threads.hpp"

using namespace mkernel;
using namespace mkernel::nics;
using mkernel::transport::monotonic_ns;
using mkernel::transport::SignalPad;
using mkernel::transport::WaitResult;

namespace {

constexpr std::uint64_t kMs = 1'000'000;

void rest_ms(double ms) {
    std::this_thread::sleep_for(std::chrono::duration<double, std::milli>(ms));
}

struct Rig {
    Rig()
        : fifo(64),
          memory(SignalPad::bytes(8)),
          pad(SignalPad::format(memory.data(), 8)),
          nic([this](const transport::PutCommand&) {
              seen_ns = monotonic_ns();
              return true;
          }) {
        const transport::FifoRingMemory& ring = fifo.handle().device.memory;
        tickets = transport::FifoTickets::of(ring);
        device = {ring.slots, ring.tail, &tickets, ring.capacity};
        proxy.emplace(nic, fifo, pad, std::vector<int>{});
    }

    // Microseconds from a push, after a pause, to its command's arrival at the NIC.
    std::vector<double> wakes_us(int count) {
        std::vector<double> found;
        for (int i = 0; i < count; ++i) {
            rest_ms(3 + 0.137 * (i % 16));  // no multiple of a sleep
            const std::uint64_t already = nic.taken();
            const std::uint64_t start = monotonic_ns();
            const transport::DeviceLimits limits{&pad.abort_record().code, 10'000 * kMs};
            if (device.push({}, limits) != WaitResult::ok) return {};
            while (nic.taken() == already) {
                if (monotonic_ns() - start > 10'000 * kMs) return {};
                std::this_thread::yield();
            }
            found.push_back(static_cast<double>(seen_ns.load() - start) / 1e3);
        }
        std::sort(found.begin(), found.end());
        return found;
    }

    transport::Fifo fifo;
    testing::Memory memory;
    SignalPad pad;
    std::atomic<std::uint64_t> seen_ns{0};
    testing::CountingNic nic;
    transport::FifoTickets tickets;
    transport::FifoDevice device;
    std::optional<Proxy> proxy;
};

constexpr double kNapsCost = 0.05;
constexpr double kSleepsCost = 0.02;  // of those that are as long as they may be

// A NIC that is slow to arm, which it is before every sleep: looks that cost 2 % of a core more.
class SlowNic final : public testing::IdleNic {
  public:
    PutResult put(const transport::PutCommand&, PutCursor&) override { return PutResult::failed; }
    void arm() override {
        const std::uint64_t end = cpu_ns() + kArmNs;
        while (cpu_ns() < end) {
        }
    }

  private:
    static constexpr std::uint64_t kArmNs = Proxy::kMaxSleepMs * kMs / 50;

    static std::uint64_t cpu_ns() {
        timespec now{};
        clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
        return static_cast<std::uint64_t>(now.tv_sec) * 1'000 * kMs +
               static_cast<std::uint64_t>(now.tv_nsec);
    }
};

// What the proxy of this process does from now on, for a time.
struct Idling {
    double core;      // share of a core
    double sleeps_s;  // sleeps a second
};

Idling idling(double seconds) {
    const testing::NamedThread proxy("mkernel-proxy");
    const double cpu = proxy.cpu_s();
    const std::uint64_t sleeps = proxy.sleeps();
    const std::uint64_t start = monotonic_ns();
    rest_ms(seconds * 1e3);
    const double wall = static_cast<double>(monotonic_ns() - start) / 1e9;
    const Idling found{(proxy.cpu_s() - cpu) / wall,
                       static_cast<double>(proxy.sleeps() - sleeps) / wall};
    std::printf("  %.2f %% of a core, %.0f sleeps a second\n", 100 * found.core, found.sleeps_s);
    return found;
}

// Whether the proxy costs no more than such a share of a core, at one of ten times.
bool costs_at_most(double share) {
    rest_ms(300);  // naps find their length
    if (kSanitized) return true;
    for (int times = 0; times < 10; ++times) {
        if (idling(1).core <= share) return true;
    }
    return false;
}

// Whether the proxy sleeps, and no shorter than it may.
bool sleeps_long() {
    constexpr double kOften = 1.5 * 1'000 / Proxy::kMaxSleepMs;
    constexpr double kSeldom = 5;
    rest_ms(300);
    const double found = idling(0.5).sleeps_s;
    return kSeldom < found && found < kOften;
}

double median(const std::vector<double>& sorted) {
    if (sorted.empty()) return 1e9;
    std::printf("  seen after %.0f us (median), %.0f to %.0f\n", sorted[sorted.size() / 2],
                sorted.front(), sorted.back());
    return sorted[sorted.size() / 2];
}

TEST(naps_cost_little) {
    const Rig rig;
    CHECK(rig.fifo.handle().claim_device());
    CHECK(costs_at_most(kNapsCost));
}

TEST(naps_leave_room_for_what_comes_between_them) {
    transport::Fifo fifo(64);
    testing::Memory memory(SignalPad::bytes(8));
    SlowNic nic;
    const Proxy proxy(nic, fifo, SignalPad::format(memory.data(), 8), {});
    CHECK(fifo.handle().claim_device());
    CHECK(costs_at_most(kNapsCost));
}

TEST(without_a_device_idling_costs_nothing) {
    const Rig rig;
    CHECK(sleeps_long());
    CHECK(costs_at_most(kSleepsCost));
}

TEST(after_an_abort_it_sleeps_beside_commands) {
    Rig rig;
    CHECK(rig.fifo.handle().claim_device());
    const testing::NamedThread proxy("mkernel-proxy");
    const std::uint64_t before = proxy.sleeps();
    rig.pad.abort(transport::AbortCode::peer_failure, {});
    // A round that began before the abort may still take commands; the one behind its sleep does not.
    for (int waited = 0; proxy.sleeps() < before + 2 && waited < 10'000; ++waited) rest_ms(1);
    CHECK(proxy.sleeps() >= before + 2);
    static const std::uint32_t nobody = 0;
    CHECK(rig.device.push({}, {&nobody, kMs}) == WaitResult::ok);
    CHECK(sleeps_long());
    CHECK(costs_at_most(kSleepsCost));
    CHECK(rig.nic.taken() == 0);
}

TEST(a_command_that_nothing_announced_is_seen_within_a_nap) {
    constexpr double kLimitUs = 2'000;
    Rig rig;
    CHECK(rig.fifo.handle().claim_device());
    const double claimed = median(rig.wakes_us(kSanitized ? 20 : 100));
    CHECK(kSanitized || claimed <= kLimitUs);
    // The planted fault: a device that did not claim its ring. The proxy sleeps for 20 ms.
    rig.fifo.handle().release_device();
    CHECK(median(rig.wakes_us(kSanitized ? 20 : 60)) > kLimitUs);
}

TEST(it_stays_awake_for_what_the_host_has_queued) {
    Rig rig;
    CHECK(rig.fifo.handle().claim_device());
    const testing::NamedThread proxy("mkernel-proxy");
    const auto naps = [&] {  // however busy this host is
        const std::uint64_t before = proxy.sleeps();
        for (int waited = 0; proxy.sleeps() <= before + 10 && waited < 10'000; ++waited) rest_ms(1);
        return proxy.sleeps() > before + 10;
    };
    // How often it sleeps soon after a call was queued, and so much more was done; again where this
    // thread was so late that the proxy may have given up.
    const auto sleeps_behind = [&](const auto& more) {
        for (int tries = 0; tries < 1000; ++tries) {
            const std::uint64_t start = transport::monotonic_ns();
            rig.fifo.handle().await_device();
            more();
            rest_ms(2);
            const std::uint64_t before = proxy.sleeps();
            rest_ms(8);
            const std::uint64_t slept = proxy.sleeps() - before;
            if (transport::monotonic_ns() - start < 18 * kMs) return slept;
            rest_ms(20);
        }
        return std::uint64_t{1};
    };
    CHECK(naps());
    CHECK(sleeps_behind([] {}) == 0);
    CHECK(naps());  // nothing came
    const auto push = [&] {
        rest_ms(2);
        CHECK(rig.device.push({}, {&rig.pad.abort_record().code, 10'000 * kMs}) == WaitResult::ok);
    };
    bool again = false;
    for (int tries = 0; tries < 200 && !again; ++tries) {
        rest_ms(25);
        again = sleeps_behind(push) > 0;
    }
    CHECK(again);  // it has come
}

TEST(a_claim_reaches_a_proxy_that_sleeps) {
    Rig rig;
    rest_ms(30);
    const testing::NamedThread proxy("mkernel-proxy");
    const std::uint64_t before = proxy.sleeps();
    CHECK(rig.fifo.handle().claim_device());
    rest_ms(100);
    CHECK(proxy.sleeps() - before > 10);  // five without naps
}

}  // namespace

int main(int argc, char** argv) {
    return testing::run(argc, argv);
}
