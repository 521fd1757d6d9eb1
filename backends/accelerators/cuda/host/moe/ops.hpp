// The MoE ops as the host starts them: each function takes tensors and the world, and queues kernels on a stream.
// Nothing here waits for the device.
//
// The data area of a rank's workspace in a dispatch: tokens of all ranks [W, tokens, hidden], their ids
// [W, tokens, top_k] int32, scratch; between nodes lists (kernels/moe/crossing_lists.hpp), and in the area for NICs an
// outbox behind them. Flag s: tokens of rank s of this node are there; flag W + s: its ids are. The data
// area for results that come home: weights of all ranks [W, tokens, top_k] float32 where sums come by rank,
// then the results [tokens, top_k, width], or [W, tokens, width] by rank. Flag s: weights of rank s are
// there; flag W + s: its results are, of other nodes those of far_sums.
#pragma once

#include <cstdint>
#include <optional>
#include <tuple>

#include "backends/accelerators/cuda/host/device_world.hpp"
#include "backends/accelerators/cuda/kernels/moe/crossing.hpp"
#include "backends/accelerators/cuda/kernels/moe/dispatched_rows.hpp"
#include "backends/accelerators/cuda/kernels/moe/far_slots.hpp"
#include "backends/accelerators/cuda/kernels/moe/home.hpp"
#include "backends/accelerators/cuda/kernels/moe/push_wanted.hpp"
#include "backends/accelerators/cuda/kernels/moe/quantise_rows.hpp"
#include "backends/accelerators/cuda/kernels/moe/routing.hpp"

namespace mkernel::cuda::moe {

// The sizes that tell routings apart. `experts`: of one rank.
struct Sizes {
    std::int32_t world, tokens, top_k, experts;
};

// Returns a handle's tables, whose words are at that address.
inline Tables tables_of(const Sizes& sizes, std::uint64_t routing) {
    return {reinterpret_cast<std::int32_t*>(routing), sizes.world, sizes.tokens, sizes.top_k,
            sizes.experts};
}

// Returns the 32-bit words of a handle. std::length_error where they, or places, cannot be counted in 31
// bits.
std::int64_t table_words(const Sizes& sizes);

// Returns the bytes of a workspace. std::length_error: too many experts.
// `pieces`: that a rank's tokens for another node come in; 0: there is one node.
std::uint64_t dispatch_bytes(const Sizes& sizes, std::uint64_t row_bytes, std::int32_t pieces);
std::uint64_t home_bytes(const Sizes& sizes, std::uint64_t row_bytes, bool by_rank);

// The slots between nodes, which NICs write into, or staging memory of the same layout. After them, where
// sums come by rank, is the outbox: those for each rank, [W, tokens, width], or hierarchically for each peer of the rail.
FarSlots far_weights(const Sizes& sizes, bool hierarchical);
FarSlots far_sums(const Sizes& sizes, std::uint64_t row_bytes, std::int32_t pieces,
                  bool hierarchical);
std::uint64_t outbox_offset(const Sizes& sizes, std::uint64_t row_bytes);

// Loads the kernels that calls between nodes start to the current device, before the first of those calls. A
// kernel that is loaded while another one waits may wait for that in the driver; anything that then calls the
// driver, as an emulated NIC does for every copy, waits with both.
void load();

// Pinned memory in which a dispatch reports its rows to the host (kernels/moe/tables.cuh).
class ReportBlock {
  public:
    ReportBlock();
    ReportBlock(const ReportBlock&) = delete;
    ReportBlock& operator=(const ReportBlock&) = delete;
    ~ReportBlock();

    [[nodiscard]] Report* report() const { return report_; }
    // Returns the rows of this rank in that call, once they are known.
    [[nodiscard]] std::optional<std::int32_t> rows(std::uint32_t call) const;
    // Returns (rank, rows, capacity) of the first call since the last query that had too many rows.
    [[nodiscard]] std::optional<std::tuple<int, int, int>> take_refusal() const;

  private:
    Report* report_ = nullptr;
};

// `routing`: address of the handle's words, 16-byte aligned. The others are those of RoutingArgs; `row_bytes`:
// of a token; `pieces`: as of dispatch_bytes, and 0 where nothing is exchanged.
struct Routing {
    Sizes sizes;
    std::uint64_t routing, ids, counts, row_bytes;
    std::int32_t capacity, early, early_rows, pieces;
    bool exchanges;
};
void route(const DeviceWorld& world, const Routing& routing, const ReportBlock& report,
           std::uint64_t stream);

// Copies `nbytes` from `rows`, the own tokens or weights, to their slot in every peer of this node, the rank before
// this one first, and sets flag `rank` there. Copy engines do it; `stream` must come after the end of the
// previous call. CudaError.
void push_whole(const DeviceWorld& world, std::uint64_t rows, std::uint64_t nbytes,
                std::uint64_t stream);

// The own tokens and ids, as in PushArgs; each token goes once to each rank of the node that has an expert of
// it.
struct WantedTokens {
    Sizes sizes;
    std::uint64_t x, ids, row_bytes;
    std::int32_t blocks;
};
void push_wanted(const DeviceWorld& world, const WantedTokens& tokens, std::uint64_t stream);

// The own tokens and ids on their way to other nodes, and those of other nodes; CrossingArgs describes the fields.
struct CrossingTokens {
    Sizes sizes;
    std::uint64_t x, ids, row_bytes;
    std::int32_t pieces;
    bool hierarchical;
};
void put_tokens(const DeviceWorld& world, const CrossingTokens& tokens, std::uint64_t stream);
void land_tokens(const DeviceWorld& world, const CrossingTokens& tokens, std::int32_t blocks,
                 std::uint64_t stream);

// Returns where lists of tokens are in the data area of a dispatch.
Crossing crossing_of(const Sizes& sizes, std::uint64_t row_bytes, std::int32_t pieces);

// Rows of the experts; DispatchedArgs and Routing describe the fields.
struct DispatchedRows {
    Sizes sizes;
    std::uint64_t routing, a, out, scales, row_bytes;
    std::int32_t width, height, pieces;
    bool waits;
    std::int32_t blocks;
};
void copy_rows(const DeviceWorld& world, const DispatchedRows& rows, std::uint64_t stream);

// Rows of e4m3 experts; QuantiseArgs describes the fields.
struct QuantisedRows {
    std::uint64_t x, scales, out;
    std::int32_t rows, width, row_bytes;
    bool half;
};
void quantise_rows(const QuantisedRows& rows, std::uint64_t stream);

struct Home {
    Sizes sizes;
    std::uint64_t routing, y, weights, out;
    std::int32_t width, first, end, pieces, groups;
    bool half, wide, by_rank, waits, hierarchical;
    std::int32_t blocks;
};
enum class Step : std::uint8_t { send_rows, sum_slots, sum_rows, relay_sums, sum_ranks };
void bring_home(const DeviceWorld& world, const Home& home, Step step, std::uint64_t stream);

}  // namespace mkernel::cuda::moe
