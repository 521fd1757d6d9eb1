// Kernels are not bound to the simulator: here each is instantiated, through its own launch macro,
// for a second core type that shares nothing with it and only counts what it is told. Kernels must
// ask it for exactly the work that their geometry says.
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "backends/accelerators/ascend/isa/pipe.hpp"
#include "backends/accelerators/ascend/isa/tile.hpp"
#include "backends/transport/put_command.hpp"
#include "tests/native/ascend/check.hpp"

namespace mkernel::ascend::test {

// The instructions that kernels use, and nothing else.
class CountingCore {
  public:
    CountingCore(std::uint32_t index, std::uint32_t count) : index_(index), count_(count) {}

    [[nodiscard]] std::uint32_t index() const { return index_; }
    [[nodiscard]] std::uint32_t count() const { return count_; }
    void annotate(std::uint32_t) {}

    void tload(const isa::Tile&, const isa::GlobalView&) { ++done["TLOAD"]; }
    void tstore(const isa::GlobalView& to, const isa::Tile&) {
        ++done["TSTORE"];
        stored += std::uint64_t{to.rows} * to.cols;
    }
    void textract(const isa::Tile&, const isa::Tile&, std::uint32_t, std::uint32_t) {
        ++done["TEXTRACT"];
    }
    void tmatmul(const isa::Tile& c, const isa::Tile& a, const isa::Tile&) { multiply(c, a); }
    void tmatmul_acc(const isa::Tile& c, const isa::Tile& a, const isa::Tile&) { multiply(c, a); }
    void tput(std::uint32_t, const isa::GlobalView& to, const isa::GlobalView&, const isa::Tile&,
              const isa::Tile&) {
        put += std::uint64_t{to.rows} * to.cols;
    }
    void tget(std::uint32_t, const isa::GlobalView& to, const isa::GlobalView&, const isa::Tile&,
              const isa::Tile&) {
        got += std::uint64_t{to.rows} * to.cols;
    }
    void tadd(const isa::Tile&, const isa::Tile&, const isa::Tile&) { ++done["TADD"]; }
    void tcvt(const isa::Tile&, const isa::Tile&) { ++done["TCVT"]; }
    void tsub(const isa::Tile&, const isa::Tile&, const isa::Tile&) {}
    void tmul(const isa::Tile&, const isa::Tile&, const isa::Tile&) {}
    void tmax(const isa::Tile&, const isa::Tile&, const isa::Tile&) {}
    void tmuls(const isa::Tile&, const isa::Tile&, float) {}
    void texp(const isa::Tile&, const isa::Tile&) {}
    void tlog(const isa::Tile&, const isa::Tile&) {}
    void tfill(const isa::Tile&, float) {}
    void ttril(const isa::Tile&, const isa::Tile&, std::int32_t, float) { ++done["TTRIL"]; }
    void trowmax(const isa::Tile&, const isa::Tile& a) {
        scores += std::uint64_t{a.valid_rows} * a.valid_cols;
    }
    void trowsum(const isa::Tile&, const isa::Tile&) {}
    void trowexpandsub(const isa::Tile&, const isa::Tile&, const isa::Tile&) {}
    void trowexpanddiv(const isa::Tile& c, const isa::Tile&, const isa::Tile&) {
        divided += std::uint64_t{c.valid_rows} * c.valid_cols;
    }
    void trowexpandmul(const isa::Tile& c, const isa::Tile&, const isa::Tile&) {
        ++done["TROWEXPANDMUL"];
        weighed += std::uint64_t{c.valid_rows} * c.valid_cols;
    }
    [[nodiscard]] std::int32_t sload(const std::byte* from) {
        std::int32_t value = 0;
        std::memcpy(&value, from, sizeof value);
        return value;
    }
    void sstore(std::byte* to, std::int32_t value) { std::memcpy(to, &value, sizeof value); }

    void set_flag(isa::Pipe, isa::Pipe, std::uint32_t) { ++flags; }
    void wait_flag(isa::Pipe, isa::Pipe, std::uint32_t) { --flags; }
    void fence(isa::Pipe = isa::Pipe::ALL) {}

    void tnotify(std::uint32_t, std::byte*, std::uint32_t, std::uint64_t) { ++done["TNOTIFY"]; }
    [[nodiscard]] bool twait(std::uint32_t, std::int64_t, std::uint32_t) {
        ++done["TWAIT"];
        return waits_end;
    }
    [[nodiscard]] bool nic_put(const transport::PutCommand& command) {
        ++done["NIC_PUT"];
        put_far += command.bytes;
        return true;
    }

    std::map<std::string, std::uint64_t> done;
    std::uint64_t macs = 0, stored = 0, put = 0, got = 0;  // elements
    std::uint64_t weighed = 0, scores = 0, divided = 0;
    std::uint64_t put_far = 0;  // bytes
    std::int64_t flags = 0;     // set and not waited for
    bool waits_end = true;

