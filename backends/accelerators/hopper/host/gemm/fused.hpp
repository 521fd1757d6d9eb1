// The GEMM ops as the host starts them: tensors and the world in, kernels and copies on streams out.
// Addresses are of device memory; nothing here waits for the device.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <vector>

#include "backends/accelerators/cuda/device/landing.cuh"
#include "backends/accelerators/cuda/host/device_world.hpp"
#include "backends/accelerators/cuda/kernels/rendezvous.hpp"
#include "backends/accelerators/hopper/built_on.hpp"
#include "backends/accelerators/hopper/host/tensor_map.hpp"
#include "backends/accelerators/hopper/kernels/gemm/all_gather_gemm.cuh"
#include "backends/accelerators/hopper/tile/operand_scales.cuh"

namespace mkernel::hopper {

// A call's tensors. Pitches are elements from one row of `a`, and of `b` as it is stored, to the next;
// 0: rows are packed, as those of `out` are.
struct GemmTensors {
    std::uint64_t a = 0, b = 0, out = 0;
    std::uint64_t bias = 0;  // [n]; 0: none
    std::int64_t a_pitch = 0, b_pitch = 0;
    std::uint64_t a_scale = 0, b_scale = 0;  // of e4m3 operands, float32; else 0
};

// The kind of operands: 16-bit; or e4m3 with scales [rows] and [n], or with one each.
enum class Scaling : std::uint8_t { none, by_rows, single };

// C [.., n] = A [.., k] @ B (+ bias), with A and C row-major. B: [k, n], or [n, k] (`n_major` false).
// The planner chooses tiling, band and blocks.
struct Product {
    GemmTensors tensors;
    int n, k;
    bool half;     // float16, else bfloat16; of e4m3 operands the results
    bool n_major;  // b is [k, n]
    Tiling tiling;
    int band;    // cluster rows that share B in L2
    int blocks;  // 0: one an SM
    Scaling scaling = Scaling::none;
};

// Returns the bytes of an element of A and B.
inline int operand_bytes(Scaling scaling) {
    return scaling == Scaling::none ? static_cast<int>(kElementBytes) : 1;
}

// Returns the type of the elements of A and B.
ElementType operands_of(const Product& product);

// Returns the scales as kernels take them; `gathered_at` of the data area holds the rows' scales of all
// ranks.
OperandScales scales_of(const Product& product, std::uint64_t gathered_at = 0);

// Returns B's maps for bulk copies: boxes of 128 rows of N (for medium tiles 96) and 64 of K, or, N-major, of
// 64 rows of K (32) and 64 of N.
Boxes boxes_of_b(const Product& product);

// The schedule of one rank's rows of A. They travel in `chunks` of `chunk_rows`, the last one perhaps
// shorter: by the first `push_blocks` blocks of the kernel (whole clusters), or by push_rows where that is 0,
// and there to the last peer in `slices` of K, which tiles begin with one by one. Slices are for one
// chunk, and not for blocks.
// `hierarchical`: between nodes, once to each other node (device/rails.cuh). `segments`: one rank's equal
// parts of K, whose products lie behind one another in `out`; each is the root of a tree of so many `levels`
// over equal parts of it, whole steps each (kernels/gemm/all_gather_gemm.cuh).
struct AllGatherSchedule {
    int rows;
    int chunk_rows;
    int push_blocks = 0;
    int slices = 1;
    bool hierarchical = false;
    int segments = 1;
    int levels = 0;

    [[nodiscard]] int count() const { return (rows + chunk_rows - 1) / chunk_rows; }
    [[nodiscard]] int flags() const { return count() * slices; }  // of one rank
};

// Returns the bytes of a workspace's data area that a call needs, and checks its flags. std::length_error
// where flags run out.
std::size_t all_gather_gemm_bytes(int world, const AllGatherSchedule& schedule, int k,
                                  Scaling scaling = Scaling::none);
// `gathers`: AllReduce into an out that is not symmetric. `local` of the `world` ranks are on one node.
std::size_t gemm_reduce_bytes(int world, int local, int rows, int n, Tiling tiling, bool by_outbox,
                              bool gathers);
// Returns the bytes of the area for other nodes: in the data area, after those, or in staging memory.
std::size_t gemm_reduce_area_bytes(int world, int local, int rows, int n, Tiling tiling,
                                   bool gathers, bool hierarchical);

// The scales of the own rows, of so many bytes; none: no bytes.
struct RowScales {
    std::uint64_t address = 0, bytes = 0;
};
RowScales row_scales(const Product& product, int rows);

// Copies the own rows, and ahead of them their scales, into every peer's workspace, the rank before this one
// first, and then the epoch into their flags: whole shards, except the last peer's chunk by chunk or slice by
// slice, since only the end of the last shard is ever waited for. Copy engines do it; `stream` must come
// after the end of the previous call. There may be at most kEpochCopies flags.
void push_rows(const DeviceWorld& world, std::uint64_t rows, std::uint64_t row_bytes,
               const AllGatherSchedule& schedule, std::uint64_t stream,
               const RowScales& scales = {});

// Does the same by blocks of a kernel (`schedule.push_blocks`, not 0), to ranks of other nodes too. A later
// call of all_gather_gemm on the stream, without blocks that push, ends the call.
void send_rows(const DeviceWorld& world, const Product& product, const AllGatherSchedule& schedule,
               std::uint64_t stream);

// Queues the product; with e4m3 operands all ranks must be on one node. `wait` false: take the other ranks'
// rows as they lie in the workspace. With several ranks, rows of `a` are packed: they travel as they lie.
// std::invalid_argument.
void all_gather_gemm(const DeviceWorld& world, const Product& product,
                     const AllGatherSchedule& schedule, bool wait, std::uint64_t stream);

// The schedule of sums: which rank sums what, and how parts travel (kernels/gemm/gemm_reduce.cuh). `rows`: of
// each owner, the last one's perhaps beyond `m`; a multiple of the height of a cluster (256, 128 for
// Tiling::narrow) where `everywhere`. `everywhere`: AllReduce, `out` is [m, n]; else ReduceScatter, [rows,
// n]. `alone`: exchange nothing. `network_blocks`: blocks of the kernel, whole clusters, that tend the
// network, where there are other nodes. `hierarchical`: between nodes, sums over a node go to each other node
// (device/rails.cuh). `given`: the rank's product [m, n] is there already, rounded; 0: it is not.
struct ReduceSchedule {
    int m;
    int rows;
    int panel_rows;     // of clusters, of a panel of an owner's tiles; >= 1
    int panel_columns;  // of tiles; >= 1
    int pace;           // clock cycles from one piece that is put to the next
    bool by_outbox;
    bool everywhere;
    std::vector<std::uint64_t> outs;  // every rank's `out` by rank, where AllReduce's is symmetric
    bool alone;
    int network_blocks = 0;
    bool hierarchical = false;
    std::uint64_t given = 0;
    Landings landings{};  // of AllReduce where there are no `outs`, within a node
};
void gemm_reduce(const DeviceWorld& world, const Product& product, const ReduceSchedule& schedule,
                 std::uint64_t stream);

}  // namespace mkernel::hopper
