// How keys and values of ring attention travel between the ranks of a node, and their gradients home.
//
// The data area of a rank's workspace has a slot for each peer, in the order in which it consumes them: of
// rank r - 1 first, then r - 2, and so on, modulo the world. A slot holds K, then V, each laid out as at
// its owner. Flag s of the workspace, which rank s sets, says that both have come.
//
// Behind these a backward call has as many slots for what the peers give to the gradients of the own K and V:
// of rank r + 1 first, then r + 2, the order in which they are added. A slot holds dK, then dV, of as many
// positions as the peer sees, some heads at a time, each lot packed. Flag kGradientFlags + l * kMaxRanks + s says
// that lot l of both has come from rank s.
//
// Where keys and values travel in pieces, areas and flags are laid out by who plans them
// (attention_pieces.py).
#pragma once

#include <cstdint>

#include "backends/accelerators/hopper/host/device_world.hpp"

namespace mkernel::hopper::attention {

// K, or V, of one rank: `bytes` in all. Its first positions, which are half of them, lie in `count` stretches
// of `width` bytes, `pitch` from each other.
struct Keys {
    std::uint64_t bytes;
    std::uint64_t width, pitch, count;
};

// Where K of `source` lies at `rank`: bytes into the data area. V is `keys.bytes` further on.
std::uint64_t slot_offset(const Keys& keys, int world, int rank, int source);

// Where what `from` gives to dK of `rank` lies there: bytes into the data area. dV is `keys.bytes` further on.
std::uint64_t gradient_offset(const Keys& keys, int world, int rank, int from);

// Bytes of a workspace for `world` ranks. `gradients`: of a backward call.
std::uint64_t workspace_bytes(const Keys& keys, int world, bool gradients);

// Flag s says that keys and values of rank s have come, this one and s that its first gradients have.
inline constexpr std::uint32_t kGradientFlags = kMaxRanks;

// Between nodes the data area is also what NICs write into, or is copied from staging memory that is laid
// out alike. Behind the slots there is one from which the own K and V are put. Bytes of such an area.
std::uint64_t area_bytes(const Keys& keys, int world);

// Copies the own K and V into that slot, and puts them whole to every rank of another node: the rank after
// this one first. `stream` must come after the end of the previous call. CudaError.
void put_keys(const DeviceWorld& world, std::uint64_t k, std::uint64_t v, const Keys& keys,
              std::uint64_t stream);

// Sets flag `source` when K and V of that rank of another node have come and, where they were staged, are
// copied into their slot. What follows on `stream` comes after that. CudaError.
void land_keys(const DeviceWorld& world, int source, const Keys& keys, std::uint64_t stream);

// Copies the own K and V into the slot of every peer of this node, and the epoch into the flag behind each chunk of
// both, which has `chunk` bytes of a stretch: the rank after this one first. `zigzag`: causal, so that later ranks see
// the first half of the positions alone, and get no more. On the copy engines; `stream` must come after the end of the
// previous call. CudaError; std::invalid_argument.
void push_keys(const DeviceWorld& world, std::uint64_t k, std::uint64_t v, const Keys& keys,
               bool zigzag, std::uint64_t chunk, std::uint64_t stream);

// Some positions of the own K, or V: `count` stretches of `width` bytes, `pitch` from each other, the first
// one `at` bytes into it.
struct Piece {
    std::uint64_t at, width, pitch, count;
};

// Copies a piece of the own K and V to that place in the data area of `peer`, packed, V behind K, and the
// epoch into that flag there, behind them. As above.
void push_piece(const DeviceWorld& world, int peer, std::uint64_t k, std::uint64_t v,
                const Piece& piece, std::uint64_t place, std::uint32_t flag, std::uint64_t stream);

// Copies the epoch into that flag of `peer`, which thereby knows that what comes before on `stream` is done.
void tell(const DeviceWorld& world, int peer, std::uint32_t flag, std::uint64_t stream);

// Copies `bytes` of dK, and of dV, to `place` of this rank's slot at `owner`, and the epoch into the flag behind
// them. As above.
void push_gradients(const DeviceWorld& world, int owner, std::uint64_t of_k, std::uint64_t of_v,
                    std::uint64_t bytes, const Keys& keys, std::uint64_t place, std::uint32_t flag,
                    std::uint64_t stream);

}  // namespace mkernel::hopper::attention
