// The GEMM ops of few rows that reduce, as the host starts them (kernels/gemm/few_rows.cuh, mailed_tiles.cuh).
#pragma once

#include <cstdint>

#include "backends/accelerators/cuda/host/device_world.hpp"
#include "backends/accelerators/hopper/built_on.hpp"
#include "backends/accelerators/hopper/host/gemm/fused.hpp"
#include "backends/accelerators/hopper/host/gemm/pipelined.hpp"
#include "backends/accelerators/hopper/kernels/gemm/few_rows.cuh"

namespace mkernel::hopper {

// The cut of K, and the type that travels. `unrounded`: sums of a rank travel in float32, else rounded to the
// result's type. `m`: rows of the product; for ReduceScatter a multiple of the number of ranks. `tiled`: the kernel of
// mailed_tiles.cuh, with the product's tiling and K uncut.
struct FewRowsSchedule {
    int m;
    int splits;
    bool unrounded;
    FewRowsExchange exchange = FewRowsExchange::all_reduce;
    bool tiled = false;
};

// Throws std::length_error where what the ranks send each other is more than a call may have.
void check_few_rows(int world, int n, const FewRowsSchedule& schedule);

// Queues a call; in a world of one rank, the product alone. std::invalid_argument.
void few_rows(const DeviceWorld& world, const Product& product, const FewRowsSchedule& schedule,
              const Prefetch& prefetch, std::uint64_t stream);

// A plan's calls in one world.
class FewRowsCalls {
  public:
    FewRowsCalls(int device, DeviceWorld world, Product product, FewRowsSchedule schedule);

    void start(const CallOnce& call, const Prefetch& prefetch = {});

  private:
    int device_;
    DeviceWorld world_;
    Product product_;
    FewRowsSchedule schedule_;
};

}  // namespace mkernel::hopper
