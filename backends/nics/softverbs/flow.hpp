// The SRD half of the "wire": flows from one port to another.
//
// A flow carries every SRD message of one sending port to one receiving port. It lies in the
// receiver's memory; the sender claims it by its word in the receiver's header. Packets lie in the
// order in which they were sent; it is the receiver that takes them out of order. Each message is
// answered by itself, in the order of completion, in the log `acks`: a message keeps its place in
// the window until the sender has read its answer, so the log cannot overflow.
#pragma once

#include <cstdint>

#include "backends/nics/softverbs/wire.hpp"

namespace mkernel::nics::softverbs {

inline constexpr std::uint32_t kFlowWindow = 1024;          // messages not answered yet
inline constexpr std::uint32_t kFlowReference = 64 * 1024;  // of one packet, by reference
inline constexpr std::uint32_t kFlowPayload = 8 * 1024;     // of one packet, through the ring

inline constexpr std::uint8_t kAbandoned = 16;  // the rest of the message does not come

// The facts of a message that its receiver needs, whichever packet came last.
struct FlowMessage {
    std::uint32_t total = 0;  // payload bytes
    std::uint32_t imm = 0;    // network byte order
    std::uint32_t source = 0;
    std::uint32_t destination = 0;
    Opcode opcode = Opcode::pad;
    std::uint8_t rnr_retry = 7;
};

struct alignas(64) FlowPacket {
    std::uint64_t message = 0;  // number on its flow
    std::uint64_t arrival = 0;  // monotonic ns; see link.hpp
    std::uint64_t remote_addr = 0;
    std::uint64_t ref_inode = 0;
    std::uint64_t ref_offset = 0;
    std::uint32_t bytes = 0;   // header and payload, a multiple of kPacketAlign
    std::uint32_t length = 0;  // payload bytes of this packet
    std::uint32_t total = 0;   // payload bytes of the message
    std::uint32_t offset = 0;  // of this packet's payload in the message
    std::uint32_t rkey = 0;
    std::uint32_t imm = 0;  // network byte order
    std::uint32_t source = 0;
    std::uint32_t destination = 0;
    std::uint32_t queue_key = 0;
    std::int32_t ref_fd = -1;
    Opcode opcode = Opcode::pad;
    std::uint8_t flags = 0;
    std::uint8_t rnr_retry = 7;
    std::uint8_t reserved[5] = {};

    [[nodiscard]] FlowMessage whole() const {
        return {total, imm, source, destination, opcode, rnr_retry};
    }
};
static_assert(sizeof(FlowPacket) == 128);

struct Flow {
    struct alignas(64) Sender {
        std::atomic<std::uint64_t> head;  // bytes ever written
        PortAddress from;                 // written before the flow is ready
    } sender;
    struct alignas(64) Receiver {
        std::atomic<std::uint64_t> tail;      // bytes ever taken
        std::atomic<std::uint64_t> answered;  // entries ever written to `acks`
    } receiver;
    // Message << 8 | ibv_wc_status.
    alignas(64) std::atomic<std::uint64_t> acks[kFlowWindow];
    alignas(64) std::byte data[kRingBytes];
};

// The word of a flow in the receiver's header: the sender's pid << 32 | a random tag << 2 | state.
// 0 is a free flow. The sender claims and closes, the receiver alone frees.
enum class FlowState : std::uint64_t { free = 0, claiming = 1, ready = 2, closed = 3 };

inline FlowState flow_state(std::uint64_t word) {
    return static_cast<FlowState>(word & 3);
}
inline std::uint64_t flow_word(std::uint64_t tag, FlowState state) {
    return (tag & ~std::uint64_t{3}) | static_cast<std::uint64_t>(state);
}
inline std::int32_t flow_pid(std::uint64_t word) {
    return static_cast<std::int32_t>(word >> 32);
}

inline constexpr std::size_t kFlowsOffset = kRingsOffset + kMaxQps * kRingStride;
inline constexpr std::size_t kFlowStride = (sizeof(Flow) + 4095) / 4096 * 4096;
inline constexpr std::size_t kPortBytes = kFlowsOffset + kMaxFlows * kFlowStride;

}  // namespace mkernel::nics::softverbs
