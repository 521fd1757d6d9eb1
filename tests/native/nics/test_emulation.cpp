// What can be set on the software device: its link, and faults by count or time. Each on both
// personalities.
#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <type_traits>
#include <vector>

#include "backends/nics/softverbs/config.hpp"
#include "backends/nics/softverbs/link.hpp"
#include "check.hpp"
#include "rc_end.hpp"
#include "setting.hpp"
#include "srd_end.hpp"

using namespace mkernel;
using namespace mkernel::nics;
using mkernel::nics::testing::Setting;
using mkernel::transport::monotonic_ns;
namespace softverbs = mkernel::nics::softverbs;
namespace rc = mkernel::nics::testing::rc;
namespace srd = mkernel::nics::testing::srd;

namespace {

constexpr const char* kFaults = "MKERNEL_SOFTVERBS_FAULTS";

double milliseconds_since(std::uint64_t start) {
    return static_cast<double>(monotonic_ns() - start) / 1e6;
}

// The two personalities as one: a write from `a` to `b`, and how it ended.
struct Rc : rc::Pair {
    using End = rc::End;
    static constexpr ibv_wc_status kUnreachable = IBV_WC_RETRY_EXC_ERR;
    static rc::Limits limits() {
        rc::Limits limits;
        limits.timeout = 15;  // half a second in four tries
        limits.sends = 64;
        return limits;
    }
    Rc() : rc::Pair(limits(), limits()) {}
    static int post(rc::End& from, const rc::End& to, std::uint64_t id, std::uint32_t bytes) {
        ibv_sge sge = from.sge(bytes);
        return from.post(from.write(sge, to, id));
    }
    int forth(std::uint64_t id, std::uint32_t bytes = 8) { return post(a, b, id, bytes); }
    int back(std::uint64_t id) { return post(b, a, id, 8); }
};

struct Srd : srd::Pair {
    using End = srd::End;
    static constexpr ibv_wc_status kUnreachable = IBV_WC_RESP_TIMEOUT_ERR;
    static int post(srd::End& from, const srd::End& to, std::uint64_t id, std::uint32_t bytes) {
        return from.write(from.handles.back(), to.address(), id, bytes);
    }
    int forth(std::uint64_t id, std::uint32_t bytes = 8) { return post(a, b, id, bytes); }
    int back(std::uint64_t id) { return post(b, a, id, 8); }
};

#define ON_BOTH(name)                                           \
    const testing::Registered rc_##name("rc_" #name, name<Rc>); \
    const testing::Registered srd_##name("srd_" #name, name<Srd>);

// ---- the link

template <typename P>
void latency_delays_delivery() {
    const Setting slow("MKERNEL_SOFTVERBS_LATENCY_NS", "20000000");
    P p;
    const std::uint64_t start = monotonic_ns();
    CHECK(p.forth(1) == 0 && p.a.completes(1, IBV_WC_SUCCESS));
    CHECK(milliseconds_since(start) >= 20);
}
ON_BOTH(latency_delays_delivery)

// Each message takes what is drawn for it from the seed, and what this host adds.
template <typename P>
void jitter_is_drawn_from_the_seed() {
    const Setting unsteady("MKERNEL_SOFTVERBS_JITTER_NS", "20000000");
    const Setting chosen("MKERNEL_SOFTVERBS_SEED", "7");
    softverbs::Link same(softverbs::Config{.jitter_ns = 20'000'000, .seed = 7});
    P p;
    for (std::uint64_t id = 0; id < 8; ++id) {
        const std::uint64_t start = monotonic_ns();
        const std::uint64_t drawn = same.depart(start, 8) - start;
        CHECK(p.forth(id) == 0 && p.a.completes(id, IBV_WC_SUCCESS));
        CHECK(monotonic_ns() - start >= drawn);
    }
}
ON_BOTH(jitter_is_drawn_from_the_seed)

// The link's arithmetic, which no host is too slow for.
TEST(a_link_counts_every_byte) {
    using softverbs::Config;
    using softverbs::Link;
    Link fast(Config{.bandwidth_mbps = 400'000});
    std::uint64_t last = 0;
    for (int i = 0; i < 1'000'000; ++i) last = fast.depart(1000, 64);
    CHECK(last == 1000 + 1'280'000);  // 1.28 ns each
    CHECK(fast.depart(5'000'000, 1 << 20) == 5'000'000 + 20'971);
    Link latent(Config{.latency_ns = 700, .bandwidth_mbps = 8000});
    CHECK(latent.depart(1000, 500) == 1000 + 500 + 700);
    CHECK(latent.depart(1000, 500) == 1000 + 1000 + 700);  // behind the first
    // The receiver's side: what two senders send at once comes one after the other.
    std::uint64_t wake = UINT64_MAX;
    CHECK(!latent.arrived(2200, 2000, wake) && wake == 2200);
    CHECK(latent.arrived(2200, 2200, wake));
    latent.take(2200, 500);
    wake = UINT64_MAX;
    CHECK(latent.arrived(2200, 2200, wake));
    latent.take(2200, 500);
    CHECK(!latent.arrived(2200, 2200, wake) && wake == 2700);
    Link none{Config{}};
    CHECK(none.depart(1000, 1 << 30) == 0 && none.arrived(0, 1, wake));
    Link one(Config{.jitter_ns = 1000, .seed = 3}), two(Config{.jitter_ns = 1000, .seed = 3}),
        other(Config{.jitter_ns = 1000, .seed = 4});
    int differ = 0;
    for (std::uint64_t i = 0; i < 100; ++i) {
        const std::uint64_t drawn = one.depart(i, 8);
        CHECK(drawn >= i && drawn < i + 1000 && drawn == two.depart(i, 8));
        differ += drawn != other.depart(i, 8);
    }
    CHECK(differ > 90);
}

// Gb/s that one pair, or two into one receiver, carry in messages of 1 MiB.
template <typename P>
double rate(double gbps) {
    constexpr std::uint32_t kMessage = 1 << 20;
    constexpr std::uint64_t kWindow = 48;  // so much that a late thread starves nobody
    const auto messages = static_cast<std::uint64_t>(gbps * 0.25e9 / 8 / kMessage) + kWindow;
    P p;
    std::uint64_t posted = 0, done = 0;
    const std::uint64_t start = monotonic_ns();
    while (done < messages) {
        while (posted < messages && posted - done < kWindow) {
            CHECK(p.forth(posted++, kMessage) == 0);
        }
        const auto wc = p.a.poll();
        CHECK(wc && wc->status == IBV_WC_SUCCESS);
        if (!wc) return 0;
        ++done;
    }
    return static_cast<double>(messages) * kMessage * 8 /
           static_cast<double>(monotonic_ns() - start);
}

template <typename P>
void the_set_bandwidth_is_kept() {
    if (kSanitized) return;
    const double most = rate<P>(8);
    std::printf("  %.1f Gb/s without a limit\n", most);
    for (const int mbps : {500, 8000}) {
        const double wanted = mbps / 1e3;
        const auto too_much = [&](double fastest) { return mbps > 500 && wanted > 0.6 * fastest; };
        bool slow = too_much(most);  // this host: by now, where others work on it
        double got = 0;              // the best of twelve: other work only makes it slower
        for (int i = 0; i < 12 && got < 0.9 * wanted && !slow; ++i) {
            {
                const Setting limit("MKERNEL_SOFTVERBS_BANDWIDTH_MBPS", std::to_string(mbps));
                got = rate<P>(wanted);
            }
            CHECK(got <= 1.1 * wanted);
            slow = got < 0.9 * wanted && too_much(rate<P>(wanted));
        }
        std::printf("  %.2f Gb/s of %.2f%s\n", got, wanted, slow ? ": a slow host" : "");
        CHECK(slow || got >= 0.9 * wanted);
    }
}
ON_BOTH(the_set_bandwidth_is_kept)

// A receiver's side of the link is shared by its senders.
TEST(two_senders_share_the_receiver) {
    const Setting limit("MKERNEL_SOFTVERBS_BANDWIDTH_MBPS", "1000");
    srd::End a, b, c;
    const srd::Address peer = c.address();
    c.handle(a.address());
    c.handle(b.address());
    constexpr std::uint32_t kMessage = 1 << 20;
    const std::uint64_t start = monotonic_ns();
    for (srd::End* end : {&a, &b}) {
        ibv_ah* ah = end->handle(peer);
        for (std::uint64_t id = 0; id < 12; ++id) CHECK(end->write(ah, peer, id, kMessage) == 0);
    }
    for (int i = 0; i < 12; ++i) CHECK(a.poll().has_value() && b.poll().has_value());
    CHECK(milliseconds_since(start) >= 0.9 * 24 * kMessage * 8 / 1e6);
}

// ---- faults

template <typename P>
void a_dropped_peer_is_unreachable() {
    const Setting soon("MKERNEL_SOFTVERBS_SRD_TIMEOUT_MS", "50");
    const Setting fault(kFaults, "drop@3");
    P p;
    for (std::uint64_t id = 1; id <= 3; ++id) {
        CHECK(p.forth(id) == 0 && p.a.completes(id, IBV_WC_SUCCESS));
    }
    CHECK(p.forth(4) == 0 && p.a.completes(4, P::kUnreachable));
}
ON_BOTH(a_dropped_peer_is_unreachable)

// Retries outlast the cut: nothing is lost, and nobody is told.
template <typename P>
void loses_nothing(const char* fault) {
    const Setting set(kFaults, fault);
    P p;
    const std::uint64_t start = monotonic_ns();
    for (std::uint64_t id = 1; id <= 8; ++id) CHECK(p.forth(id) == 0 && p.back(id) == 0);
    for (int i = 0; i < 8; ++i) {
        for (auto* end : {&p.a, &p.b}) {
            const auto wc = end->poll();
            CHECK(wc && wc->status == IBV_WC_SUCCESS);
        }
    }
    CHECK(milliseconds_since(start) >= 30);
}
template <typename P>
void a_link_that_comes_back_loses_nothing() {
    loses_nothing<P>("cut@3+40ms");
}
ON_BOTH(a_link_that_comes_back_loses_nothing)
template <typename P>
void a_stall_that_ends_loses_nothing() {
    loses_nothing<P>("stall@3+40ms");
}
ON_BOTH(a_stall_that_ends_loses_nothing)

template <typename P>
void a_cut_link_is_an_error_at_both_ends() {
    const Setting soon("MKERNEL_SOFTVERBS_SRD_TIMEOUT_MS", "50");
    auto cut = std::make_unique<Setting>(kFaults, "cut@1");
    P p;
    cut.reset();
    CHECK(p.forth(1) == 0 && p.a.completes(1, IBV_WC_SUCCESS));
    CHECK(p.forth(2) == 0 && p.a.completes(2, P::kUnreachable));
    CHECK(p.back(3) == 0 && p.b.completes(3, P::kUnreachable));
}
ON_BOTH(a_cut_link_is_an_error_at_both_ends)

// SRD goes on once the link is back, whatever was lost before.
TEST(srd_goes_on_after_a_cut) {
    const Setting soon("MKERNEL_SOFTVERBS_SRD_TIMEOUT_MS", "30");
    const Setting fault(kFaults, "cut@1+600ms");
    Srd p;
    const std::uint64_t start = monotonic_ns();
    CHECK(p.forth(1) == 0 && p.a.completes(1, IBV_WC_SUCCESS));
    CHECK(p.forth(2) == 0 && p.a.completes(2, IBV_WC_RESP_TIMEOUT_ERR));
    while (milliseconds_since(start) < 20'000) {  // until the link is back
        CHECK(p.forth(3) == 0);
        const auto wc = p.a.poll();
        if (!wc || wc->status == IBV_WC_SUCCESS) break;
        CHECK(wc->status == IBV_WC_RESP_TIMEOUT_ERR);
    }
    CHECK(p.forth(4) == 0 && p.a.completes(4, IBV_WC_SUCCESS));
    CHECK(p.back(5) == 0 && p.b.completes(5, IBV_WC_SUCCESS));
}

// A stalled device tells its host nothing; its peers find that it does not answer.
template <typename P>
void a_stalled_device_is_silent() {
    const Setting soon("MKERNEL_SOFTVERBS_SRD_TIMEOUT_MS", "50");
    const Setting stall(kFaults, "stall@1");
    P p;
    CHECK(p.forth(1) == 0 && p.a.completes(1, IBV_WC_SUCCESS));
    CHECK(p.forth(2) == 0 && !p.a.poll(0.2));  // now a is stalled, b with its second message
    CHECK(p.back(3) == 0 && p.b.completes(3, P::kUnreachable));
    CHECK(!p.a.poll(0.05));
}
ON_BOTH(a_stalled_device_is_silent)

template <typename P>
void a_queue_pair_breaks() {
    const Setting fault(kFaults, "qp-error@2");
    P p;
    for (std::uint64_t id = 1; id <= 2; ++id) {
        CHECK(p.forth(id) == 0 && p.a.completes(id, IBV_WC_SUCCESS));
    }
    CHECK(p.forth(3) == 0 && p.a.completes(3, IBV_WC_WR_FLUSH_ERR));
    if constexpr (std::is_same_v<P, Rc>) {
        CHECK(p.a.event() == IBV_EVENT_QP_FATAL);
    }
    CHECK(p.forth(4) == 0 && p.a.completes(4, IBV_WC_WR_FLUSH_ERR));
}
ON_BOTH(a_queue_pair_breaks)

template <typename P>
void a_queue_overflows() {
    const Setting fault(kFaults, "cq-overflow@2");
    P p;
    for (std::uint64_t id = 1; id <= 2; ++id) {
        CHECK(p.forth(id) == 0 && p.a.completes(id, IBV_WC_SUCCESS));
    }
    CHECK(p.forth(3) == 0);
    CHECK(p.a.event() == IBV_EVENT_CQ_ERR);
    CHECK(!p.a.poll(0.05));
}
ON_BOTH(a_queue_overflows)

template <typename P>
void a_registration_fails() {
    const Setting fault(kFaults, "registration@1");  // the end's own is the first
    typename P::End end;
    const auto again = [&] {
        errno = 0;
        return end.v->reg_mr(end.pd, end.memory.data(), 4096, IBV_ACCESS_LOCAL_WRITE);
    };
    CHECK(again() == nullptr && errno == ENOMEM);
    ibv_mr* mr = again();
    CHECK(mr != nullptr && end.v->dereg_mr(mr) == 0);
}
ON_BOTH(a_registration_fails)

TEST(a_time_may_be_given_instead_of_a_count) {
    const Setting fault(kFaults, "registration@600000ms,cq-overflow@600000ms,qp-error@700ms");
    const std::uint64_t before = monotonic_ns();
    Rc p;
    const std::uint64_t opened = monotonic_ns();
    std::uint64_t id = 0;
    std::optional<ibv_wc> wc;
    do {
        CHECK(p.forth(++id) == 0);
        wc = p.a.poll();
    } while (wc && wc->status == IBV_WC_SUCCESS && milliseconds_since(opened) < 20'000);
    CHECK(wc && wc->status == IBV_WC_WR_FLUSH_ERR && milliseconds_since(before) >= 700);
}

TEST(what_cannot_be_read_is_refused) {
    const std::pair<const char*, const char*> wrong[] = {{kFaults, "explode@3"},
                                                         {kFaults, "cut"},
                                                         {kFaults, "cut@"},
                                                         {kFaults, "cut@3s"},
                                                         {kFaults, "drop@3+20ms"},
                                                         {kFaults, "cut@3+0ms"},
                                                         {kFaults, "cut@1,"},
                                                         {kFaults, "cut@1 "},
                                                         {"MKERNEL_SOFTVERBS_SEED", "x"},
                                                         {"MKERNEL_SOFTVERBS_DUPLICATES", "101"},
                                                         {"MKERNEL_SOFTVERBS_LATENCY_NS", "-1"},
                                                         {"MKERNEL_SOFTVERBS_REORDER", "yes"},
                                                         {"MKERNEL_SOFTVERBS_LATENCY_US", "5"}};
    const auto v = verbs::Verbs::load(testing::library);
    int count = 0;
    ibv_device** list = v->get_device_list(&count);
    for (const auto& [name, value] : wrong) {
        const Setting set(name, value);
        errno = 0;
        ibv_context* opened = v->open_device(list[0]);
        if (opened != nullptr) std::printf("  %s='%s' was taken\n", name, value);
        CHECK(opened == nullptr && errno == EINVAL);
        if (opened != nullptr) v->close_device(opened);
    }
    v->free_device_list(list);
}

// ---- relaxed ordering, RC

// Looks at memory that the device is writing.
__attribute__((no_sanitize("thread"))) std::uint32_t peek(const std::byte* at) {
    return *reinterpret_cast<const volatile std::uint32_t*>(at);
}

// Whether a flag was seen before all of the data written before it, in so many turns or 60 s.
bool flag_overtakes(int turns) {
    constexpr std::uint32_t kPiece = 64 * 1024;
    constexpr std::uint32_t kPieces = 12;
    constexpr std::uint32_t kFlag = kPieces * kPiece;
    Rc p;
    const std::uint64_t deadline = monotonic_ns() + 60'000'000'000u;
    for (int n = 1; n <= turns && monotonic_ns() < deadline; ++n) {
        ibv_sge pieces[kPieces + 1];
        ibv_send_wr wrs[kPieces + 1];
        for (std::uint32_t i = 0; i <= kPieces; ++i) {
            const std::uint32_t at = i * kPiece;
            const std::uint32_t bytes = i < kPieces ? kPiece : 4;
            std::memcpy(p.a.memory.data() + at + bytes - 4, &n, 4);
            pieces[i] = p.a.sge(bytes, at);
            wrs[i] = p.a.write(pieces[i], p.b, i);
            wrs[i].wr.rdma.remote_addr += at;
            if (i > 0) wrs[i - 1].next = &wrs[i];
        }
        ibv_send_wr* bad = nullptr;
        CHECK(ibv_post_send(p.a.qp, wrs, &bad) == 0);
        const auto number = static_cast<std::uint32_t>(n);
        const std::byte* there = p.b.memory.data();
        while (peek(there + kFlag) != number && monotonic_ns() < deadline) {
        }
        bool whole = true;
        for (std::uint32_t i = 1; i <= kPieces; ++i) {
            whole = peek(there + i * kPiece - 4) == number && whole;
        }
        if (!whole) return true;
        for (std::uint64_t i = 0; i <= kPieces; ++i) CHECK(p.a.completes(i, IBV_WC_SUCCESS));
    }
    return false;
}

TEST(relaxed_writes_overtake_each_other) {
    CHECK(!flag_overtakes(100));
    const Setting relaxed("MKERNEL_SOFTVERBS_RELAXED_ORDERING", "1");
    // Of the twelve pieces of a turn some are late in 31 of 32, and most of those by far longer than
    // this thread is kept from looking.
    const Setting late("MKERNEL_SOFTVERBS_HOLD_NS", "100000000");
    CHECK(flag_overtakes(1000));
}

TEST(an_immediate_waits_for_relaxed_writes) {
    const Setting relaxed("MKERNEL_SOFTVERBS_RELAXED_ORDERING", "1");
    constexpr std::uint32_t kData = 64 * 1024;
    Rc p;
    for (std::uint32_t n = 1; n <= 300; ++n) {
        std::memset(p.a.memory.data(), static_cast<int>(n), 2 * kData);
        CHECK(p.b.receive(n) == 0);
        ibv_sge first = p.a.sge(kData), second = p.a.sge(kData, kData);
        ibv_send_wr wrs[2] = {p.a.write(first, p.b, 1), p.a.write(second, p.b, 2)};
        wrs[1].wr.rdma.remote_addr += kData;
        wrs[1].opcode = IBV_WR_RDMA_WRITE_WITH_IMM;
        wrs[0].next = &wrs[1];
        ibv_send_wr* bad = nullptr;
        CHECK(ibv_post_send(p.a.qp, wrs, &bad) == 0);
        CHECK(p.b.completes(n, IBV_WC_SUCCESS));
        CHECK(std::memcmp(p.a.memory.data(), p.b.memory.data(), 2 * kData) == 0);
        CHECK(p.a.completes(1, IBV_WC_SUCCESS) && p.a.completes(2, IBV_WC_SUCCESS));
    }
}

// ---- SRD's queue

TEST(a_smaller_queue_than_asked_for_rolls_back) {
    const Setting small("MKERNEL_SOFTVERBS_SRD_QUEUE", "4");
    Srd p;
    const auto batch = [&](std::uint64_t count) {
        ibv_wr_start(p.a.qp);
        for (std::uint64_t id = 0; id < count; ++id) p.a.stage(p.ah, p.peer, id, 8);
        return ibv_wr_complete(p.a.qp);
    };
    CHECK(batch(5) == ENOMEM && !p.a.poll(0.05));
    CHECK(batch(4) == 0 && batch(1) == ENOMEM);
    for (int i = 0; i < 4; ++i) CHECK(p.a.poll().has_value());
    CHECK(batch(1) == 0 && p.a.poll().has_value());
}

}  // namespace

int main(int argc, char** argv) {
    return testing::run_on_library(argc, argv);
}