  private:
    void multiply(const isa::Tile& c, const isa::Tile& a) {
        macs += std::uint64_t{c.valid_rows} * c.valid_cols * a.valid_cols;
    }

    std::uint32_t index_, count_;
};

using Run = bool (*)(CountingCore&, const void* args);

struct Entry {
    std::string cores;
    Run run;
};

inline std::map<std::string, Entry>& entries() {
    static std::map<std::string, Entry> all;
    return all;
}

}  // namespace mkernel::ascend::test

// What a port defines before it includes the kernels; here an entry of a table.
#define MKERNEL_ASCEND_KERNEL(CORES, OP, NAME, KERNEL, ARGS)                                 \
    inline const bool g_##OP##_##NAME =                                                      \
        ::mkernel::ascend::test::entries()                                                   \
            .emplace(#OP "_" #NAME,                                                          \
                     ::mkernel::ascend::test::Entry{                                         \
                         #CORES,                                                             \
                         [](::mkernel::ascend::test::CountingCore& core, const void* args) { \
                             return KERNEL<::mkernel::ascend::test::CountingCore>(           \
                                        core, *static_cast<const ARGS*>(args))               \
                                 .run();                                                     \
                         }})                                                                 \
            .second;

#include "backends/accelerators/ascend/kernels/ag_gemm/comm.hpp"
#include "backends/accelerators/ascend/kernels/ag_gemm/compute.hpp"
#include "backends/accelerators/ascend/kernels/gemm_reduce/comm.hpp"
#include "backends/accelerators/ascend/kernels/gemm_reduce/compute.hpp"
#include "backends/accelerators/ascend/kernels/moe/comm.hpp"
#include "backends/accelerators/ascend/kernels/moe/cube.hpp"
#include "backends/accelerators/ascend/kernels/moe/vector.hpp"
#include "backends/accelerators/ascend/kernels/moe_combine/comm.hpp"
#include "backends/accelerators/ascend/kernels/moe_combine/vector.hpp"
#include "backends/accelerators/ascend/kernels/ring_attention/comm.hpp"
#include "backends/accelerators/ascend/kernels/ring_attention/cube.hpp"
#include "backends/accelerators/ascend/kernels/ring_attention/vector.hpp"

using namespace mkernel::ascend;
using test::CountingCore;

namespace {

constexpr std::uint32_t kWorld = 4;  // ranks 0 and 1 here, 2 and 3 on another node
constexpr std::uint32_t kM = 384, kN = 160, kK = 96;

// Memory that nobody touches; addresses only have to differ.
std::byte g_memory[16];

// A call of rank 0 and what its pointers point to.
template <class Args>
struct Call {
    Args args;
    std::vector<Peer> peers{{&g_memory[0], &g_memory[1]}, {&g_memory[2], &g_memory[3]}, {}, {}};
    std::vector<std::uint32_t> order{0, 1, 2, 3}, chunks;

