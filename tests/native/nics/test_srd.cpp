// The software device's SRD personality against the rules of EFA, through efadv and the extended
// verbs alone. Devices of one process talk to each other. argv[1]: the library.
#include <arpa/inet.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "backends/nics/verbs/devices.hpp"
#include "backends/nics/verbs/efadv.hpp"
#include "backends/nics/verbs/loader.hpp"
#include "backends/transport/signal_pad.hpp"
#include "check.hpp"
#include "setting.hpp"
#include "srd_end.hpp"

using namespace mkernel::nics;
using namespace mkernel::nics::testing::srd;
using mkernel::nics::testing::monotonic_ns;
using mkernel::nics::testing::Setting;

namespace {

// ---- tests that fork, before there are threads

// A process that sends to the address it is told, says so, and waits to be killed.
struct Sender {
    pid_t pid = 0;
    int tell = -1;
    int hear = -1;
};

Sender fork_sender() {
    int down[2], up[2];
    CHECK(::pipe(down) == 0 && ::pipe(up) == 0);
    const pid_t child = ::fork();
    if (child == 0) {
        ::close(down[1]);  // so that a parent that gives up ends this process
        Address peer;
        if (::read(down[0], &peer, sizeof(peer)) != sizeof(peer)) ::_exit(1);
        End a;
        // Refused, as the peer has no handle of it; but it holds a flow, and sends on.
        ibv_ah* ah = a.handle(peer);
        char sent = a.write(ah, peer, 1, 8) == 0 && a.poll().has_value() ? 1 : 0;
        for (std::uint64_t id = 2; id < 20; ++id) {
            if (a.write(ah, peer, id, kBytes) != 0) sent = 0;
        }
        if (::write(up[1], &sent, 1) == 1) std::this_thread::sleep_for(std::chrono::seconds(20));
        ::_exit(1);
    }
    ::close(down[0]);
    ::close(up[1]);
    return {child, down[1], up[0]};
}

// Killed senders hold nothing: their flows are given to others.
TEST(killed_senders_leave_nothing) {
    std::vector<Sender> senders;  // forked before there are threads; more of them than flows
    for (std::uint32_t i = 0; i < 70; ++i) senders.push_back(fork_sender());
    End b;
    const Address peer = b.address();
    for (const Sender& sender : senders) {
        char sent = 0;
        CHECK(::write(sender.tell, &peer, sizeof(peer)) == sizeof(peer));
        CHECK(::read(sender.hear, &sent, 1) == 1 && sent == 1);
        CHECK(::kill(sender.pid, SIGKILL) == 0);
        CHECK(::waitpid(sender.pid, nullptr, 0) == sender.pid);
        ::close(sender.tell);
        ::close(sender.hear);
    }
    End a;
    b.handle(a.address());
    CHECK(a.write(a.handle(peer), peer, 1, 8) == 0 && a.completes(1, IBV_WC_SUCCESS));
}

// A process that is killed with a message in flight.
TEST(a_killed_peer_times_out) {
    int pipe_ends[2];
    CHECK(::pipe(pipe_ends) == 0);
    const pid_t child = ::fork();
    if (child == 0) {
        const End end;  // knows nobody's handle and posts no receives; both are not needed
        const Address mine = end.address();
        const bool told = ::write(pipe_ends[1], &mine, sizeof(mine)) == sizeof(mine);
        std::this_thread::sleep_for(std::chrono::seconds(told ? 20 : 0));
        ::_exit(1);
    }
    Address peer;
    CHECK(::read(pipe_ends[0], &peer, sizeof(peer)) == sizeof(peer));
    const Setting soon("MKERNEL_SOFTVERBS_SRD_TIMEOUT_MS", "50");
    End a;
    ibv_ah* ah = a.handle(peer);
    CHECK(a.write(ah, peer, 1, 8) == 0 && a.completes(1, IBV_WC_REM_OP_ERR));
    CHECK(::kill(child, SIGKILL) == 0);
    CHECK(::waitpid(child, nullptr, 0) == child);
    ::close(pipe_ends[0]);
    ::close(pipe_ends[1]);
    CHECK(a.write(ah, peer, 2, 8) == 0 && a.completes(2, IBV_WC_RESP_TIMEOUT_ERR));
}

// ---- the rules

TEST(what_the_device_says) {
    const End end;
    efadv_device_attr attr{};
    CHECK(end.efa->query_device(end.context.get(), &attr, sizeof(attr)) == 0);
    CHECK(attr.max_sq_sge == 2 && attr.inline_buf_size == 32);
    CHECK((attr.device_caps & verbs::kEfaRdmaWrite) != 0);
    CHECK((attr.device_caps & verbs::kEfaUnsolicitedWriteRecv) == 0);
    CHECK(attr.max_rdma_size == 1u << 30);
    CHECK(end.base->qp_num != 0 && end.base->qp_num <= 0xffff);
}

TEST(creation_is_checked) {
    End end;
    const ibv_qp_init_attr_ex good = end.init;
    const auto refused = [&](int error) {
        errno = 0;
        ibv_qp* made = end.create();
        const int why = errno;
        if (made != nullptr) end.v->destroy_qp(made);
        end.init = good;
        return made == nullptr && why == error;
    };
    end.init.qp_type = IBV_QPT_RC;
    CHECK(refused(EINVAL));
    ibv_srq srq{};
    end.init.srq = &srq;
    CHECK(refused(EINVAL));
    end.init.cap.max_send_sge = 3;
    CHECK(refused(EINVAL));
    end.init.cap.max_inline_data = 33;
    CHECK(refused(EINVAL));
    end.init.send_ops_flags |= IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD;
    CHECK(refused(EOPNOTSUPP));
    efadv_qp_init_attr unsolicited{};
    unsolicited.driver_qp_type = EFADV_QP_DRIVER_TYPE_SRD;
    unsolicited.reserved[0] = 1;
    CHECK(end.efa->create_qp_ex(end.context.get(), &end.init, &unsolicited, sizeof(unsolicited)) ==
              nullptr &&
          errno == EOPNOTSUPP);
    CHECK(end.receive(1, 0) == EINVAL);
    CHECK(end.receive(1) == 0);
}

TEST(a_request_within_the_limits) {
    Pair p;
    ibv_qp_ex* qp = p.a.qp;
    for (const unsigned flags : {0u, unsigned{IBV_SEND_SIGNALED} | IBV_SEND_FENCE}) {
        ibv_wr_start(qp);
        p.a.stage(p.ah, p.peer, 1, 8, -1, 0, 0, flags);
        CHECK(ibv_wr_complete(qp) == EINVAL);  // signaled only, and no more
    }
    ibv_wr_start(qp);
    p.a.stage(p.ah, p.peer, 1, 8);
    ibv_wr_set_ud_addr(qp, p.ah, 0x10000, kKey);
    CHECK(ibv_wr_complete(qp) == EINVAL);  // 16-bit numbers

    ibv_wr_start(qp);
    qp->wr_flags = IBV_SEND_SIGNALED;
    ibv_wr_rdma_write(qp, p.peer.rkey, p.peer.memory);
    ibv_wr_set_sge(qp, p.a.mr->lkey, p.a.memory.address(), 8);
    CHECK(ibv_wr_complete(qp) == EINVAL);  // to nobody

    CHECK(!p.a.poll(0.05));
    CHECK(p.write(10, 8) == 0 && p.a.completes(10, IBV_WC_SUCCESS));
}

TEST(a_full_queue_rolls_the_batch_back) {
    Limits few;
    few.sends = 4;
    Pair p(few);
    p.a.memory.data()[0] = std::byte{7};
    // Two that fit, then a batch of three of which two would.
    ibv_wr_start(p.a.qp);
    for (std::uint64_t id = 1; id <= 2; ++id) p.a.stage(p.ah, p.peer, id, 1, -1, 0, id);
    CHECK(ibv_wr_complete(p.a.qp) == 0);
    ibv_wr_start(p.a.qp);
    for (std::uint64_t id = 3; id <= 5; ++id) p.a.stage(p.ah, p.peer, id, 1, -1, 0, id);
    CHECK(ibv_wr_complete(p.a.qp) == ENOMEM);
    std::vector<std::uint64_t> ids;
    while (const auto wc = p.a.poll(ids.size() < 2 ? 5 : 0.1)) ids.push_back(wc->wr_id);
    std::sort(ids.begin(), ids.end());
    CHECK((ids == std::vector<std::uint64_t>{1, 2}));
    CHECK(p.b.memory.data()[2] == std::byte{7} && p.b.memory.data()[3] == std::byte{0});
    // A slot is free once its completion was polled, not before: the same batch now goes.
    ibv_wr_start(p.a.qp);
    for (std::uint64_t id = 3; id <= 5; ++id) p.a.stage(p.ah, p.peer, id, 1, -1, 0, id);
    CHECK(ibv_wr_complete(p.a.qp) == 0);
    for (int i = 0; i < 3; ++i) CHECK(p.a.poll().has_value());
    CHECK(p.b.memory.data()[5] == std::byte{7});
}

TEST(an_immediate_consumes_a_receive) {
    Pair p;
    CHECK(p.write(1, 8) == 0 && p.a.completes(1, IBV_WC_SUCCESS));  // none for a plain write
    CHECK(p.write(2, 8, 5) == 0);
    CHECK(!p.a.poll(0.1));  // waits, for ever by default
    CHECK(p.b.receive(3) == 0);
    const auto wc = p.b.poll();
    CHECK(wc && wc->wr_id == 3 && wc->opcode == IBV_WC_RECV_RDMA_WITH_IMM);
    CHECK(wc && ntohl(wc->imm_data) == 5 && wc->byte_len == 8);
    CHECK(p.a.completes(2, IBV_WC_SUCCESS));
    CHECK(!p.b.poll(0.02));
}

TEST(without_a_receive_a_bounded_sender_gives_up) {
    Limits bounded;
    bounded.rnr_retry = 2;
    Pair p(bounded);
    CHECK(p.write(1, 8, 5) == 0 && p.a.completes(1, IBV_WC_RNR_RETRY_EXC_ERR));
    CHECK(p.b.receive(2) == 0);
    CHECK(p.write(3, 8, 6) == 0);  // the queue pair goes on
    const auto wc = p.b.poll();
    CHECK(wc && wc->wr_id == 2 && ntohl(wc->imm_data) == 6);
    CHECK(p.a.completes(3, IBV_WC_SUCCESS));
}

TEST(what_the_peer_refuses) {
    Pair p;
    Address wrong = p.peer;
    wrong.qpn = p.peer.qpn == 0xffff ? 1 : p.peer.qpn + 1;
    CHECK(p.a.write(p.ah, wrong, 1, 8) == 0 && p.a.completes(1, IBV_WC_REM_INV_RD_REQ_ERR));
    wrong = p.peer;
    wrong.rkey ^= 1;
    CHECK(p.a.write(p.ah, wrong, 2, 8) == 0 && p.a.completes(2, IBV_WC_REM_ACCESS_ERR));
    CHECK(p.write(3, 16, -1, 0, kBytes - 8) == 0 && p.a.completes(3, IBV_WC_REM_ACCESS_ERR));
    CHECK(p.b.memory.data()[kBytes - 1] == std::byte{0});
    ibv_wr_start(p.a.qp);
    p.a.stage(p.ah, p.peer, 4, 8);
    ibv_wr_set_ud_addr(p.a.qp, p.ah, p.peer.qpn, kKey + 1);
    CHECK(ibv_wr_complete(p.a.qp) == 0 && p.a.completes(4, IBV_WC_REM_INV_RD_REQ_ERR));
    // What is wrong here.
    ibv_wr_start(p.a.qp);
    p.a.stage(p.ah, p.peer, 5, 8);
    ibv_wr_set_sge(p.a.qp, p.a.mr->lkey ^ 1, p.a.memory.address(), 8);
    CHECK(ibv_wr_complete(p.a.qp) == 0 && p.a.completes(5, IBV_WC_LOC_PROT_ERR));
    // None of it stops the queue pair, and a queue pair that is gone is a wrong number.
    CHECK(p.write(6, 8) == 0 && p.a.completes(6, IBV_WC_SUCCESS));
    p.b.drop();
    CHECK(p.write(7, 8) == 0 && p.a.completes(7, IBV_WC_REM_INV_RD_REQ_ERR));
}

TEST(a_peer_without_our_handle) {
    End a;
    const End b;
    const Address peer = b.address();
    CHECK(a.write(a.handle(peer), peer, 1, 8) == 0 && a.completes(1, IBV_WC_REM_OP_ERR));
}

TEST(a_message_longer_than_the_device_takes) {
    const Setting most("MKERNEL_SOFTVERBS_MAX_MESSAGE", "4096");
    Pair p;
    CHECK(p.write(1, 4097) == 0 && p.a.completes(1, IBV_WC_LOC_LEN_ERR));
    CHECK(p.write(2, 4096) == 0 && p.a.completes(2, IBV_WC_SUCCESS));
}

TEST(a_full_receive_queue) {
    Limits few;
    few.receives = 4;
    const End end(few);
    for (std::uint64_t id = 0; id < 4; ++id) CHECK(end.receive(id) == 0);
    CHECK(end.receive(4) == ENOMEM);
    CHECK(end.receive(5, 2) == EINVAL);  // made for one piece
}

TEST(handles_are_checked) {
    End a;
    Address nowhere = a.address();
    nowhere.gid.raw[0] = 0;
    errno = 0;
    CHECK(a.handle(nowhere) == nullptr && errno == EINVAL);
    ibv_ah_attr attr{};
    attr.port_num = 1;
    attr.grh.dgid = a.address().gid;
    CHECK(a.efa->create_ah(a.pd, &attr) == nullptr);  // by GID only
    // A handle of another domain.
    ibv_pd* other = a.v->alloc_pd(a.context.get());
    attr.is_global = 1;
    ibv_ah* foreign = a.efa->create_ah(other, &attr);
    CHECK(foreign != nullptr && a.v->dealloc_pd(other) == EBUSY);
    CHECK(a.write(foreign, a.address(), 1, 8) == EINVAL);
    CHECK(a.efa->destroy_ah(foreign) == 0 && a.v->dealloc_pd(other) == 0);
}

TEST(states_come_in_order) {
    Limits idle;
    idle.ready = false;
    End a(idle);
    ibv_qp_attr attr{};
    attr.port_num = 1;
    const auto to = [&](ibv_qp_state state, int mask) {
        attr.qp_state = state;
        return a.v->modify_qp(a.base, &attr, IBV_QP_STATE | mask);
    };
    CHECK(a.receive(1) == EINVAL);
    CHECK(to(IBV_QPS_RTR, 0) == EINVAL);
    CHECK(to(IBV_QPS_INIT, IBV_QP_PKEY_INDEX | IBV_QP_PORT) == EINVAL);  // its key is missing
    CHECK(to(IBV_QPS_INIT, IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY) == 0);
    CHECK(to(IBV_QPS_RTS, IBV_QP_SQ_PSN) == EINVAL);
    CHECK(to(IBV_QPS_RTR, 0) == 0);
    ibv_ah* ah = a.handle(a.address());
    CHECK(a.write(ah, a.address(), 1, 8) == EINVAL);  // not yet
    CHECK(to(IBV_QPS_RTS, 0) == EINVAL);
    CHECK(to(IBV_QPS_RTS, IBV_QP_SQ_PSN) == 0);
    CHECK(a.receive(1) == 0);
}

TEST(a_closed_peer_times_out) {
    const Setting soon("MKERNEL_SOFTVERBS_SRD_TIMEOUT_MS", "50");
    End a;
    auto b = std::make_unique<End>();
    const Address peer = b->address();
    b->handle(a.address());
    ibv_ah* ah = a.handle(peer);
    CHECK(a.write(ah, peer, 1, 8) == 0 && a.completes(1, IBV_WC_SUCCESS));
    b.reset();
    CHECK(a.write(ah, peer, 2, 8) == 0 && a.completes(2, IBV_WC_RESP_TIMEOUT_ERR));
    CHECK(a.write(ah, peer, 3, 8) == 0 && a.completes(3, IBV_WC_RESP_TIMEOUT_ERR));
    // Another peer is reached all the same.
    End c;
    c.handle(a.address());
    CHECK(a.write(a.handle(c.address()), c.address(), 4, 8) == 0 && a.completes(4, IBV_WC_SUCCESS));
}

TEST(error_state_flushes_everything) {
    Pair p;
    CHECK(p.b.receive(1) == 0 && p.b.receive(2) == 0);
    CHECK(p.b.to(IBV_QPS_ERR) == 0);
    CHECK(p.b.completes(1, IBV_WC_WR_FLUSH_ERR) && p.b.completes(2, IBV_WC_WR_FLUSH_ERR));
    CHECK(p.write(3, 8, 1) == 0 && p.a.completes(3, IBV_WC_REM_INV_RD_REQ_ERR));
    CHECK(p.a.to(IBV_QPS_ERR) == 0);
    CHECK(p.write(4, 8) == 0 && p.a.completes(4, IBV_WC_WR_FLUSH_ERR));
}

// When a queue pair ends, no more is placed of a message that is on its way to it.
TEST(what_comes_late_finds_no_queue_pair) {
    const Setting late("MKERNEL_SOFTVERBS_HOLD_NS", "200000000");
    const Setting once("MKERNEL_SOFTVERBS_DUPLICATES", "0");
    Pair p;
    CHECK(p.write(1, kBytes) == 0);
    CHECK(!p.a.poll(0.02));
    CHECK(p.b.to(IBV_QPS_ERR) == 0);
    CHECK(p.a.completes(1, IBV_WC_REM_INV_RD_REQ_ERR));
}

// A message in flight is flushed with its queue pair, once.
TEST(a_message_in_flight_is_flushed) {
    const Setting in_order("MKERNEL_SOFTVERBS_REORDER", "0");
    Pair p;
    CHECK(p.write(1, 8, 1) == 0);
    // Once a later one is there, the first has arrived, and waits for a receive.
    CHECK(p.write(2, 8) == 0 && p.a.completes(2, IBV_WC_SUCCESS));
    CHECK(p.a.to(IBV_QPS_ERR) == 0);
    CHECK(p.a.completes(1, IBV_WC_WR_FLUSH_ERR));
    CHECK(p.b.receive(2) == 0 && p.b.completes(2, IBV_WC_SUCCESS));
    CHECK(!p.a.poll(0.05));
}

std::uint32_t word(std::uint64_t seed, std::uint64_t at) {
    return static_cast<std::uint32_t>((seed * 0x9e3779b97f4a7c15u + at) * 0xbf58476d1ce4e5b9u >>
                                      32);
}
void fill(std::byte* data, std::uint64_t seed, std::size_t bytes) {
    for (std::size_t i = 0; i < bytes; ++i) data[i] = static_cast<std::byte>(word(seed, i));
}
bool filled(const std::byte* data, std::uint64_t seed, std::size_t bytes) {
    for (std::size_t i = 0; i < bytes; ++i) {
        if (data[i] != static_cast<std::byte>(word(seed, i))) return false;
    }
    return true;
}

// Sizes, peers and the order of arrival mixed; each message once, and whole when its immediate is
// seen. Returns the arrivals: (sender, message).
std::vector<std::pair<int, std::uint32_t>> storm(bool shared) {
    constexpr std::uint32_t kMessages = 120;
    constexpr std::uint32_t kSlot = 16 * 1024;
    static constexpr std::uint32_t kSizes[] = {8, 1, 16000, 0, 4096, 3, 9001, 64};
    Limits limits;
    limits.sends = 256;
    limits.shared = shared;
    End a(limits);
    End c(limits);
    End b(limits);
    const Address peer = b.address();
    b.handle(a.address());
    b.handle(c.address());
    End* senders[] = {&a, &c};
    std::vector<std::pair<int, std::uint32_t>> order;
    for (std::uint32_t i = 0; i < 2 * kMessages; ++i) CHECK(b.receive(i) == 0);
    for (int s = 0; s < 2; ++s) {
        ibv_ah* ah = senders[s]->handle(peer);
        ibv_wr_start(senders[s]->qp);
        for (std::uint32_t i = 0; i < kMessages; ++i) {
            const std::uint64_t from = std::uint64_t{i} * kSlot;
            const std::uint64_t to = (std::uint64_t(s) * kMessages + i) * kSlot;
            fill(senders[s]->memory.data() + from, to, kSizes[i % 8]);
            senders[s]->stage(ah, peer, i, kSizes[i % 8], s << 16 | static_cast<int>(i), from, to);
        }
        CHECK(ibv_wr_complete(senders[s]->qp) == 0);
    }
    for (std::uint32_t n = 0; n < 2 * kMessages; ++n) {
        const auto wc = b.poll();
        CHECK(wc && wc->status == IBV_WC_SUCCESS);
        if (!wc) break;
        const std::uint32_t imm = ntohl(wc->imm_data);
        const std::uint32_t message = imm & 0xffff;
        const std::uint64_t to = (std::uint64_t{imm >> 16} * kMessages + message) * kSlot;
        CHECK(wc->byte_len == kSizes[message % 8]);
        CHECK(filled(b.memory.data() + to, to, kSizes[message % 8]));
        // Nothing comes after the completion: what we write now stays.
        std::memset(b.memory.data() + to, 0xee, kSizes[message % 8]);
        order.emplace_back(static_cast<int>(imm >> 16), message);
    }
    CHECK(!b.poll(0.02));
    for (const auto& [s, message] : order) {
        const std::uint64_t to = (std::uint64_t(s) * kMessages + message) * kSlot;
        const std::byte* at = b.memory.data() + to;
        CHECK(std::all_of(at, at + kSizes[message % 8],
                          [](std::byte each) { return each == std::byte{0xee}; }));
    }
    for (End* sender : senders) {
        for (std::uint32_t i = 0; i < kMessages; ++i) {
            const auto wc = sender->poll();
            CHECK(wc && wc->status == IBV_WC_SUCCESS);
        }
        CHECK(!sender->poll(0.01));
    }
    auto sorted = order;
    std::sort(sorted.begin(), sorted.end());
    CHECK(std::adjacent_find(sorted.begin(), sorted.end()) == sorted.end());
    CHECK(sorted.size() == 2 * kMessages);
    return order;
}

bool in_order(const std::vector<std::pair<int, std::uint32_t>>& order) {
    std::map<int, std::uint32_t> next;
    return std::all_of(order.begin(), order.end(),
                       [&](const auto& each) { return next[each.first]++ == each.second; });
}

TEST(messages_arrive_out_of_order_once_and_whole) {
    const Setting often("MKERNEL_SOFTVERBS_DUPLICATES", "50");
    for (const char* seed : {"1", "2", "3"}) {
        const Setting chosen("MKERNEL_SOFTVERBS_SEED", seed);
        CHECK(!in_order(storm(true)));
        CHECK(!in_order(storm(false)));
    }
}

TEST(order_can_be_had_for_comparison) {
    const Setting off("MKERNEL_SOFTVERBS_REORDER", "0");
    CHECK(in_order(storm(true)));
}

// The reason why a flag must not be a write of its own.
TEST(a_small_message_overtakes_a_large_one) {
    Pair p;
    constexpr std::uint32_t kLarge = 1 << 20;
    int overtaken = 0;
    for (std::uint64_t n = 0; n < 20; ++n) {
        fill(p.a.memory.data(), n, kLarge);
        CHECK(p.b.receive(1) == 0 && p.b.receive(1) == 0);
        ibv_wr_start(p.a.qp);
        p.a.stage(p.ah, p.peer, 1, kLarge, 1, 0, 0);
        p.a.stage(p.ah, p.peer, 2, 8, 2, kLarge, kLarge);
        CHECK(ibv_wr_complete(p.a.qp) == 0);
        for (int i = 0; i < 2; ++i) {
            const auto wc = p.b.poll();
            CHECK(wc && wc->status == IBV_WC_SUCCESS);
            if (!wc) return;
            if (i == 0 && ntohl(wc->imm_data) == 2) ++overtaken;
            if (ntohl(wc->imm_data) == 1) CHECK(filled(p.b.memory.data(), n, kLarge));
        }
        for (int i = 0; i < 2; ++i) CHECK(p.a.poll().has_value());
    }
    CHECK(overtaken > 0);
}

// Looks at memory that the device is writing.
__attribute__((no_sanitize("thread"))) bool take_back(volatile std::uint8_t& at) {
    if (at == 0) return false;
    at = 0;
    return true;
}

// Whether any of many messages was placed again after we had undone it.
bool placed_twice(std::uint64_t messages) {
    Pair p;
    p.a.memory.data()[0] = std::byte{9};
    auto& at = *reinterpret_cast<volatile std::uint8_t*>(p.b.memory.data());
    bool again = false;
    for (std::uint64_t id = 1; id <= messages && !again; ++id) {
        at = 0;
        CHECK(p.b.receive(id) == 0 && p.write(id, 1, 1) == 0);
        int seen = 0;
        ibv_wc wc{};
        const std::uint64_t deadline = monotonic_ns() + 30'000'000'000u;
        while (ibv_poll_cq(p.b.cq, 1, &wc) == 0 && monotonic_ns() < deadline) {
            seen += take_back(at) ? 1 : 0;
        }
        seen += take_back(at) ? 1 : 0;
        again = seen > 1;
        CHECK(p.a.completes(id, IBV_WC_SUCCESS));
    }
    return again;
}

TEST(bytes_are_placed_twice) {
    {
        const Setting always("MKERNEL_SOFTVERBS_DUPLICATES", "100");
        CHECK(placed_twice(5000));
    }
    const Setting never("MKERNEL_SOFTVERBS_DUPLICATES", "0");
    CHECK(!placed_twice(300));
}

// More messages than the window and the ring hold, through a queue that is polled meanwhile.
TEST(windows_wrap_around) {
    Pair p;
    constexpr std::uint32_t kMessages = 5000;
    std::uint32_t posted = 0, done = 0, arrived = 0;
    std::uint64_t sum = 0;
    for (std::uint32_t i = 0; i < 512; ++i) CHECK(p.b.receive(0) == 0);
    const std::uint64_t deadline = monotonic_ns() + 30'000'000'000u;
    while ((done < kMessages || arrived < kMessages) && monotonic_ns() < deadline) {
        while (posted < kMessages && posted - done < 64) {
            CHECK(p.write(posted, posted % 3 == 0 ? 2000 : 8, posted) == 0);
            ++posted;
        }
        ibv_wc wc{};
        while (ibv_poll_cq(p.a.cq, 1, &wc) > 0) {
            CHECK(wc.status == IBV_WC_SUCCESS);
            ++done;
        }
        while (ibv_poll_cq(p.b.cq, 1, &wc) > 0) {
            CHECK(wc.status == IBV_WC_SUCCESS && p.b.receive(0) == 0);
            sum += ntohl(wc.imm_data);
            ++arrived;
        }
    }
    CHECK(done == kMessages && arrived == kMessages);
    CHECK(sum == std::uint64_t{kMessages} * (kMessages - 1) / 2);
}

// Another queue pair of an end takes the place of its own; the old one is the caller's to destroy.
ibv_qp* replace_queue_pair(End& end) {
    ibv_qp* old = end.base;
    end.base = end.create();
    end.qp = end.efa->qp_to_qp_ex(end.base);
    end.start(7);
    return old;
}

// Numbers have 16 bits: they are used again, though never two at once, and never 0.
TEST(queue_pair_numbers_wrap_around) {
    Pair p;
    const std::uint32_t kept = p.a.base->qp_num;
    std::vector<bool> seen(1 << 16);
    std::size_t different = 0;
    for (int i = 0; i < (1 << 16) + 1000; ++i) {
        ibv_qp* made = p.a.create();
        CHECK(made != nullptr);
        if (made == nullptr) return;
        const std::uint32_t number = made->qp_num;
        CHECK(number != 0 && number < 1u << 16 && number != kept);
        if (number < 1u << 16 && !seen[number]) ++different;
        if (number < 1u << 16) seen[number] = true;
        p.a.v->destroy_qp(made);
    }
    CHECK(different == (1 << 16) - 2);  // all but 0 and the one in use
    CHECK(p.write(1, 8) == 0 && p.a.completes(1, IBV_WC_SUCCESS));
}

// Keys wrap around too; a key that was given back does not work before then.
TEST(keys_wrap_around) {
    Pair p;
    std::uint32_t before = 0;
    for (int i = 0; i < 600; ++i) {
        ibv_mr* mr = p.b.v->reg_mr(p.b.pd, p.b.memory.data(), 4096,
                                   IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
        CHECK(mr != nullptr && mr->rkey != 0 && mr->rkey != before && mr->rkey != p.b.mr->rkey);
        if (mr == nullptr) return;
        Address to = p.peer;
        to.rkey = before = mr->rkey;
        CHECK(p.a.write(p.ah, to, 1, 8) == 0 && p.a.completes(1, IBV_WC_SUCCESS));
        CHECK(p.b.v->dereg_mr(mr) == 0);
        CHECK(p.a.write(p.ah, to, 2, 8) == 0 && p.a.completes(2, IBV_WC_REM_ACCESS_ERR));
    }
}

// Messages of two queue pairs to one peer, each larger than the flow, take turns in it.
TEST(queue_pairs_share_a_flow) {
    Limits private_memory;
    private_memory.shared = false;
    Pair p(private_memory, private_memory);
    constexpr std::uint32_t kMessage = 1 << 20;
    fill(p.a.memory.data(), 5, 2 * kMessage);
    ibv_qp* first = replace_queue_pair(p.a);
    ibv_qp* second = p.a.base;
    for (std::uint64_t turn = 0; turn < 20; ++turn) {
        std::memset(p.b.memory.data(), 0, 2 * kMessage);
        for (ibv_qp* each : {first, second}) {
            p.a.qp = p.a.efa->qp_to_qp_ex(each);
            const std::uint64_t at = each == first ? 0 : kMessage;
            CHECK(p.write(at, kMessage, -1, at, at) == 0);
        }
        for (int i = 0; i < 2; ++i) {
            const auto wc = p.a.poll();
            CHECK(wc && wc->status == IBV_WC_SUCCESS);
        }
        CHECK(filled(p.b.memory.data(), 5, 2 * kMessage));
    }
    p.a.v->destroy_qp(first);
}

// A message whose queue pair breaks, or goes, half-way gives its place in flight back; there are 1024.
TEST(what_is_abandoned_frees_its_place) {
    Limits private_memory;
    private_memory.shared = false;
    Pair p(private_memory, private_memory);
    for (std::uint64_t turn = 0; turn < 1100; ++turn) {
        CHECK(p.write(1, kBytes) == 0);
        if (turn % 2 == 0) {
            CHECK(p.a.to(IBV_QPS_ERR) == 0);
            const auto wc = p.a.poll();
            CHECK(wc && (wc->status == IBV_WC_WR_FLUSH_ERR || wc->status == IBV_WC_SUCCESS));
        }
        p.a.v->destroy_qp(replace_queue_pair(p.a));
    }
    CHECK(p.write(2, 8) == 0 && p.a.completes(2, IBV_WC_SUCCESS));
}

// More ports come and go than there are flows.
TEST(flows_are_given_back) {
    End b;
    const Address peer = b.address();
    for (int i = 0; i < 150; ++i) {
        End a;
        ibv_ah* known = b.handle(a.address());
        CHECK(a.write(a.handle(peer), peer, 1, 8) == 0 && a.completes(1, IBV_WC_SUCCESS));
        b.efa->destroy_ah(known);
        b.handles.pop_back();
    }
}

}  // namespace

int main(int argc, char** argv) {
    return testing::run_on_library(argc, argv);
}
