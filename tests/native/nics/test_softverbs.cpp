// An RDMA device against the rules of RC, through verbs alone. Our software device and the kernel's
// (rxe, see tests/rxe) both pass. Where rxe departs from the specification and from cards, the test
// says so; everywhere else it is the oracle of ours.
// Two contexts of one process talk to each other. argv: the library, the device, part of a name.
#include <arpa/inet.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/wait.h>

#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "backends/nics/verbs/devices.hpp"
#include "backends/nics/verbs/loader.hpp"
#include "backends/transport/signal_pad.hpp"
#include "check.hpp"
#include "rc_end.hpp"
#include "setting.hpp"

using namespace mkernel::nics;
using namespace mkernel::nics::testing::rc;
using mkernel::nics::testing::monotonic_ns;
using mkernel::nics::testing::Setting;

namespace {

// For tests of what only our software device does or promises.
bool software() {
    return device == "soft0";
}
bool rxe() {
    return device.starts_with("rxe");
}

void fill(End& end, std::size_t length, unsigned seed) {
    for (std::size_t i = 0; i < length; ++i) {
        end.memory.data()[i] = static_cast<std::byte>((i * 31 + seed) >> 3);
    }
}

void writes_of_all_sizes(bool shared) {
    Limits limits;
    limits.shared = shared;
    Pair p(limits, limits);
    unsigned seed = 1;
    for (const std::uint32_t length :
         {1u, 7u, 63u, 64u, 65u, 1023u, 1024u, 4097u, 32768u, 32769u, 262144u, 300001u, 1048576u}) {
        fill(p.a, length, ++seed);
        std::memset(p.b.memory.data(), 0xee, kBytes);
        ibv_sge s = p.a.sge(length);
        CHECK(p.a.post(p.a.write(s, p.b, length)) == 0);
        CHECK(p.a.completes(length, IBV_WC_SUCCESS));
        CHECK(std::memcmp(p.a.memory.data(), p.b.memory.data(), length) == 0);
        CHECK(length == kBytes || p.b.memory.data()[length] == std::byte{0xee});
    }
}

TEST(immediate_follows_its_data) {
    Pair p;
    for (std::uint64_t i = 0; i < 16; ++i) CHECK(p.b.receive(100 + i) == 0);
    for (std::uint32_t i = 0; i < 16; ++i) {
        const std::uint32_t length = i % 2 == 0 ? 70'000 : 0;
        fill(p.a, length, i);
        ibv_sge s = p.a.sge(length);
        ibv_send_wr wr = p.a.write(s, p.b, i);
        wr.opcode = IBV_WR_RDMA_WRITE_WITH_IMM;
        wr.imm_data = htonl(0xabc0 + i);
        CHECK(p.a.post(wr) == 0);
        const auto wc = p.b.poll();
        CHECK(wc && wc->wr_id == 100 + i && wc->opcode == IBV_WC_RECV_RDMA_WITH_IMM);
        CHECK(wc && ntohl(wc->imm_data) == 0xabc0 + i && wc->byte_len == length);
        CHECK(wc && (wc->wc_flags & IBV_WC_WITH_IMM) != 0);
        CHECK(std::memcmp(p.a.memory.data(), p.b.memory.data(), length) == 0);
        CHECK(p.a.completes(i, IBV_WC_SUCCESS));
    }
}

TEST(inline_data_is_taken_when_posted) {
    Pair p;
    std::uint64_t value = 0x1122334455667788;
    ibv_sge s{reinterpret_cast<std::uint64_t>(&value), 8, 0};  // no key: it is copied at once
    ibv_send_wr wr = p.a.write(s, p.b, 1);
    wr.send_flags |= IBV_SEND_INLINE;
    CHECK(p.a.post(wr) == 0);
    value = 0;
    CHECK(p.a.completes(1, IBV_WC_SUCCESS));
    std::uint64_t got = 0;
    std::memcpy(&got, p.b.memory.data(), 8);
    CHECK(got == 0x1122334455667788);
    ibv_sge large = p.a.sge(65);
    wr = p.a.write(large, p.b, 2);
    wr.send_flags |= IBV_SEND_INLINE;
    CHECK(p.a.post(wr) == EINVAL);
}

TEST(unsignaled_complete_silently_and_hold_their_slots) {
    Limits limits;
    limits.sends = 8;
    Pair p(limits, limits);
    ibv_sge s = p.a.sge(8);
    for (std::uint64_t i = 0; i < 7; ++i) {
        ibv_send_wr wr = p.a.write(s, p.b, i);
        wr.send_flags = 0;
        CHECK(p.a.post(wr) == 0);
    }
    CHECK(!p.a.poll(0.05));
    CHECK(p.a.post(p.a.write(s, p.b, 7)) == 0);
    // Full until the signaled one is polled. Other devices may have more room than was asked for.
    CHECK(!software() || p.a.post(p.a.write(s, p.b, 8)) == ENOMEM);
    CHECK(p.a.completes(7, IBV_WC_SUCCESS));
    CHECK(p.a.post(p.a.write(s, p.b, 8)) == 0);
    CHECK(p.a.completes(8, IBV_WC_SUCCESS));
}

// The request fails at the requester, the queue pair of both goes to ERR, nothing is written.
void access_error(const Limits& at_b, void (*spoil)(Pair&, ibv_send_wr&), ibv_wc_status wanted) {
    Pair p({}, at_b);
    std::memset(p.b.memory.data(), 0, kBytes);
    fill(p.a, 4096, 3);
    CHECK(p.b.receive(77) == 0);
    ibv_sge s = p.a.sge(4096);
    ibv_send_wr wr = p.a.write(s, p.b, 1);
    spoil(p, wr);
    CHECK(p.a.post(wr) == 0);
    CHECK(p.a.post(p.a.write(s, p.b, 2)) == 0);
    CHECK(p.a.completes(1, wanted));
    CHECK(p.a.completes(2, IBV_WC_WR_FLUSH_ERR));
    CHECK(p.b.completes(77, IBV_WC_WR_FLUSH_ERR));
    if (!rxe()) {  // cards tell the responder so, rxe does not
        const auto event = p.b.event();
        CHECK(event == IBV_EVENT_QP_ACCESS_ERR || event == IBV_EVENT_QP_REQ_ERR);
    }
    bool untouched = true;
    for (std::size_t i = 0; i < kBytes; ++i) {
        untouched = untouched && p.b.memory.data()[i] == std::byte{0};
    }
    CHECK(untouched);
    // Posting in ERR is accepted, and flushed.
    CHECK(p.a.post(p.a.write(s, p.b, 3)) == 0);
    CHECK(p.a.completes(3, IBV_WC_WR_FLUSH_ERR));
    CHECK(p.b.receive(78) == 0);
    // rxe takes a receive without a system call, so that it notices this one later.
    CHECK(rxe() || p.b.completes(78, IBV_WC_WR_FLUSH_ERR));
}

TEST(bad_rkey) {
    access_error({}, [](Pair&, ibv_send_wr& wr) { wr.wr.rdma.rkey ^= 1; }, IBV_WC_REM_ACCESS_ERR);
}
TEST(write_past_the_end) {
    access_error(
        {}, [](Pair&, ibv_send_wr& wr) { wr.wr.rdma.remote_addr += kBytes - 4095; },
        IBV_WC_REM_ACCESS_ERR);
}
TEST(write_before_the_start) {
    access_error(
        {}, [](Pair&, ibv_send_wr& wr) { wr.wr.rdma.remote_addr -= 1; }, IBV_WC_REM_ACCESS_ERR);
}
TEST(write_to_a_region_without_the_right) {
    Limits limits;
    limits.mr_access = IBV_ACCESS_LOCAL_WRITE;
    access_error(limits, [](Pair&, ibv_send_wr&) {}, IBV_WC_REM_ACCESS_ERR);
}
TEST(write_to_a_queue_pair_without_the_right) {
    Limits limits;
    limits.qp_access = 0;
    access_error(limits, [](Pair&, ibv_send_wr&) {}, IBV_WC_REM_INV_REQ_ERR);
}
TEST(write_to_a_deregistered_region) {
    access_error(
        {},
        [](Pair& p, ibv_send_wr& wr) {
            wr.wr.rdma.rkey = p.b.mr->rkey;
            CHECK(p.b.v->dereg_mr(p.b.mr) == 0);
            p.b.mr = p.b.v->reg_mr(p.b.pd, p.b.memory.data(), kBytes, 7);
            CHECK(p.b.mr->rkey != wr.wr.rdma.rkey);  // keys are not used again at once
        },
        IBV_WC_REM_ACCESS_ERR);
}

TEST(local_protection_comes_after_what_precedes_it) {
    const Setting slow("MKERNEL_SOFTVERBS_LATENCY_NS", "20000000");
    Pair p;
    ibv_sge s = p.a.sge(100'000);
    CHECK(p.a.post(p.a.write(s, p.b, 1)) == 0);
    s.lkey ^= 1;
    CHECK(p.a.post(p.a.write(s, p.b, 2)) == 0);
    CHECK(p.a.completes(1, IBV_WC_SUCCESS));
    CHECK(p.a.completes(2, rxe() ? IBV_WC_LOC_QP_OP_ERR : IBV_WC_LOC_PROT_ERR));
    s = p.a.sge(8);
    CHECK(p.a.post(p.a.write(s, p.b, 3)) == 0);
    CHECK(p.a.completes(3, IBV_WC_WR_FLUSH_ERR));
}

TEST(receiver_not_ready_gives_up) {
    constexpr std::uint64_t kTry = 40'960'000;
    Limits slow;
    slow.rnr_timer = 24;
    Pair p({}, slow);
    ibv_sge s = p.a.sge(8);
    ibv_send_wr wr = p.a.write(s, p.b, 1);
    wr.opcode = IBV_WR_RDMA_WRITE_WITH_IMM;
    const std::uint64_t start = monotonic_ns();
    CHECK(p.a.post(wr) == 0);
    CHECK(p.a.post(p.a.write(s, p.b, 2)) == 0);
    CHECK(p.a.completes(1, IBV_WC_RNR_RETRY_EXC_ERR));
    const std::uint64_t waited = monotonic_ns() - start;
    CHECK(waited >= 2 * kTry);  // two retries after the first refusal, and not two hundred
    CHECK(waited < 200 * kTry);
    CHECK(p.a.completes(2, IBV_WC_WR_FLUSH_ERR));
}

TEST(receiver_not_ready_is_retried) {
    Limits patient;
    patient.rnr_retry = 6;
    Limits slow;
    slow.rnr_timer = 28;  // 164 ms
    Pair p(patient, slow);
    ibv_sge s = p.a.sge(8);
    ibv_send_wr wr = p.a.write(s, p.b, 1);
    wr.opcode = IBV_WR_RDMA_WRITE_WITH_IMM;
    CHECK(p.a.post(wr) == 0);
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    CHECK(p.b.receive(9) == 0);
    CHECK(p.b.completes(9, IBV_WC_SUCCESS));
    CHECK(p.a.completes(1, IBV_WC_SUCCESS));
}

TEST(vanished_peer_exhausts_the_retries) {
    Limits limits;
    limits.timeout = 12;  // 16.8 ms a try
    Pair p(limits, limits);
    p.b.drop_qp();
    ibv_sge s = p.a.sge(8);
    const std::uint64_t start = monotonic_ns();
    CHECK(p.a.post(p.a.write(s, p.b, 1)) == 0);
    CHECK(p.a.completes(1, IBV_WC_RETRY_EXC_ERR));
    const double waited = static_cast<double>(monotonic_ns() - start) / 1e6;
    CHECK(waited >= 67 && waited < 10'000);
}

TEST(error_state_flushes_everything) {
    Pair p;
    for (std::uint64_t i = 0; i < 3; ++i) CHECK(p.a.receive(i) == 0);
    CHECK(p.a.to(IBV_QPS_ERR) == 0);
    for (std::uint64_t i = 0; i < 3; ++i) CHECK(p.a.completes(i, IBV_WC_WR_FLUSH_ERR));
    CHECK(p.a.rts() == EINVAL);
}

TEST(states_come_in_order_and_complete) {
    End a;
    End b;
    ibv_sge s = a.sge(8);
    CHECK(a.receive(1) == EINVAL);
    CHECK(a.rtr(b) == EINVAL);
    CHECK(a.rts() == EINVAL);
    CHECK(a.init() == 0);
    CHECK(a.init() == 0);  // may be repeated
    CHECK(a.receive(1) == 0);
    CHECK(a.post(a.write(s, b, 1)) == EINVAL);
    ibv_qp_attr attr{};
    attr.qp_state = IBV_QPS_RTR;
    CHECK(a.v->modify_qp(a.qp, &attr, IBV_QP_STATE) == EINVAL);  // attributes are missing
    CHECK(a.rtr(b) == 0);
    CHECK(a.post(a.write(s, b, 1)) == EINVAL);
    CHECK(a.rts() == 0);
    CHECK(a.v->destroy_cq(a.cq) == EBUSY);
    CHECK(a.v->dealloc_pd(a.pd) == EBUSY);
}

// Which states follow each other, and which attributes each step takes.
TEST(a_state_takes_its_attributes_and_no_others) {
    End a;
    End b;
    ibv_qp_attr attr{};
    attr.port_num = 1;
    attr.qp_access_flags = IBV_ACCESS_REMOTE_WRITE;
    attr.min_rnr_timer = 3;
    attr.timeout = 9;
    const auto change = [&](ibv_qp_state state, int mask) {
        attr.qp_state = state;
        return a.v->modify_qp(a.qp, &attr, IBV_QP_STATE | mask);
    };
    CHECK(a.to(IBV_QPS_ERR) == EINVAL);  // from RESET only INIT
    CHECK(change(IBV_QPS_INIT, IBV_QP_PKEY_INDEX | IBV_QP_PORT) == EINVAL);
    CHECK(change(IBV_QPS_INIT,
                 IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS | IBV_QP_TIMEOUT) == EINVAL);
    CHECK(a.init() == 0);
    CHECK(change(IBV_QPS_INIT, IBV_QP_ACCESS_FLAGS) == 0);
    CHECK(a.v->modify_qp(a.qp, &attr, IBV_QP_ACCESS_FLAGS) == 0);  // the state stays
    CHECK(a.v->modify_qp(a.qp, &attr, IBV_QP_MIN_RNR_TIMER) == EINVAL);
    CHECK(a.rtr(b) == 0);
    CHECK(a.rtr(b) == EINVAL);
    CHECK(a.init() == EINVAL);
    CHECK(a.rts() == 0);
    CHECK(a.rts() == EINVAL);
    CHECK(change(IBV_QPS_RTS, IBV_QP_MIN_RNR_TIMER | IBV_QP_ACCESS_FLAGS) == 0);
    CHECK(change(IBV_QPS_RTS, IBV_QP_TIMEOUT) == EINVAL);
    CHECK(a.to(IBV_QPS_ERR) == 0);
    CHECK(a.to(IBV_QPS_ERR) == 0);
    CHECK(a.init() == EINVAL);
    CHECK(a.rts() == EINVAL);
}

TEST(access_flags_changed_later_count) {
    Limits closed;
    closed.qp_access = 0;
    Pair p({}, closed);
    ibv_qp_attr attr{};
    attr.qp_state = IBV_QPS_RTS;
    attr.qp_access_flags = IBV_ACCESS_REMOTE_WRITE;
    CHECK(p.b.v->modify_qp(p.b.qp, &attr, IBV_QP_STATE | IBV_QP_ACCESS_FLAGS) == 0);
    ibv_sge s = p.a.sge(8);
    CHECK(p.a.post(p.a.write(s, p.b, 1)) == 0);
    CHECK(p.a.completes(1, IBV_WC_SUCCESS));
}

TEST(a_receiver_need_not_be_ready_to_send) {
    End a;
    End b;
    CHECK(a.init() == 0 && b.init() == 0);
    CHECK(a.rtr(b) == 0 && b.rtr(a) == 0 && a.rts() == 0);
    CHECK(b.receive(5) == 0);
    ibv_sge s = a.sge(100);
    ibv_send_wr wr = a.write(s, b, 1);
    wr.opcode = IBV_WR_RDMA_WRITE_WITH_IMM;
    CHECK(a.post(wr) == 0);
    CHECK(a.completes(1, IBV_WC_SUCCESS));
    CHECK(b.completes(5, IBV_WC_SUCCESS));
}

TEST(an_empty_write_needs_no_key) {
    Pair p;
    CHECK(p.b.receive(5) == 0);
    ibv_sge none = p.a.sge(0);
    for (const auto opcode : {IBV_WR_RDMA_WRITE, IBV_WR_RDMA_WRITE_WITH_IMM}) {
        ibv_send_wr wr = p.a.write(none, p.b, opcode);
        wr.opcode = opcode;
        wr.wr.rdma.rkey = 0;
        wr.wr.rdma.remote_addr = 0;
        CHECK(p.a.post(wr) == 0);
        CHECK(p.a.completes(opcode, IBV_WC_SUCCESS));
    }
    CHECK(p.b.completes(5, IBV_WC_SUCCESS));
}

TEST(an_unsignaled_failure_completes) {
    Pair p;
    ibv_sge s = p.a.sge(8);
    ibv_send_wr wr = p.a.write(s, p.b, 1);
    wr.send_flags = 0;
    wr.wr.rdma.rkey ^= 1;
    CHECK(p.a.post(wr) == 0);
    CHECK(p.a.completes(1, IBV_WC_REM_ACCESS_ERR));
}

TEST(a_key_of_another_domain) {
    Pair p;
    ibv_pd* other = p.b.v->alloc_pd(p.b.context.get());
    ibv_mr* mr = p.b.v->reg_mr(other, p.b.memory.data(), kBytes, 7);
    CHECK(mr != nullptr);
    ibv_sge s = p.a.sge(8);
    ibv_send_wr wr = p.a.write(s, p.b, 1);
    if (mr != nullptr) wr.wr.rdma.rkey = mr->rkey;
    CHECK(p.a.post(wr) == 0);
    CHECK(p.a.completes(1, IBV_WC_REM_ACCESS_ERR));
    if (mr != nullptr) CHECK(p.b.v->dereg_mr(mr) == 0);
    CHECK(p.b.v->dealloc_pd(other) == 0);
}

TEST(a_list_stops_at_what_is_refused) {
    Pair p;
    ibv_sge s[5];
    for (auto& each : s) each = p.a.sge(8);
    ibv_send_wr wrs[3] = {p.a.write(s[0], p.b, 1), p.a.write(s[0], p.b, 2),
                          p.a.write(s[0], p.b, 3)};
    wrs[0].next = &wrs[1];
    wrs[1].next = &wrs[2];
    wrs[1].sg_list = s;
    wrs[1].num_sge = 5;  // the queue pair has 1
    ibv_send_wr* bad = nullptr;
    CHECK(ibv_post_send(p.a.qp, wrs, &bad) != 0);
    CHECK(bad == &wrs[1]);
    CHECK(p.a.completes(1, IBV_WC_SUCCESS));
    CHECK(!p.a.poll(0.05));
    CHECK(p.a.post(p.a.write(s[0], p.b, 4)) == 0);
    CHECK(p.a.completes(4, IBV_WC_SUCCESS));
}

// What was placed before the error stays, what follows it is not placed.
TEST(an_error_stops_what_follows_it) {
    Pair p;
    fill(p.a, 64, 6);
    std::memset(p.b.memory.data(), 0, 256);
    for (std::uint64_t i = 0; i < 3; ++i) CHECK(p.b.receive(i) == 0);
    ibv_sge s = p.a.sge(64);
    ibv_send_wr wrs[3] = {p.a.write(s, p.b, 0), p.a.write(s, p.b, 1), p.a.write(s, p.b, 2)};
    for (unsigned i = 0; i < 3; ++i) {
        wrs[i].opcode = IBV_WR_RDMA_WRITE_WITH_IMM;
        wrs[i].wr.rdma.remote_addr += 64 * i;
        if (i < 2) wrs[i].next = &wrs[i + 1];
    }
    wrs[1].wr.rdma.rkey ^= 1;
    ibv_send_wr* bad = nullptr;
    CHECK(ibv_post_send(p.a.qp, wrs, &bad) == 0);
    CHECK(p.a.completes(0, IBV_WC_SUCCESS));
    CHECK(p.a.completes(1, IBV_WC_REM_ACCESS_ERR));
    CHECK(p.a.completes(2, IBV_WC_WR_FLUSH_ERR));
    CHECK(p.b.completes(0, IBV_WC_SUCCESS));
    CHECK(p.b.completes(1, rxe() ? IBV_WC_REM_ACCESS_ERR : IBV_WC_WR_FLUSH_ERR));
    CHECK(p.b.completes(2, IBV_WC_WR_FLUSH_ERR));
    CHECK(std::memcmp(p.a.memory.data(), p.b.memory.data(), 64) == 0);
    bool untouched = true;
    for (std::size_t i = 64; i < 256; ++i) {
        untouched = untouched && p.b.memory.data()[i] == std::byte{0};
    }
    CHECK(untouched);
}

TEST(overrun_queue_is_an_error) {
    Limits limits;
    limits.cqe = 2;
    Pair p(limits);
    ibv_sge s = p.a.sge(8);
    for (std::uint64_t i = 0; i < 4; ++i) CHECK(p.a.post(p.a.write(s, p.b, i)) == 0);
    CHECK(p.a.event() == IBV_EVENT_CQ_ERR);
}

TEST(a_full_receive_queue) {
    Limits limits;
    limits.receives = 4;
    Pair p(limits, limits);
    int posted = 0;
    while (posted < 64 && p.a.receive(1) == 0) ++posted;
    CHECK(software() ? posted == 4 : posted >= 4);  // other devices may have more room
    CHECK(posted == 64 || p.a.receive(1) == ENOMEM);
}

TEST(creation_is_checked) {
    End a;
    const auto refused = [&](int error, auto spoil) {
        ibv_qp_init_attr init{};
        init.qp_type = IBV_QPT_RC;
        init.send_cq = init.recv_cq = a.cq;
        init.cap = {16, 16, 1, 1, 64};
        spoil(init);
        errno = 0;
        ibv_qp* made = a.v->create_qp(a.pd, &init);
        const int why = errno;
        if (made != nullptr) a.v->destroy_qp(made);
        return made == nullptr && why == error;
    };
    ibv_device_attr most{};
    CHECK(a.v->query_device(a.context.get(), &most) == 0);
    const auto beyond = static_cast<std::uint32_t>(most.max_qp_wr) + 1;
    CHECK(!refused(0, [](ibv_qp_init_attr&) {}));
    CHECK(refused(EINVAL, [&](ibv_qp_init_attr& init) { init.cap.max_send_wr = beyond; }));
    CHECK(refused(EINVAL, [&](ibv_qp_init_attr& init) { init.cap.max_recv_wr = beyond; }));
    CHECK(refused(EINVAL, [](ibv_qp_init_attr& init) { init.cap.max_send_sge = 1000; }));
    CHECK(refused(EINVAL, [](ibv_qp_init_attr& init) { init.cap.max_inline_data = 1 << 20; }));
}

// A queue pair that lives long holds its ring; those made and destroyed beside it take the other rings in
// turn, and no number comes again before a turn of all generations.
TEST(queue_pair_numbers_do_not_come_again_beside_one_that_lives) {
    if (!software()) return;
    constexpr std::uint32_t kRings = 512;
    for (std::uint32_t kept_at : {0u, kRings - 1}) {
        End a;
        ibv_qp_init_attr init{};
        init.qp_type = IBV_QPT_RC;
        init.send_cq = init.recv_cq = a.cq;
        init.cap = {1, 1, 1, 1, 64};
        ibv_qp* kept = nullptr;
        std::set<std::uint32_t> numbers{a.qp->qp_num};
        std::size_t made = 1;
        while (made < 3 * kRings) {
            ibv_qp* qp = a.v->create_qp(a.pd, &init);
            CHECK(qp != nullptr);
            if (qp == nullptr) return;
            ++made;
            numbers.insert(qp->qp_num);
            if (kept == nullptr && qp->qp_num % kRings == kept_at) {
                kept = qp;
            } else {
                a.v->destroy_qp(qp);
            }
        }
        CHECK(numbers.size() == made);
        if (kept != nullptr) a.v->destroy_qp(kept);
    }
}

TEST(atomics_are_not_there) {
    if (!software()) return;
    Pair p;
    ibv_sge s = p.a.sge(8);
    ibv_send_wr wr = p.a.write(s, p.b, 1);
    wr.opcode = IBV_WR_ATOMIC_FETCH_AND_ADD;
    CHECK(p.a.post(wr) == EOPNOTSUPP);
    CHECK(p.a.post(p.a.write(s, p.b, 2)) == 0 && p.a.completes(2, IBV_WC_SUCCESS));
}

TEST(a_message_longer_than_the_device_takes) {
    if (!software()) return;
    const Setting most("MKERNEL_SOFTVERBS_MAX_MESSAGE", "4096");
    Pair p;
    ibv_sge fits = p.a.sge(4096), longer = p.a.sge(4097);
    CHECK(p.a.post(p.a.write(fits, p.b, 1)) == 0 && p.a.completes(1, IBV_WC_SUCCESS));
    CHECK(p.a.post(p.a.write(longer, p.b, 2)) == 0 && p.a.completes(2, IBV_WC_LOC_LEN_ERR));
    CHECK(p.a.post(p.a.write(fits, p.b, 3)) == 0 && p.a.completes(3, IBV_WC_WR_FLUSH_ERR));
}

TEST(registration_is_checked) {
    End a;
    CHECK(a.v->reg_mr(a.pd, a.memory.data(), kBytes, IBV_ACCESS_REMOTE_WRITE) == nullptr);
    CHECK(errno == EINVAL);
    CHECK(a.v->reg_mr(a.pd, reinterpret_cast<void*>(4096), 4096, IBV_ACCESS_LOCAL_WRITE) ==
          nullptr);
    CHECK(errno == EFAULT);
#ifndef __SANITIZE_ADDRESS__  // UBSan, which comes with it, looks at exceptions through descriptors of its own
    if (!software()) return;
    // Where the device cannot look whether memory is there it says why.
    rlimit before{};
    CHECK(::getrlimit(RLIMIT_NOFILE, &before) == 0);
    const rlimit none{0, before.rlim_max};
    CHECK(::setrlimit(RLIMIT_NOFILE, &none) == 0);
    CHECK(a.v->reg_mr(a.pd, a.memory.data(), 4096, IBV_ACCESS_LOCAL_WRITE) == nullptr);
    CHECK(errno == EMFILE);
    CHECK(::setrlimit(RLIMIT_NOFILE, &before) == 0);
#endif
}

TEST(a_wrong_gid_does_not_connect) {
    if (!software()) return;
    End a;
    End b;
    CHECK(a.init() == 0);
    ibv_qp_attr attr{};
    attr.qp_state = IBV_QPS_RTR;
    attr.path_mtu = IBV_MTU_4096;
    attr.ah_attr.is_global = 1;
    attr.ah_attr.port_num = 1;
    a.v->query_gid(b.context.get(), 1, 1, &attr.ah_attr.grh.dgid);
    attr.ah_attr.grh.dgid.raw[15] ^= 1;  // the cookie of another port
    const int mask = IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                     IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER;
    CHECK(a.v->modify_qp(a.qp, &attr, mask) == EHOSTUNREACH);
}

TEST(completion_channel_tells_once) {
    End a;
    ibv_comp_channel* channel = a.v->create_comp_channel(a.context.get());
    ibv_cq* cq = a.v->create_cq(a.context.get(), 16, &a, channel, 0);
    ibv_qp_init_attr init{};
    init.qp_type = IBV_QPT_RC;
    init.send_cq = init.recv_cq = cq;
    init.cap = {4, 4, 1, 1, 0};
    a.drop_qp();
    a.qp = a.v->create_qp(a.pd, &init);
    CHECK(a.v->destroy_comp_channel(channel) == EBUSY);
    CHECK(a.init() == 0);
    CHECK(a.receive(1) == 0 && a.receive(2) == 0);
    CHECK(ibv_req_notify_cq(cq, 0) == 0);
    CHECK(a.to(IBV_QPS_ERR) == 0);
    pollfd wait{channel->fd, POLLIN, 0};
    CHECK(::poll(&wait, 1, 2000) == 1);
    ibv_cq* which = nullptr;
    void* tag = nullptr;
    CHECK(a.v->get_cq_event(channel, &which, &tag) == 0 && which == cq && tag == &a);
    a.v->ack_cq_events(cq, 1);
    CHECK(::poll(&wait, 1, 20) == 0);
    ibv_wc wc[4];
    CHECK(ibv_poll_cq(cq, 4, wc) == 2);
    a.drop_qp();
    CHECK(a.v->destroy_cq(cq) == 0);
    CHECK(a.v->destroy_comp_channel(channel) == 0);
}

TEST(writes_of_all_sizes_by_reference) {
    writes_of_all_sizes(true);
}

TEST(writes_of_all_sizes_through_the_ring) {
    writes_of_all_sizes(false);
}

}  // namespace

int main(int argc, char** argv) {
    if (argc < 2) return std::printf("usage: test_softverbs LIBRARY [DEVICE [TEST]]\n"), 2;
    testing::library = argv[1];
    if (argc > 2) device = argv[2];
    return testing::run(argc > 3 ? argv[3] : nullptr);
}
