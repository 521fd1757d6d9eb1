// The kernels of each op as a launch runs them.
#pragma once

#include <memory>
#include <vector>

#include "backends/accelerators/ascend/host/kernels.hpp"
#include "backends/accelerators/ascend/kernels/ag_gemm/args.hpp"
#include "backends/accelerators/ascend/kernels/gemm_reduce/args.hpp"
#include "backends/accelerators/ascend/kernels/moe/args.hpp"
#include "backends/accelerators/ascend/kernels/moe_combine/args.hpp"
#include "backends/accelerators/ascend/kernels/ring_attention/args.hpp"

namespace mkernel::ascend::host {

// Refuse (std::invalid_argument) geometries that the on-chip buffers cannot hold or the kernels cannot run.
void check(const ag_gemm::Geometry& geometry);
void check(const gemm_reduce::Geometry& geometry);
void check(const moe::Geometry& geometry);
void check(const moe_combine::Geometry& geometry);
void check(const ring_attention::Geometry& geometry);

// Return the kernels of one call. `args`: a geometry that passes `check`, and tensors. `order`: the ranks,
// the own one first, in the order in which the kernels send to them (gemm_reduce, moe_combine) or consume
// from them (the others).
using Order = std::vector<std::uint32_t>;
std::shared_ptr<Kernels> kernels_of(const ag_gemm::Args& args, Order order);
std::shared_ptr<Kernels> kernels_of(const gemm_reduce::Args& args, Order order);
std::shared_ptr<Kernels> kernels_of(const moe::Args& args, Order order);
std::shared_ptr<Kernels> kernels_of(const moe_combine::Args& args, Order order);
std::shared_ptr<Kernels> kernels_of(const ring_attention::Args& args, Order order);

}  // namespace mkernel::ascend::host
