#include "backends/accelerators/ascend/host/kernels.hpp"

#include <stdexcept>

namespace mkernel::ascend::host {

namespace {

void refuse(const std::string& what) {
    throw std::invalid_argument(what);
}

}  // namespace

void check_fits(const char* what, std::uint64_t bytes, isa::Buffer buffer) {
    if (bytes <= isa::capacity_of(buffer)) return;
    refuse(std::string("plan.schedule.chunking: ") + what + " takes " + std::to_string(bytes) +
           " bytes of " + isa::name_of(buffer) + ", which has " +
           std::to_string(isa::capacity_of(buffer)) + "; choose smaller tiles");
}

void check_tiling(const Tiling& t, isa::DType dtype) {
    if (t.tile_m == 0 || t.tile_m % 16 != 0) {
        refuse("plan.schedule.chunking.tile_m must be a multiple of 16");
    }
    if (t.tile_n == 0 || t.tile_n % 32 != 0) {
        refuse("plan.schedule.chunking.tile_n must be a multiple of 32");
    }
    if (t.step_k == 0 || t.step_k % 16 != 0) {
        refuse("plan.schedule.chunking.step_k must be a multiple of 16");
    }
    if (t.tile_k == 0 || t.tile_k % t.step_k != 0) {
        refuse("plan.schedule.chunking.tile_k must be a multiple of step_k");
    }
    const std::uint64_t size = isa::bytes_of(dtype);
    const std::uint64_t a = std::uint64_t{t.tile_m} * t.tile_k * size;
    const std::uint64_t b = std::uint64_t{t.tile_k} * t.tile_n * size;
    check_fits("double-buffered A and B (2 * tile_k * (tile_m + tile_n))", 2 * (a + b),
               isa::Buffer::L1);
    check_fits("double-buffered A (2 * tile_m * step_k)", 2 * size * t.tile_m * t.step_k,
               isa::Buffer::L0A);
    check_fits("double-buffered B (2 * step_k * tile_n)", 2 * size * t.step_k * t.tile_n,
               isa::Buffer::L0B);
    check_fits("the output tile (tile_m * tile_n float32)", std::uint64_t{4} * t.tile_m * t.tile_n,
               isa::Buffer::L0C);
}

void check_world(std::uint32_t world) {
    if (world == 0 || world > kMaxWorld) {
        refuse("a world of " + std::to_string(world) + " ranks; at least 1 and at most " +
               std::to_string(kMaxWorld));
    }
}

}  // namespace mkernel::ascend::host
