// The layout of a port's shared memory, the "wire" of the software RDMA device.
//
// A port is one memfd of its process: a header, then kMaxQps inbound rings, one for each queue pair
// that the process may own. A ring has one producer, the engine of the connected peer, and one
// consumer, the owner's engine. There are no locks between processes: each word has one writer (the
// doorbell apart), so a process killed at any instant leaves nothing half-held.
//
// Acknowledgements need no packets: the consumer counts executed messages in `acked`, which is
// cumulative as an RC acknowledgement is, and the producer reads it. A negative one goes in `nak`.
#pragma once

#include <infiniband/verbs.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace mkernel::nics::softverbs {

inline constexpr std::uint32_t kMaxQps = 512;
inline constexpr std::uint32_t kMaxFlows = 64;  // SRD: ports that may send to one port
inline constexpr std::uint32_t kRingBytes = 256 * 1024;
inline constexpr std::uint32_t kMaxPayload = 32 * 1024;      // of one packet, through the ring
inline constexpr std::uint32_t kMaxReference = 1024 * 1024;  // of one packet, by reference
inline constexpr std::uint32_t kReferenceFrom = 1024;        // smaller payloads travel in the ring
inline constexpr std::uint32_t kDeviceReference =
    256 * 1024;  // of one packet, out of device memory
inline constexpr std::uint32_t kPacketAlign = 64;
inline constexpr std::uint64_t kPortMagic =
    0x6d6b5f7265646d34;  // "mk_rdma1" in spirit: the layout's version

enum class Opcode : std::uint8_t { pad = 0, write = 1, write_imm = 2 };

constexpr std::uint32_t align_packet(std::uint32_t bytes) {
    return (bytes + kPacketAlign - 1) / kPacketAlign * kPacketAlign;
}

inline constexpr std::uint8_t kFirst = 1;      // first packet of its message
inline constexpr std::uint8_t kLast = 2;       // last packet of its message
inline constexpr std::uint8_t kReference = 4;  // payload lies at (file, offset) of the sender
inline constexpr std::uint8_t kDevice = 8;     // with it: in device memory, at (token, offset)

struct Packet {
    std::uint64_t arrival = 0;      // monotonic ns; see link.hpp
    std::uint64_t remote_addr = 0;  // of this packet's payload
    std::uint64_t ref_inode = 0;
    std::uint64_t ref_offset = 0;
    std::uint32_t bytes = 0;   // header and payload, a multiple of kPacketAlign
    std::uint32_t length = 0;  // payload bytes of this packet
    std::uint32_t total = 0;   // payload bytes of the message
    std::uint32_t rkey = 0;
    std::uint32_t imm = 0;  // network byte order
    std::int32_t ref_fd = -1;
    Opcode opcode = Opcode::pad;
    std::uint8_t flags = 0;
    std::uint8_t reserved[6] = {};
};
static_assert(sizeof(Packet) == 64);

enum class RingState : std::uint32_t { unused = 0, waiting = 1, responsive = 2, broken = 3 };

struct Ring {
    struct alignas(64) Producer {
        std::atomic<std::uint64_t> head;    // bytes ever written
        std::atomic<std::uint64_t> owner;   // who may write: token of the connected QP; 0: nobody
        std::atomic<std::uint32_t> closed;  // the producer gave up: execute nothing more
    } producer;
    struct alignas(64) Consumer {
        std::atomic<std::uint64_t> tail;   // bytes ever consumed
        std::atomic<std::uint64_t> acked;  // messages ever executed
        std::atomic<std::uint64_t> nak;    // message number << 8 | ibv_wc_status; 0: none
        std::atomic<std::uint64_t>
            rnr;  // message number << 8 | times refused for want of a receive
        std::atomic<RingState> state;
        std::atomic<std::uint32_t> qp_num;
        std::atomic<std::uint32_t>
            psn;  // with which its peer's packets begin, once it is responsive
    } consumer;
    alignas(64) std::byte data[kRingBytes];
};
static_assert(std::atomic<std::uint64_t>::is_always_lock_free);

struct PortHeader {
    std::uint64_t magic;
    std::uint64_t cookie;
    std::int32_t pid;
    std::uint32_t reserved;
    // 1 while the owner's engine sleeps and nobody has woken it: the futex word.
    alignas(64) std::atomic<std::uint32_t> sleeping;
    // Goes up whenever the owner deregisters memory that peers may have mapped.
    alignas(64) std::atomic<std::uint64_t> dropped_maps;
    std::atomic<std::uint32_t> gone;    // 1 once the port is closed
    std::atomic<std::uint32_t> silent;  // 1 while a fault keeps the owner from answering
    std::atomic<std::uint32_t>
        offered;  // goes up with each datagram to the owner; device_memory.hpp
    std::atomic<std::uint32_t> claimed;  // SRD: goes up with each claim of a flow
    // SRD: the sender of each flow; see flow.hpp.
    alignas(64) std::atomic<std::uint64_t> flows[kMaxFlows];
};

