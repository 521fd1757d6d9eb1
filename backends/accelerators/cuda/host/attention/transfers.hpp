// Transfers of ring attention: keys and values between the ranks of a node, and their gradients back to their
// owners.
//
// The data area of a rank's workspace has a slot for each peer, in the order in which it consumes them: that
// of rank r - 1 first, then r - 2, and so on, modulo the world; between nodes those of its node come first
// (kernels/attention/crossing.hpp, which also moves them there). A slot holds K, then V, each laid out as at
// its owner, but between nodes head by head. Flag s of the workspace, which rank s sets, signals that both have
// arrived.
//
// After these a backward call has as many slots for what the peers contribute to the gradients of the own K
// and V: that of rank r + 1 first, then r + 2, in the order in which they are added. A slot holds dK, then
// dV, of as many positions as the peer sees, some heads at a time, each lot packed. Flag kGradientFlags + l *
// kMaxRanks + s signals that lot l of both has arrived from rank s.
//
// Where keys and values travel in pieces, their planner lays out areas and flags (attention/pieces.py).
#pragma once

#include <cstdint>

#include "backends/accelerators/cuda/host/device_world.hpp"

namespace mkernel::cuda::attention {

// K, or V, of one rank: `bytes` in all. Its first positions, which are half of them, lie in `count` stretches
// of `width` bytes, `pitch` from each other.
struct Keys {
    std::uint64_t bytes;
    std::uint64_t width, pitch, count;
};

// Returns where K of `source` lies at `rank`, of ranks that are `local` to a node, in bytes into the data area. V is `keys.bytes` further on.
std::uint64_t slot_offset(const Keys& keys, int world, int local, int rank, int source);

// Returns where the contribution of `from` to dK of `rank` lies there, in bytes into the data area. dV is
// `keys.bytes` further on.
std::uint64_t gradient_offset(const Keys& keys, int world, int rank, int from);

// Returns the bytes of a workspace for `world` ranks. `gradients`: for a backward call.
std::uint64_t workspace_bytes(const Keys& keys, int world, bool gradients);

// Flag s signals that keys and values of rank s have arrived, flag kGradientFlags + s that its first
// gradients have.
inline constexpr std::uint32_t kGradientFlags = kMaxRanks;

// Returns the bytes of the area between nodes: NICs write into the data area too, or it is copied from
// staging memory that is laid out alike. After the slots there is one from which the own K and V are put.
std::uint64_t area_bytes(const Keys& keys, int world);

// Copies the own K and V into the slot of every peer of the only node, the rank after this one first, and the
// epoch into the flag that follows each chunk of both; a chunk has `chunk` bytes of a stretch. `zigzag`:
// causal, so that later ranks see the first half of the positions alone, and get no more. On the copy
// engines; `stream` must come after the end of the previous call. CudaError; std::invalid_argument.
void push_keys(const DeviceWorld& world, std::uint64_t k, std::uint64_t v, const Keys& keys,
               bool zigzag, std::uint64_t chunk, std::uint64_t stream);

// Some positions of the own K, or V: `count` stretches of `width` bytes, `pitch` from each other, the first
// one `at` bytes into it.
struct Piece {
    std::uint64_t at, width, pitch, count;
};

// Copies a piece of the own K and V to that place in the data area of `peer`, packed, V after K, and then the
// epoch into that flag there. Otherwise as push_keys.
void push_piece(const DeviceWorld& world, int peer, std::uint64_t k, std::uint64_t v,
                const Piece& piece, std::uint64_t place, std::uint32_t flag, std::uint64_t stream);

// Copies the epoch into that flag of `peer`, which thereby knows that everything queued earlier on `stream`
// is done.
void tell(const DeviceWorld& world, int peer, std::uint32_t flag, std::uint64_t stream);

// Copies `bytes` of dK, and of dV, to `place` of this rank's slot at `owner`, and then the epoch into their
// flag. Otherwise as push_keys.
void push_gradients(const DeviceWorld& world, int owner, std::uint64_t of_k, std::uint64_t of_v,
                    std::uint64_t bytes, const Keys& keys, std::uint64_t place, std::uint32_t flag,
                    std::uint64_t stream);

}  // namespace mkernel::cuda::attention
