// The kernel of grouped.cuh; one object file a variant includes it.
#pragma once

#include <type_traits>

#include "backends/accelerators/cuda/small_launch.cuh"
#include "backends/accelerators/hopper/built_on.hpp"
#include "backends/accelerators/hopper/kernels/launch.cuh"
#include "backends/accelerators/hopper/kernels/moe/gather_rows.cuh"
#include "backends/accelerators/hopper/kernels/moe/parts.cuh"
#include "backends/accelerators/hopper/kernels/moe/permute_rows.cuh"
#include "backends/accelerators/hopper/kernels/moe/store_rows.cuh"
#include "backends/accelerators/hopper/tile/multiply.cuh"

namespace mkernel::hopper::moe {

static_assert(Deep::kCluster * kTileM == kTileRows && Wide::kCluster * kTileM == kTileRows);

struct SiluAndMul {
    __device__ float operator()(float gate, float up) const {
        return __fdividef(gate, 1.0f + __expf(-gate)) * up;
    }
};

template <class C, class Element, bool kNMajorB, bool kGathers, bool kGated, bool kWide,
          class In = Element, bool kQuantised = false>
__global__ void __launch_bounds__(kBlockThreads, 1)
    grouped(const __grid_constant__ GroupedArgs args) {
    static_assert(!kWide || (!kGathers && !kGated && !kQuantised));
    static_assert(!kGathers || C::kGathers);
    constexpr bool kScaled = C::kStageScales > 0;
    constexpr int kWidth = kGated ? C::kTileN / 2 : C::kTileN;
    constexpr int kOutBytes = kQuantised ? 1 : kElementBytes;
    Shared<C>& shared = shared_memory<C>();
    open_block(shared, 1 + (kGathers ? kRowWarps : 0) + (kScaled ? kWarp : 0));
    const auto waiter = waiter_of(args.workspace, args.limits, transport::Waiter::compute_kernel);
    const std::uint64_t epoch = args.workspace.world > 1 ? args.workspace.control().state.epoch : 0;
    const int warp = warp_here();
    if (warp < kWarpgroup / 32) {
        ptx::fewer_registers<88>();
        if (warp == 0) {
            const bool leads = ptx::elect_one();
            if (kScaled || leads) {
                Cursor<C::kStages> cursor;
                int known = -1;  // tiles up to it are there
                for_each_part(args, kWidth, [&](const Part& part) {
                    if (!kGathers && args.permuted != nullptr && part.number > known) {
                        if (leads) wait_for_tile(args, waiter, epoch, part.number, part.tile);
                        if constexpr (kScaled) __syncwarp();
                        known = part.number;
                    }
                    load_part<C, In, kNMajorB, !kGathers, kGated>(shared, cursor, args, part,
                                                                  leads);
                });
            }
        } else if (warp == 1) {
            if constexpr (!kWide) {
                RowStorer<C, kOutBytes> storer(shared, args);
                for_each_part(args, kWidth, [&](const Part& part) {
                    storer.part(part, kWidth * kOutBytes / (kSliceN * kElementBytes));
                });
                if (args.height > 0) zero_rest<kOutBytes>(args);
                storer.finish();
            }
        } else if constexpr (kGathers) {
            RowGatherer<C, In> gatherer(shared, args, static_cast<int>(threadIdx.x) - 64);
            for_each_part(args, kWidth, [&](const Part& part) {
                gatherer.tile(waiter, epoch, part.first, part.rows);
            });
            gatherer.finish();
        } else if (args.permuted != nullptr) {
            RowPermuter(args, waiter, epoch).run();
        }
    } else {
        ptx::more_registers<208>();
        Multiplier<C, Element, kNMajorB, In> multiplier(shared);
        const int steps = (args.k + kStepK<In> - 1) / kStepK<In>;
        for_each_part(args, kWidth, [&](const Part& part) {
            if (multiplier.first_row() >= part.rows) {
                multiplier.skip(steps);
            } else if constexpr (kScaled) {
                multiplier.multiply_blocks(steps);
            } else {
                multiplier.multiply(steps);
            }
            if constexpr (kQuantised) {
                if constexpr (kGated) multiplier.fold(SiluAndMul{});
                const int blocks = args.n / kScaledBlock;
                const int first = part.column / kScaledBlock;
                multiplier.template write_quantised<kWidth / kScaledBlock>(
                    [&](int row, int number, float scale) {
                        if (row >= part.rows || first + number >= blocks) return;
                        args.out_scales[std::int64_t{part.first + row} * blocks + first + number] =
                            scale;
                    });
            } else if constexpr (kWide) {
                multiplier.write_floats(part.rows, args.n - part.column, [&](int row) {
                    char* const to = result_of(args, part.first + row, sizeof(float));
                    return reinterpret_cast<float*>(to) + part.column;
                });
            } else if constexpr (kGated) {
                multiplier.fold(SiluAndMul{});
                multiplier.template write<C::kSlices / 2>();
            } else {
                multiplier.write();
            }
        });
        if constexpr (kWide) transport::fence_system();
    }
    close_block<C>();
    if (threadIdx.x != 0 || !args.ends) return;
    if (!args.home) {
        if (blockIdx.x == 0) wait_for_all_tokens(args, waiter, epoch);
        finish_call(args.workspace, waiter, epoch);
        return;
    }
    const Workspace& workspace = args.workspace;
    tell_peers(workspace, epoch, static_cast<std::uint32_t>(workspace.world + workspace.rank));
}

template <class Element>
cudaError_t launch_grouped(const GroupedArgs& args, GroupedVariant variant, int blocks,
                           cudaStream_t stream) {
    const auto start = [&]<class C, bool kGathers, bool kGated, bool kWide>() {
        return launch_blocks<C>(variant.n_major_b
                                    ? grouped<C, Element, true, kGathers, kGated, kWide>
                                    : grouped<C, Element, false, kGathers, kGated, kWide>,
                                args, 1 << 20, blocks, stream);
    };
    const auto with = [&]<class C, bool kGathers>() {
        return variant.gated ? start.template operator()<C, kGathers, true, false>()
                             : start.template operator()<C, kGathers, false, false>();
    };
    if (variant.gathers) return with.template operator()<Deep, true>();
    if (variant.wide) return start.template operator()<Deep, false, false, true>();
    if (variant.deep) return with.template operator()<Deep, false>();
    return with.template operator()<Wide, false>();
}

// Rows that are gathered need more stages, others more slices.
template <bool kGathers>
using ScaledTiling = Scaled<std::conditional_t<kGathers, Deep, Wide>>;

template <class Element>
cudaError_t launch_grouped_e4m3(const GroupedArgs& args, GroupedVariant variant, int blocks,
                                cudaStream_t stream) {
    const auto start = [&]<bool kGathers, bool kGated, bool kWide, bool kQuantised>() {
        using C = ScaledTiling<kGathers>;
        return launch_blocks<C>(
            grouped<C, Element, false, kGathers, kGated, kWide, __nv_fp8_e4m3, kQuantised>, args,
            1 << 20, blocks, stream);
    };
    const auto with = [&]<bool kGathers, bool kQuantised>() {
        return variant.gated ? start.template operator()<kGathers, true, false, kQuantised>()
                             : start.template operator()<kGathers, false, false, kQuantised>();
    };
    if constexpr (std::is_same_v<Element, __nv_bfloat16>) {
        if (variant.wide) return start.template operator()<false, false, true, false>();
        if (variant.quantised) {
            return variant.gathers ? with.template operator()<true, true>()
                                   : with.template operator()<false, true>();
        }
    }
    return variant.gathers ? with.template operator()<true, false>()
                           : with.template operator()<false, false>();
}

template <class C, class Element, bool kGathers, bool kGated, bool kWide>
void load_layouts() {
    cuda::load_kernel(grouped<C, Element, true, kGathers, kGated, kWide>);
    cuda::load_kernel(grouped<C, Element, false, kGathers, kGated, kWide>);
}

template <class Element>
void load_grouped() {
    load_layouts<Deep, Element, true, true, false>();
    load_layouts<Deep, Element, true, false, false>();
    load_layouts<Deep, Element, false, true, false>();
    load_layouts<Deep, Element, false, false, false>();
    load_layouts<Deep, Element, false, false, true>();
    load_layouts<Wide, Element, false, true, false>();
    load_layouts<Wide, Element, false, false, false>();
}

}  // namespace mkernel::hopper::moe
