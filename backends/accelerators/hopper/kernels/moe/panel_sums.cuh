// Results on their way home by rank, panel of columns by panel, beside the products of the next panel.
#pragma once

#include "backends/accelerators/hopper/device/call.cuh"
#include "backends/accelerators/hopper/kernels/moe/parts.cuh"
#include "backends/accelerators/hopper/kernels/moe/weighted_sum.cuh"
#include "backends/accelerators/hopper/tile/tile_forwarder.cuh"

namespace mkernel::hopper::moe {

// One warp, which claims groups of tokens as long as there is a panel that all blocks have stored. It
// waits for panels only while its own block has products to make: what is left then, as of the last
// panel, are the next kernel's sums. So no block waits for one that has not begun.
template <class C, class Element>
class PanelSummer {
  public:
    __device__ PanelSummer(Shared<C>& shared, const GroupedArgs& args,
                           const transport::DeviceWaiter& waiter, std::uint64_t epoch)
        : shared_(shared), args_(args), waiter_(waiter), epoch_(epoch) {}

    __device__ void run() const {
        const RankSum<Element> sum(args_.workspace, args_.tables, args_.out, args_.weights, 0,
                                   args_.rows_offset, args_.n, args_.waits);
        const int lane = static_cast<int>(threadIdx.x) % 32;
        const int tokens = args_.tables.world * args_.tables.tokens;
        const int each = args_.panels.each();
        const int last = args_.panels.count() - 1;
        for (int panel = 0; panel < last; ++panel) {
            PanelCount& count = args_.panel_counts[panel];
            const bool come = lane == 0 && (panel > 0 || wait_for_weights()) && wait(count);
            if (!__any_sync(0xFFFFFFFFu, come)) break;
            __syncwarp();  // what lane 0 has acquired is the others' too
            while (true) {
                int token = lane == 0 ? claim(count) : 0;
                token = __shfl_sync(0xFFFFFFFFu, token, 0);
                if (token >= tokens) break;
                const int end = min(token + kTokenGroup, tokens);
                for (; token < end; ++token) {
                    for (int column = lane * 8; column < each; column += 256) {
                        sum.send(token, panel * each + column);
                    }
                }
            }
        }
        transport::fence_system();
    }

  private:
    __device__ static int claim(PanelCount& count) {
        static_assert(sizeof(unsigned long long) == sizeof(count.claimed));
        auto* const claimed = reinterpret_cast<unsigned long long*>(&count.claimed);
        return static_cast<int>(atomicAdd(claimed, 1ull)) * kTokenGroup;
    }

    // Whether all blocks have stored the panel, at last when this one has stored all of its parts.
    __device__ bool wait(const PanelCount& count) const {
        while (count.stored.peek() < gridDim.x) {
            if (has_stored(shared_, 1)) break;
            __nanosleep(200);
        }
        return count.stored.reached(gridDim.x);
    }

    // Of all ranks.
    __device__ bool wait_for_weights() const {
        const Workspace& workspace = args_.workspace;
        for (int step = 1; args_.waits && step < workspace.world; ++step) {
            const auto source =
                static_cast<std::uint32_t>((workspace.rank + step) % workspace.world);
            if (!waiter_.until(workspace.flags(workspace.rank)[source], epoch_,
                               {source, source, transport::kNoChunk})) {
                return false;
            }
        }
        return true;
    }

    Shared<C>& shared_;
    const GroupedArgs& args_;
    const transport::DeviceWaiter& waiter_;
    std::uint64_t epoch_;
};

}  // namespace mkernel::hopper::moe
