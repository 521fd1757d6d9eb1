// How a device is brought up and how it fails, on the null device, which reports what the test says:
// the choice of a GID, what is negotiated, the ladder of registration, every status and event.
#include <dlfcn.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <initializer_list>

#include "check.hpp"
#include "null_verbs.hpp"
#include "pair.hpp"

using namespace mkernel;
using namespace mkernel::nics;
using testing::library;
using testing::NullDevice;

namespace {

// The device, as it is when nothing was set.
NullDevice& device() {
    static void* handle = ::dlopen(library.c_str(), RTLD_NOW);
    static auto* get =
        reinterpret_cast<decltype(&null_verbs_device)>(::dlsym(handle, "null_verbs_device"));
    static const NullDevice fresh = *get();
    *get() = fresh;
    return *get();
}

std::unique_ptr<Nic> open(const verbs::Options& options = {}, std::uint8_t port = 1) {
    return std::make_unique<cx7::RcNic>(verbs::Verbs::load(library),
                                        std::vector<verbs::PortName>{{"null0", port}}, options);
}

verbs::Options with_gid(int index) {
    verbs::Options options;
    options.gid_index = index;
    return options;
}

std::string refusal(const std::function<void()>& call) {
    try {
        call();
    } catch (const SetupError& error) {
        return error.what();
    }
    return "";
}

bool says(const std::string& text, std::initializer_list<const char*> all) {
    for (const char* each : all) {
        if (text.find(each) == std::string::npos) {
            std::printf("'%s' is not in: %s\n", each, text.c_str());
            return false;
        }
    }
    return true;
}

ibv_gid_entry gid(const std::string& digits, std::uint32_t type) {
    ibv_gid_entry entry{};
    entry.gid = *verbs::parse_gid(digits);
    entry.gid_type = type;
    return entry;
}

const std::string kLinkLocal = "fe80000000000000abcdef0000000001";
const std::string kIpv4 = "00000000000000000000ffff0a000001";
const std::string kOtherIpv4 = "00000000000000000000ffff0a000002";
const std::string kIpv6 = "20010db8000000000000000000000001";
const std::string kNone(32, '0');

// ---- GIDs -----------------------------------------------------------------------------------------

Endpoint endpoint(const verbs::Options& options = {}, std::uint8_t port = 1) {
    const auto nic = open(options, port);
    return nic->add_peer(0, testing::kOneLane).front();
}

TEST(roce_v2_with_an_ipv4_address_is_chosen) {
    NullDevice& null = device();
    null.ports[0].attributes.link_layer = IBV_LINK_LAYER_ETHERNET;
    auto& gids = null.ports[0].gids;
    gids = {gid(kLinkLocal, IBV_GID_TYPE_ROCE_V1), gid(kLinkLocal, IBV_GID_TYPE_ROCE_V2),
            gid(kOtherIpv4, IBV_GID_TYPE_ROCE_V1), gid(kNone, IBV_GID_TYPE_ROCE_V2),
            gid(kIpv6, IBV_GID_TYPE_ROCE_V2),      gid(kIpv4, IBV_GID_TYPE_ROCE_V2)};
    CHECK(endpoint().gid == kIpv4);
    gids.pop_back();
    CHECK(endpoint().gid == kIpv6);
    gids.pop_back();
    CHECK(endpoint().gid == kLinkLocal);  // v2, before the IPv4 address of v1
    CHECK(endpoint(with_gid(2)).gid == kOtherIpv4);
    CHECK(says(refusal([] { open(with_gid(3)); }), {"gid_index 3", "leave gid_index unset"}));
    CHECK(says(refusal([] { open(with_gid(9)); }), {"gid_index 9", "4 entries"}));
    null.extended_gids = false;  // an old library: types are not known, families are
    CHECK(endpoint().gid == kOtherIpv4);
    gids.clear();
    CHECK(says(refusal([] { open(); }), {"no GID", "address"}));
}

TEST(a_ports_own_gids_are_used) {
    NullDevice& null = device();
    for (auto& port : null.ports) port.attributes.link_layer = IBV_LINK_LAYER_ETHERNET;
    null.ports[0].gids = {gid(kIpv4, IBV_GID_TYPE_ROCE_V2)};
    null.ports[1].gids = {gid(kOtherIpv4, IBV_GID_TYPE_ROCE_V2)};
    CHECK(endpoint().gid == kIpv4);
    CHECK(endpoint({}, 2).gid == kOtherIpv4);
    null.ports[1].attributes.state = IBV_PORT_DOWN;
    CHECK(says(refusal([] { open({}, 2); }), {"null0 port 2", "not active", "link"}));
}

TEST(infiniband_takes_its_first_gid_and_the_lid) {
    NullDevice& null = device();
    null.ports[0].gids = {gid(kLinkLocal, IBV_GID_TYPE_IB), gid(kIpv6, IBV_GID_TYPE_IB)};
    const Endpoint mine = endpoint();
    CHECK(mine.gid == kLinkLocal);
    CHECK(mine.lid == 1 && !mine.ethernet);
    Endpoint other = mine;
    other.ethernet = true;
    const auto nic = open();
    nic->add_peer(0, testing::kOneLane);
    CHECK(says(refusal([&] { nic->connect(0, {other}); }), {"Ethernet", "InfiniBand"}));
}

// ---- what is negotiated ---------------------------------------------------------------------------

TEST(the_smaller_mtu_and_the_settings_reach_the_queue_pair) {
    NullDevice& null = device();
    null.ports[0].attributes.active_mtu = IBV_MTU_2048;
    null.ports[0].attributes.link_layer = IBV_LINK_LAYER_ETHERNET;
    null.ports[0].gids = {gid(kLinkLocal, IBV_GID_TYPE_ROCE_V2), gid(kIpv4, IBV_GID_TYPE_ROCE_V2)};
    const auto connected = [](const verbs::Options& options, std::uint32_t remote_mtu) {
        const auto nic = open(options);
        Endpoint other = nic->add_peer(0, testing::kOneLane).front();
        other.mtu = remote_mtu;
        nic->connect(0, {other});
    };
    connected({}, 4096);
    CHECK(null.to_rtr.path_mtu == IBV_MTU_2048);
    connected({}, 1024);
    CHECK(null.to_rtr.path_mtu == IBV_MTU_1024);
    CHECK(null.to_rtr.ah_attr.is_global == 1);
    CHECK(null.to_rtr.ah_attr.grh.sgid_index == 1);
    CHECK(null.to_rts.timeout == 14 && null.to_rts.retry_cnt == 6 && null.to_rts.rnr_retry == 6);
    verbs::Options other;
    other.qp_timeout = 20;
    other.retry_count = 7;
    other.rnr_retry = 3;
    other.traffic_class = 106;
    other.service_level = 3;
    connected(other, 4096);
    CHECK(null.to_rts.timeout == 20 && null.to_rts.retry_cnt == 7 && null.to_rts.rnr_retry == 3);
    CHECK(null.to_rtr.ah_attr.grh.traffic_class == 106 && null.to_rtr.ah_attr.sl == 3);
}

// ---- the ladder -----------------------------------------------------------------------------------

constexpr std::uint64_t kAddress = 0x7f0000201000;  // nobody touches it

TEST(device_memory_goes_by_dmabuf_then_peermem_then_is_refused) {
    NullDevice& null = device();
    LocalMemory memory{kAddress, 8192, true, 77, 0x1000};
    {
        const auto nic = open({.peermem = true});
        CHECK(nic->capabilities().dmabuf);
        const RemoteKey key = nic->register_memory(0, memory);
        CHECK(key.address == kAddress && key.bytes == 8192);
        const auto& seen = null.registration;
        CHECK(seen.dmabuf && seen.fd == 77 && seen.offset == 0x1000 && seen.length == 8192);
        CHECK(seen.address == kAddress);  // the I/O address is the memory's own
        CHECK((seen.access & IBV_ACCESS_RELAXED_ORDERING) == 0);
        CHECK(nic->registrations().dmabuf == 1 && nic->registrations().peermem == 0);
        memory.dmabuf = -1;  // its accelerator exports none
        nic->register_memory(1, memory);
        CHECK(!null.registration.dmabuf && null.registration.address == kAddress);
        CHECK(nic->registrations().peermem == 1);
        nic->deregister_memory(0);
        CHECK(nic->registrations().dmabuf == 0);
        memory.dmabuf = 77;
        memory.dmabuf_offset = 0x1234;
        CHECK(says(refusal([&] { nic->register_memory(2, memory); }), {"4660", "modulo a page"}));
        memory.dmabuf_offset = 0x1000;
    }
    for (const int no : {EOPNOTSUPP, EPROTONOSUPPORT}) {
        null.dmabuf_errno = no;
        const auto with = open({.peermem = true});
        CHECK(!with->capabilities().dmabuf);
        with->register_memory(0, memory);
        CHECK(with->registrations().peermem == 1);
        const auto without = open();
        const std::string why = refusal([&] { without->register_memory(5, memory); });
        CHECK(says(why, {"region 5", "dmabuf", "nvidia_peermem", "modprobe"}));
        without->register_memory(6, {kAddress, 4096});  // host memory does not care
        CHECK(without->registrations().host == 1);
    }
}

// ---- failures -------------------------------------------------------------------------------------

struct Sink final : SignalSink {
    bool raise(std::uint32_t, std::uint32_t, std::uint64_t) override { return true; }
};

std::unique_ptr<Nic> connected() {
    auto nic = open();
    nic->connect(0, nic->add_peer(0, testing::kOneLane));
    nic->bind(0, 0, nic->register_memory(0, {kAddress, 4096}));
    return nic;
}

TEST(every_error_of_a_completion_is_told_whole) {
    NullDevice& null = device();
    for (int code = IBV_WC_LOC_LEN_ERR; code <= IBV_WC_TM_RNDV_INCOMPLETE; ++code) {
        null.status = IBV_WC_SUCCESS;
        const auto nic = connected();
        null.status = static_cast<ibv_wc_status>(code);
        null.vendor_err = 129;
        transport::PutCommand c;
        c.bytes = 100;
        PutCursor cursor;
        CHECK(nic->put(c, cursor) == PutResult::done);
        nic->ring();
        Sink sink;
        for (int i = 0; i < 4 && !nic->failed(); ++i) nic->poll(sink);
        const auto failure = nic->failure();
        CHECK(failure && failure->status == verbs::status_name(null.status));
        CHECK(failure && failure->status != "UNKNOWN_STATUS");
        CHECK(failure && failure->qp == 1 && failure->vendor_err == 129 && failure->peer == 0);
        CHECK(failure && verbs::wr_number(failure->wr_id, 1) == 1);
        CHECK(failure && says(failure->message, {"null0", failure->status.c_str(), "rank 0"}));
        PutCursor next;
        CHECK(nic->put(c, next) == PutResult::failed);
    }
}

// A flush tells nothing while its cause may still come.
TEST(a_flush_is_told_when_no_cause_came_behind_it) {
    NullDevice& null = device();
    for (const bool cause : {false, true}) {
        null.status = IBV_WC_SUCCESS;
        const auto nic = connected();
        transport::PutCommand c;
        c.bytes = 100;
        Sink sink;
        const auto send = [&](ibv_wc_status status) {
            null.status = status;
            PutCursor cursor;
            CHECK(nic->put(c, cursor) == PutResult::done);
            nic->ring();
        };
        send(IBV_WC_WR_FLUSH_ERR);
        nic->poll(sink);
        CHECK(!nic->failed());
        if (cause) send(IBV_WC_RETRY_EXC_ERR);
        nic->poll(sink);
        CHECK(nic->failed());
        CHECK(nic->failure()->status == (cause ? "RETRY_EXC_ERR" : "WR_FLUSH_ERR"));
    }
}

// Of as many devices as there may be; before the signal that promises it.
TEST(what_arrives_is_flushed_by_every_device_of_the_regions) {
    constexpr std::uint32_t kDevices = 8;
    device().status = IBV_WC_SUCCESS;
    int flushed[kDevices] = {};
    transport::DeviceFlush flushes[kDevices];
    const auto nic = connected();
    for (std::uint32_t i = 0; i < kDevices; ++i) {
        flushes[i].flush = [](void* self) { return ++*static_cast<int*>(self), 0; };
        flushes[i].self = &flushed[i];
        LocalMemory memory{kAddress, 4096};
        memory.flush = &flushes[i];
        nic->register_memory(1 + i, memory);
    }
    LocalMemory memory{kAddress, 4096};
    transport::DeviceFlush one_more = flushes[0];
    memory.flush = &one_more;
    CHECK(says(refusal([&] { nic->register_memory(1 + kDevices, memory); }), {"more than 8"}));

    struct After final : SignalSink {
        explicit After(const int* all) : all(all) {}
        bool raise(std::uint32_t, std::uint32_t, std::uint64_t) override {
            ++raised;
            for (std::uint32_t i = 0; i < kDevices; ++i) CHECK(all[i] == 1);
            return true;
        }
        const int* all;
        int raised = 0;
    } sink{flushed};
    transport::PutCommand c;
    c.bytes = 100;
    c.signal = 3;
    c.value = 1;
    PutCursor cursor;
    CHECK(nic->put(c, cursor) == PutResult::done);
    nic->ring();
    int polled = 0;
    for (int i = 0; i < 8 && sink.raised == 0; ++i) polled += nic->poll(sink);
    CHECK(sink.raised == 1 && polled == 2);  // the send and what it brought
    nic->poll(sink);                         // nothing arrived
    for (const int times : flushed) CHECK(times == 1);
}

TEST(events_that_break_the_device_are_failures) {
    struct Case {
        ibv_event_type type;
        bool fatal;
        bool of_queue_pair;
    };
    for (const auto& [type, fatal, of_queue_pair] : {
             Case{IBV_EVENT_QP_FATAL, true, true},
             {IBV_EVENT_QP_REQ_ERR, true, true},
             {IBV_EVENT_QP_ACCESS_ERR, true, true},
             {IBV_EVENT_CQ_ERR, true, false},
             {IBV_EVENT_DEVICE_FATAL, true, false},
             {IBV_EVENT_PORT_ERR, true, false},
             {IBV_EVENT_WQ_FATAL, true, false},
             {IBV_EVENT_COMM_EST, false, true},
             {IBV_EVENT_PORT_ACTIVE, false, false},
             {IBV_EVENT_GID_CHANGE, false, false},
             {IBV_EVENT_LID_CHANGE, false, false},
         }) {
        NullDevice& null = device();
        const auto nic = connected();
        ibv_async_event event{};
        event.event_type = type;
        if (of_queue_pair) {
            event.element.qp = null.qp;
        } else {
            event.element.port_num = 1;
        }
        null.events = {event};
        nic->settle();
        CHECK(nic->failed() == fatal);
        if (!fatal) continue;
        CHECK(nic->failure()->status == verbs::event_name(type));
        CHECK(nic->failure()->peer == (of_queue_pair ? 0 : -1));
        CHECK(nic->failure()->qp == (of_queue_pair ? 1u : 0u));
        CHECK(says(nic->failure()->message, {"null0", "asynchronous event"}));
    }
    // The other port of the device is not ours.
    NullDevice& null = device();
    const auto nic = connected();
    ibv_async_event event{};
    event.event_type = IBV_EVENT_PORT_ERR;
    event.element.port_num = 2;
    null.events = {event};
    nic->settle();
    CHECK(!nic->failed());
}

}  // namespace

int main(int argc, char** argv) {
    return testing::run_on_library(argc, argv);
}