    Call() {
        args.pad = &g_memory[0];
        args.inbox = &g_memory[1];
        args.outbox = args.scratch = &g_memory[5];
        args.peers = peers.data();
        args.order = order.data();
    }
    Call(const Call&) = delete;
};

isa::GlobalView matrix(std::uint32_t rows, std::uint32_t cols) {
    return {&g_memory[4], isa::DType::float16, rows, cols, cols, 1};
}

// Runs every block of a kernel; what all of them did together.
template <class Args>
CountingCore total(const std::string& name, const Args& args, std::uint32_t blocks) {
    CountingCore sum(0, 1);
    for (std::uint32_t i = 0; i < blocks; ++i) {
        CountingCore core(i, blocks);
        CHECK(test::entries().at(name).run(core, &args));
        CHECK(core.flags == 0);
        for (const auto& [instruction, times] : core.done) sum.done[instruction] += times;
        sum.macs += core.macs;
        sum.stored += core.stored;
        sum.put += core.put;
        sum.got += core.got;
        sum.weighed += core.weighed;
        sum.scores += core.scores;
        sum.divided += core.divided;
        sum.put_far += core.put_far;
    }
    return sum;
}

void all_gather_gemm_does_its_work() {
    Call<ag_gemm::Args> call;
    ag_gemm::Args& args = call.args;
    args.geometry = {.world = kWorld,
                     .m_local = kM / kWorld,
                     .n = kN,
                     .k = kK,
                     .tile_m = 32,
                     .tile_n = 64,
                     .tile_k = 64,
                     .step_k = 32,
                     .tiles_per_chunk = 2};
    args.a = matrix(kM / kWorld, kK);
    args.b = matrix(kK, kN);
    args.out = matrix(kM, kN);
    for (std::uint32_t i = 0; i < args.geometry.chunks(); ++i) call.chunks.push_back(i);
    args.send_order = call.chunks.data();

    const CountingCore compute = total("ag_gemm_compute", args, 3);
    CHECK(compute.macs == std::uint64_t{kM} * kN * kK);
    CHECK(compute.stored == std::uint64_t{kM} * kN);
    const CountingCore comm = total("ag_gemm_comm", args, 3);
    // Once to the neighbour and once into the own slot, from which both ranks far away get it.
    CHECK(comm.put == 2 * std::uint64_t{kM / kWorld} * kK);
    CHECK(comm.put_far == 2 * std::uint64_t{kM / kWorld} * kK * 2);
    CHECK(comm.done.at("NIC_PUT") == 2 * args.geometry.chunks());

    CountingCore aborted(0, 1);
    aborted.waits_end = false;
    CHECK(!test::entries().at("ag_gemm_compute").run(aborted, &args));
}

void gemm_reduce_does_its_work(bool replicated) {
    Call<gemm_reduce::Args> call;
    gemm_reduce::Args& args = call.args;
    args.geometry = {.world = kWorld,
                     .m = kM,
                     .n = kN,
                     .k = kK,
                     .tile_m = 32,
                     .tile_n = 64,
                     .tile_k = 64,
                     .step_k = 32,
                     .tiles_per_chunk = 2,
                     .replicated = replicated,
                     .out_dtype = isa::DType::float16};
    args.a = matrix(kM, kK);
    args.b = matrix(kK, kN);
    args.out = matrix(args.geometry.grid_rows(), kN);

    const CountingCore compute = total("gemm_reduce_compute", args, 3);
    CHECK(compute.macs == std::uint64_t{kM} * kN * kK);
    CHECK(compute.stored == std::uint64_t{kM} * kN);
    const CountingCore comm = total("gemm_reduce_comm", args, 3);
    const std::uint64_t part = std::uint64_t{kM / kWorld} * kN;
    // Partial results travel in four bytes, finished ones in two.
    CHECK(comm.put_far == 2 * part * 4 + (replicated ? 2 * part * 2 : 0));
    CHECK(comm.put == part);
    CHECK(comm.got == (replicated ? (kWorld - 1) * part : 0));
    // Results for ranks of the node, and for others.
    CHECK(comm.stored == (replicated ? 3 : 1) * part);
    CHECK(comm.done.at("TADD") > 0 && comm.done.at("TCVT") > 0);
}

isa::GlobalView table(std::vector<std::int32_t>& words, std::uint32_t rows) {
    const auto width = static_cast<std::uint32_t>(words.size() / rows);
    return {reinterpret_cast<std::byte*>(words.data()), isa::DType::int32, rows, width, width, 1};
}

// Dispatch of a known routing, then the combine on the tables that it left.
void moe_does_its_work() {
    constexpr std::uint32_t kTokens = 50, kTopK = 2, kExperts = 3, kHidden = 96, kFeatures = 160;
    const moe::Routing routing{
        .world = kWorld, .tokens = kTokens, .top_k = kTopK, .experts = kExperts};
    Call<moe::Args> call;
    moe::Args& args = call.args;
    args.geometry = {.routing = routing,
                     .world = kWorld,
                     .hidden = kHidden,
                     .features = kFeatures,
                     .rows_per_chunk = 8,
                     .far = true,
                     .tile_m = 32,
                     .tile_n = 64,
                     .tile_k = 64,
                     .step_k = 32};
    std::vector<std::int32_t> ids, tables(args.geometry.table_words());
    std::uint64_t rows = 0, near = 0, far = 0;  // rows here; own tokens that leave
    for (std::uint32_t i = 0; i < kWorld * kTokens * kTopK; ++i) {
        ids.push_back(static_cast<std::int32_t>(i * 7 % 5 + i % 8));
        rows += routing.owner(ids.back()) == 0 ? 1 : 0;
    }
    for (std::uint32_t token = 0; token < kTokens; ++token) {
        for (std::uint32_t rank = 1; rank < kWorld; ++rank) {
            const bool goes = routing.owner(ids[token * kTopK]) == rank ||
                              routing.owner(ids[token * kTopK + 1]) == rank;
            (rank == 1 ? near : far) += goes ? 1 : 0;
        }
    }
    args.x = matrix(kTokens, kHidden);
    args.w = matrix(kExperts * kHidden, kFeatures);
    args.grouped = matrix(routing.most_rows(), kHidden);
    args.out = matrix(routing.most_rows(), kFeatures);
    args.tables = table(tables, 1);
    args.routing = table(ids, kWorld);
    args.own_ids = args.slot_ids(args.routing.base);

    // Blocks meet in the tables: the first time one block builds them alone.
    for (const std::uint32_t blocks : {1u, 5u}) {
        const CountingCore vector = total("moe_vector", args, blocks);
        CHECK(vector.put == rows * kHidden);
        CHECK(vector.done.at("TNOTIFY") >= std::uint64_t{kWorld} * (2 + args.geometry.chunks()));
    }
    CHECK(tables[routing.base(kExperts)] == static_cast<std::int32_t>(rows));
    const CountingCore cube = total("moe_cube", args, 3);
    CHECK(cube.macs == rows * kHidden * kFeatures);
    CHECK(cube.stored == rows * kFeatures);
    const CountingCore comm = total("moe_comm", args, 5);
    const std::uint64_t places = routing.places();
    CHECK(comm.put == (near + far) * kHidden + (kWorld - 1) * places);
    CHECK(comm.put_far == far * kHidden * 2 + 2 * places * 4);
    CHECK(comm.done.at("NIC_PUT") == 2 * (args.geometry.chunks() + 1));

    Call<moe_combine::Args> home;
    home.args.geometry = {.routing = routing,
                          .world = kWorld,
                          .features = kFeatures,
                          .rows_per_chunk = 9,
                          .far = true};
    home.args.y = matrix(routing.most_rows(), kFeatures);
    home.args.weights = matrix(kTokens, kTopK);
    home.args.tables = args.tables;
    home.args.out = matrix(kTokens, kFeatures);
    std::uint64_t own = 0;
    for (std::uint32_t i = 0; i < places; ++i) own += routing.owner(ids[i]) == 0 ? 1 : 0;
    CHECK(total("moe_combine_comm", home.args, 3).put == (rows - own) * kFeatures);
    const CountingCore sums = total("moe_combine_vector", home.args, 3);
    CHECK(sums.weighed == places * kFeatures);
    CHECK(sums.stored == std::uint64_t{kTokens} * kFeatures);
}

void ring_attention_does_its_work(bool causal) {
    constexpr std::uint32_t kHeads = 6, kKvHeads = 2, kPiece = 50, kDim = 48, kCubes = 3;
    Call<ring_attention::Args> call;
    ring_attention::Args& args = call.args;
    args.geometry = {.world = kWorld,
                     .heads = kHeads,
                     .kv_heads = kKvHeads,
                     .rows = 2 * kPiece,
                     .head_dim = kDim,
                     .causal = causal,
                     .rows_per_chunk = 17,
                     .cubes = kCubes};
    const std::uint32_t rows = 2 * kPiece;
    args.q = args.out = matrix(kHeads * rows, kDim);
    args.k = args.v = matrix(kKvHeads * rows, kDim);
    args.lse = matrix(kHeads * rows, 1);

    // Rank 0 has the first and the last piece of eight: queries of one see themselves, of the other
    // everybody.
    const std::uint64_t pairs =
        kHeads * (causal ? (1 + 8) * kPiece * kPiece : rows * kWorld * rows);
    const std::uint64_t results = std::uint64_t{kHeads} * rows * kDim;
    const CountingCore cube = total("ring_attention_cube", args, kCubes);
    CHECK(cube.macs == 2 * pairs * kDim);
    CHECK(cube.stored == pairs + (causal ? (1 + 8) * results / 2 : kWorld * results));
    const CountingCore vector =
        total("ring_attention_vector", args, kCubes * ring_attention::kVectorsPerCube);
    CHECK(vector.scores == pairs);
    CHECK(vector.divided == results);
    // Queries that go on with others' keys: what the own ones gave, a maximum and a sum.
    const std::uint64_t paused = (results + std::uint64_t{2} * kHeads * rows) / (causal ? 2 : 1);
    CHECK(vector.stored == pairs + results + kHeads * rows + paused);
    CHECK((vector.done.count("TTRIL") > 0) == causal);
    // The last piece is seen by nobody else.
    const CountingCore comm = total("ring_attention_comm", args, 5);
    const std::uint64_t sent = 2 * std::uint64_t{kKvHeads} * (causal ? kPiece : rows) * kDim;
    CHECK(comm.put == 2 * sent);
    CHECK(comm.put_far == 2 * sent * 2);
}

void every_kernel_says_on_which_cores_it_runs() {
    for (const auto& [name, entry] : test::entries()) {
        const bool vector = name.ends_with("_comm") || name.ends_with("_vector");
        CHECK(entry.cores == (vector ? "aiv" : "aic"));
    }
    CHECK(test::entries().size() == 12);
}

}  // namespace

int main() {
    all_gather_gemm_does_its_work();
    gemm_reduce_does_its_work(false);
    gemm_reduce_does_its_work(true);
    moe_does_its_work();
    for (const bool causal : {false, true}) ring_attention_does_its_work(causal);
    every_kernel_says_on_which_cores_it_runs();
    return test::finish();
}