inline constexpr std::size_t kRingsOffset = 4096;
inline constexpr std::size_t kRingStride = (sizeof(Ring) + 4095) / 4096 * 4096;

// QP numbers: 9 bits of ring index, 15 bits of generation, never 0.
inline std::uint32_t ring_of(std::uint32_t qp_num) {
    return qp_num % kMaxQps;
}

// GID: fd, pid (4 bytes), file descriptor (3), cookie (8). An IPv6 unique-local address, so it
// reads as a RoCE v2 GID.
struct PortAddress {
    std::int32_t pid = 0;
    std::int32_t fd = -1;
    std::uint64_t cookie = 0;
};

inline ::ibv_gid encode_gid(const PortAddress& address) {
    ::ibv_gid gid{};
    const auto pid = static_cast<std::uint32_t>(address.pid);
    const auto fd = static_cast<std::uint32_t>(address.fd);
    gid.raw[0] = 0xfd;
    for (int i = 0; i < 4; ++i) gid.raw[1 + i] = static_cast<std::uint8_t>(pid >> (24 - 8 * i));
    for (int i = 0; i < 3; ++i) gid.raw[5 + i] = static_cast<std::uint8_t>(fd >> (16 - 8 * i));
    std::memcpy(gid.raw + 8, &address.cookie, 8);
    return gid;
}

inline bool decode_gid(const ::ibv_gid& gid, PortAddress& address) {
    if (gid.raw[0] != 0xfd) return false;
    std::uint32_t pid = 0;
    std::uint32_t fd = 0;
    for (int i = 0; i < 4; ++i) pid = (pid << 8) | gid.raw[1 + i];
    for (int i = 0; i < 3; ++i) fd = (fd << 8) | gid.raw[5 + i];
    address.pid = static_cast<std::int32_t>(pid);
    address.fd = static_cast<std::int32_t>(fd);
    std::memcpy(&address.cookie, gid.raw + 8, 8);
    return address.pid > 0;
}

// Returns contiguous room in a ring at `head`, of which the consumer has taken all before `tail`; null while
// it is full. Moves `head` past a pad where too little is left at the ring's end.
template <typename Header>
std::byte* reserve(std::byte* data, std::uint64_t& head, std::uint64_t tail, std::uint32_t bytes) {
    const std::uint64_t free = kRingBytes - (head - tail);
    const auto at = static_cast<std::uint32_t>(head % kRingBytes);
    const std::uint32_t to_end = kRingBytes - at;
    if (bytes <= to_end) return bytes <= free ? data + at : nullptr;
    if (to_end + bytes > free) return nullptr;
    Header pad;
    pad.bytes = to_end;
    std::memcpy(data + at, &pad, sizeof(pad));
    head += to_end;
    return data;
}

// Returns the payload bytes that follow a header in its ring.
template <typename Header>
std::uint32_t in_ring(const Header& p) {
    return (p.flags & kReference) != 0 ? 0 : p.length;
}
// Returns true where the bytes at `tail` can be a packet.
template <typename Header>
bool readable(const Header& p, std::uint64_t tail) {
    return p.bytes >= sizeof(p) && p.bytes % sizeof(p) == 0 &&
           p.bytes <= kRingBytes - tail % kRingBytes && p.bytes - sizeof(p) >= in_ring(p);
}

inline std::uint64_t now_ns() {
    timespec now{};
    clock_gettime(CLOCK_MONOTONIC, &now);
    return static_cast<std::uint64_t>(now.tv_sec) * 1'000'000'000u +
           static_cast<std::uint64_t>(now.tv_nsec);
}

// Wakes the engine that owns `header`. Everything that the caller wrote before is visible to it, provided the
// write was followed by a sequentially consistent operation (see Engine::sleep).
inline void ring_doorbell(PortHeader& header) {
    if (header.sleeping.load(std::memory_order_seq_cst) == 0) return;
    if (header.sleeping.exchange(0, std::memory_order_seq_cst) == 0) return;
    syscall(SYS_futex, &header.sleeping, FUTEX_WAKE, 1, nullptr, nullptr, 0);
}

}  // namespace mkernel::nics::softverbs
