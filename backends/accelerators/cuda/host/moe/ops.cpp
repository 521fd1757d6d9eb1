#include "backends/accelerators/cuda/host/moe/ops.hpp"

#include <cuda_runtime_api.h>

#include <atomic>
#include <limits>
#include <new>
#include <stdexcept>
#include <string>

#include "backends/accelerators/cuda/device.hpp"
#include "backends/accelerators/cuda/error.hpp"
#include "backends/accelerators/cuda/host/gemm/parts.hpp"

namespace mkernel::cuda::moe {

namespace {

constexpr std::uint64_t kAlignment = 256;

std::uint64_t aligned(std::uint64_t nbytes) {
    return (nbytes + kAlignment - 1) / kAlignment * kAlignment;
}

std::uint64_t places(const Sizes& sizes) {
    return static_cast<std::uint64_t>(tables_of(sizes, 0).places());
}

std::uint64_t ids_offset(const Sizes& sizes, std::uint64_t row_bytes) {
    return aligned(std::uint64_t{1} * sizes.world * sizes.tokens * row_bytes);
}
std::uint64_t scratch_offset(const Sizes& sizes, std::uint64_t row_bytes) {
    return ids_offset(sizes, row_bytes) + aligned(places(sizes) * sizeof(std::int32_t));
}
std::uint64_t rows_offset(const Sizes& sizes, bool by_rank) {
    return by_rank ? aligned(places(sizes) * sizeof(float)) : 0;
}

}  // namespace

std::int64_t table_words(const Sizes& sizes) {
    const std::int64_t words = tables_of(sizes, 0).count();
    if (words > std::numeric_limits<std::int32_t>::max()) {
        throw std::length_error(std::to_string(sizes.tokens) + " tokens of top-" +
                                std::to_string(sizes.top_k) + " on each of " +
                                std::to_string(sizes.world) + " ranks are too many places");
    }
    return words;
}

std::uint64_t dispatch_bytes(const Sizes& sizes, std::uint64_t row_bytes, std::int32_t pieces) {
    table_words(sizes);
    const std::uint64_t scratch = scratch_offset(sizes, row_bytes) + scratch_bytes(sizes.experts);
    if (pieces == 0) return kDataOffset + scratch;
    const CrossingLists lists{nullptr, sizes.world, sizes.tokens, pieces};
    return kDataOffset + aligned(crossing_of(sizes, row_bytes, pieces).offset +
                                 lists.count() * sizeof(std::int32_t));
}

Crossing crossing_of(const Sizes& sizes, std::uint64_t row_bytes, std::int32_t pieces) {
    if (pieces == 0) return {};
    return {aligned(scratch_offset(sizes, row_bytes) + scratch_bytes(sizes.experts)), pieces};
}

std::uint64_t home_bytes(const Sizes& sizes, std::uint64_t row_bytes, bool by_rank) {
    const std::uint64_t rows =
        std::uint64_t{1} * sizes.tokens * (by_rank ? sizes.world : sizes.top_k);
    return kDataOffset + rows_offset(sizes, by_rank) + aligned(rows * row_bytes);
}

FarSlots far_weights(const Sizes& sizes, bool hierarchical) {
    const std::uint64_t nbytes = places(sizes) / sizes.world * sizeof(float);
    return {0, nbytes, 0, nbytes, hierarchical, hierarchical};
}

FarSlots far_sums(const Sizes& sizes, std::uint64_t row_bytes, std::int32_t pieces,
                  bool hierarchical) {
    const CrossingLists lists{nullptr, sizes.world, sizes.tokens, pieces};
    return {rows_offset(sizes, true), sizes.tokens * row_bytes, lists.flag(0, 0),
            lists.piece_rows() * row_bytes, hierarchical};
}

std::uint64_t outbox_offset(const Sizes& sizes, std::uint64_t row_bytes) {
    return home_bytes(sizes, row_bytes, true) - kDataOffset;
}

ReportBlock::ReportBlock() {
    void* memory = nullptr;
    cuda::check(cudaHostAlloc(&memory, sizeof(Report), cudaHostAllocMapped | cudaHostAllocPortable),
                "cudaHostAlloc of the report of dispatches");
    report_ = new (memory) Report{};
}

ReportBlock::~ReportBlock() {
    cudaFreeHost(report_);
}

std::optional<std::int32_t> ReportBlock::rows(std::uint32_t call) const {
    if (std::atomic_ref(report_->call).load(std::memory_order_acquire) != call) return {};
    return report_->rows;
}

std::optional<std::tuple<int, int, int>> ReportBlock::take_refusal() const {
    std::atomic_ref refused(report_->refused);
    if (refused.load(std::memory_order_acquire) == 0) return {};
    const std::tuple found{report_->rank, report_->most, report_->capacity};
    refused.store(0, std::memory_order_release);
    return found;
}

void route(const DeviceWorld& world, const Routing& routing, const ReportBlock& report,
           std::uint64_t stream) {
    const RoutingArgs args{
        .workspace = workspace_of(world),
        .limits = limits_of(world),
        .tables = tables_of(routing.sizes, routing.routing),
        .crossing = crossing_of(routing.sizes, routing.row_bytes, routing.pieces),
        .own_ids = reinterpret_cast<const std::int32_t*>(routing.ids),
        .ids_offset = ids_offset(routing.sizes, routing.row_bytes),
        .counts_offset = scratch_offset(routing.sizes, routing.row_bytes),
        .counts = reinterpret_cast<std::int64_t*>(routing.counts),
        .report = report.report(),
        .capacity = routing.capacity,
        .early = routing.early,
        .early_rows = routing.early_rows,
        .exchanges = routing.exchanges,
    };
    route(args, cuda::stream_at(stream));
}

void push_whole(const DeviceWorld& world, std::uint64_t rows, std::uint64_t nbytes,
                std::uint64_t stream) {
    const Workspace workspace = workspace_of(world);
    for (int step = 1; step < workspace.world; ++step) {
        const int peer = (workspace.rank + workspace.world - step) % workspace.world;
        if (!workspace.near(peer)) continue;
        const auto slots = reinterpret_cast<std::uint64_t>(workspace.data(peer));
        push_part(world, peer, rows, nbytes, slots + workspace.rank * nbytes, workspace.rank,
                  stream);
    }
}

void push_wanted(const DeviceWorld& world, const WantedTokens& tokens, std::uint64_t stream) {
    const PushArgs args{
        .workspace = workspace_of(world),
        .x = reinterpret_cast<const char*>(tokens.x),
        .ids = reinterpret_cast<const std::int32_t*>(tokens.ids),
        .row_bytes = static_cast<std::int64_t>(tokens.row_bytes),
        .tokens = tokens.sizes.tokens,
        .top_k = tokens.sizes.top_k,
        .experts = tokens.sizes.experts,
    };
    push_wanted(args, static_cast<std::uint32_t>(tokens.blocks), cuda::stream_at(stream));
}

namespace {

CrossingArgs args_of(const DeviceWorld& world, const CrossingTokens& tokens) {
    const Sizes& sizes = tokens.sizes;
    return {
        .workspace = workspace_of(world),
        .limits = limits_of(world),
        .crossing = crossing_of(sizes, tokens.row_bytes, tokens.pieces),
        .x = reinterpret_cast<const char*>(tokens.x),
        .ids = reinterpret_cast<const std::int32_t*>(tokens.ids),
        .ids_offset = ids_offset(sizes, tokens.row_bytes),
        .outbox_offset = dispatch_bytes(sizes, tokens.row_bytes, tokens.pieces) - kDataOffset,
        .row_bytes = static_cast<std::int64_t>(tokens.row_bytes),
        .tokens = sizes.tokens,
        .top_k = sizes.top_k,
        .experts = sizes.experts,
        .hierarchical = tokens.hierarchical,
    };
}

}  // namespace

void put_tokens(const DeviceWorld& world, const CrossingTokens& tokens, std::uint64_t stream) {
    put_tokens(args_of(world, tokens), cuda::stream_at(stream));
}

void land_tokens(const DeviceWorld& world, const CrossingTokens& tokens, std::int32_t blocks,
                 std::uint64_t stream) {
    land_tokens(args_of(world, tokens), static_cast<std::uint32_t>(blocks),
                cuda::stream_at(stream));
}

void copy_rows(const DeviceWorld& world, const DispatchedRows& rows, std::uint64_t stream) {
    const DispatchedArgs args{
        .workspace = workspace_of(world),
        .limits = limits_of(world),
        .tables = tables_of(rows.sizes, rows.routing),
        .crossing = crossing_of(rows.sizes, rows.row_bytes, rows.pieces),
        .a = reinterpret_cast<const char*>(rows.a),
        .out = reinterpret_cast<char*>(rows.out),
        .scales = reinterpret_cast<float*>(rows.scales),
        .row_bytes = static_cast<std::int64_t>(rows.row_bytes),
        .width = rows.width,
        .height = rows.height,
        .waits = rows.waits,
    };
    copy_rows(args, static_cast<std::uint32_t>(rows.blocks), cuda::stream_at(stream));
}

void quantise_rows(const QuantisedRows& rows, std::uint64_t stream) {
    const QuantiseArgs args{
        .x = reinterpret_cast<const char*>(rows.x),
        .scales = reinterpret_cast<const float*>(rows.scales),
        .out = reinterpret_cast<char*>(rows.out),
        .rows = rows.rows,
        .width = rows.width,
        .row_bytes = rows.row_bytes,
        .half = rows.half,
    };
    quantise_rows(args, cuda::stream_at(stream));
}

void load() {
    load_far_slots();
    load_crossing();
    load_routing();
    load_dispatched_rows();
    load_home();
}

void bring_home(const DeviceWorld& world, const Home& home, Step step, std::uint64_t stream) {
    const HomeArgs args{
        .workspace = workspace_of(world),
        .limits = limits_of(world),
        .tables = tables_of(home.sizes, home.routing),
        .y = reinterpret_cast<const char*>(home.y),
        .weights = reinterpret_cast<const float*>(home.weights),
        .out = reinterpret_cast<char*>(home.out),
        .weights_offset = 0,
        .rows_offset = rows_offset(home.sizes, home.by_rank),
        .outbox_offset =
            outbox_offset(home.sizes, std::uint64_t{1} * home.width * (home.wide ? 4 : 2)),
        .width = home.width,
        .first = home.first,
        .end = home.end,
        .pieces = home.pieces,
        .groups = home.groups,
        .half = home.half,
        .wide = home.wide,
        .waits = home.waits,
        .hierarchical = home.hierarchical,
    };
    const auto blocks = static_cast<std::uint32_t>(home.blocks);
    const cudaStream_t on = cuda::stream_at(stream);
    switch (step) {
        case Step::send_rows:
            return send_rows(args, blocks, on);
        case Step::sum_slots:
            return sum_slots(args, blocks, on);
        case Step::sum_rows:
            return sum_rows(args, blocks, on);
        case Step::relay_sums:
            return relay_sums(args, blocks, on);
        case Step::sum_ranks:
            return sum_ranks(args, blocks, on);
    }
}

}  // namespace mkernel::cuda::moe
