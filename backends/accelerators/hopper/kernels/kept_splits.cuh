// Splits of tiles on their way from the block that multiplied them to the one that adds them
// (tile/shares.cuh): multipliers ──▶ this GPU's memory, as their registers hold them, and a flag
// ──loader of the other block──▶ stages ──▶ multipliers.
#pragma once

#include <cstdint>

#include "backends/accelerators/hopper/device/call.cuh"
#include "backends/accelerators/hopper/device/workspace.cuh"
#include "backends/accelerators/hopper/ptx/tensor.cuh"
#include "backends/accelerators/hopper/tile/block.cuh"
#include "backends/accelerators/hopper/tile/load.cuh"
#include "backends/accelerators/hopper/tile/shares.cuh"
#include "backends/transport/device_wait.cuh"

namespace mkernel::hopper {

template <class C>
class KeptSplits {
  public:
    __device__ KeptSplits(const Workspace& workspace, const LastWave& wave)
        : workspace_(workspace), wave_(wave) {}

    // Keeps, by the multipliers, the sums of this share, which is not the last one of its tile.
    template <class Multiplier>
    __device__ __forceinline__ void keep(const Multiplier& multiplier, const Share& share) const {
        const int number = number_of(share.kept + share.split);
        multiplier.keep(reinterpret_cast<float4*>(place(number)));
        ptx::meet<kMultipliersBarrier, kMultipliers * kWarpgroup>();
        if (threadIdx.x == kWarpgroup) {
            __threadfence();  // who waits is on this GPU
            flags()[number].set_fenced(epoch());
        }
    }

    // Loads, by the loader, the kept sums of this share's tile; the share is the tile's last one.
    __device__ void load(Shared<C>& shared, Cursor<C::kStages>& cursor, const Share& share,
                         const transport::DeviceWaiter& waiter) const {
        for (int split = 0; split < share.split; ++split) {
            const int number = number_of(share.kept + split);
            waiter.until(flags()[number], epoch(),
                         {transport::kOwnBlocks, static_cast<std::uint32_t>(workspace_.rank),
                          static_cast<std::uint32_t>(number)});
            ptx::fence_async_proxy();
            load_kept(shared, cursor, place(number));
        }
    }

  private:
    static constexpr int kMultipliersBarrier = 1;

    __device__ static int number_of(int kept) {
        const int block = C::kCluster > 1 ? static_cast<int>(ptx::block_in_cluster()) : 0;
        return kept * C::kCluster + block;
    }
    // Returns the epoch, read again so that multipliers need no register for it; also in a world of one rank.
    __device__ std::uint64_t epoch() const { return workspace_.control().state.epoch; }
    __device__ char* place(int number) const {
        constexpr std::uint64_t kBytes = C::kKeptPieces * kKeptPieceBytes;
        return workspace_.data(workspace_.rank) + wave_.kept_at + number * kBytes;
    }
    __device__ transport::SetWord* flags() const { return workspace_.kept_flags(); }

    const Workspace& workspace_;
    const LastWave& wave_;
};

// Ends a call of a kernel that may keep splits, whose flags differ by the call's number in a world of one
// rank too. Called by one thread of every block, as finish_call.
__device__ inline void finish_call(const Workspace& workspace, const LastWave& wave,
                                   const transport::DeviceWaiter& waiter, std::uint64_t epoch) {
    if (workspace.world > 1) {
        finish_call(workspace, waiter, epoch);
    } else if (wave.splits > 1) {
        finish_brief_call(workspace, workspace.control().state.epoch);
    }
}

}  // namespace mkernel::hopper
