// Kernels are not bound to the simulator: here each is instantiated, through its own launch macro,
// for a second core type that shares nothing with it and only counts what it is told. Kernels must
// ask it for exactly the work that their geometry says.
#include <map>
#include <string>
#include <vector>

#include "backends/accelerators/ascend/isa/pipe.hpp"
#include "backends/accelerators/ascend/isa/tile.hpp"
#include "backends/nics/put_command.hpp"
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
    void tadd(const isa::Tile&, const isa::Tile&, const isa::Tile&) { ++done["TADD"]; }
    void tcvt(const isa::Tile&, const isa::Tile&) { ++done["TCVT"]; }

    void set_flag(isa::Pipe, isa::Pipe, std::uint32_t) { ++flags; }
    void wait_flag(isa::Pipe, isa::Pipe, std::uint32_t) { --flags; }
    void pipe_barrier(isa::Pipe) {}
    void fence() {}

    void tnotify(std::uint32_t, std::byte*, std::uint32_t, std::uint64_t) { ++done["TNOTIFY"]; }
    [[nodiscard]] bool twait(std::uint32_t, std::uint64_t, std::uint32_t) {
        ++done["TWAIT"];
        return waits_end;
    }
    [[nodiscard]] bool ttest(std::uint32_t, std::uint64_t) { return false; }
    [[nodiscard]] bool nic_put(const nics::PutCommand& command) {
        ++done["NIC_PUT"];
        put_far += command.bytes;
        return true;
    }

    std::map<std::string, std::uint64_t> done;
    std::uint64_t macs = 0, stored = 0, put = 0;  // elements
    std::uint64_t put_far = 0;                    // bytes
    std::int64_t flags = 0;                       // set and not waited for
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
#include "backends/accelerators/ascend/kernels/gemm_ar/comm.hpp"
#include "backends/accelerators/ascend/kernels/gemm_reduce/compute.hpp"
#include "backends/accelerators/ascend/kernels/gemm_rs/comm.hpp"

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
        args.workspace = &g_memory[1];
        args.peers = peers.data();
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
    args.source_order = call.order.data();
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
    args.owners = call.order.data();

    const CountingCore compute = total("gemm_reduce_compute", args, 3);
    CHECK(compute.macs == std::uint64_t{kM} * kN * kK);
    CHECK(compute.stored == std::uint64_t{kM} * kN);
    const CountingCore comm = total(replicated ? "gemm_ar_comm" : "gemm_rs_comm", args, 3);
    const std::uint64_t part = std::uint64_t{kM / kWorld} * kN;
    // Partial results travel in four bytes, finished ones in two.
    CHECK(comm.put_far == 2 * part * 4 + (replicated ? 2 * part * 2 : 0));
    CHECK(comm.put == part + (replicated ? part + (kWorld - 1) * part : 0));
    CHECK(comm.done.at("TADD") > 0 && comm.done.at("TCVT") > 0);
}

void every_kernel_says_on_which_cores_it_runs() {
    for (const auto& [name, entry] : test::entries()) {
        const bool comm = name.ends_with("_comm");
        CHECK(entry.cores == (comm ? "aiv" : "aic"));
    }
    CHECK(test::entries().size() == 5);
}

}  // namespace

int main() {
    all_gather_gemm_does_its_work();
    gemm_reduce_does_its_work(false);
    gemm_reduce_does_its_work(true);
    every_kernel_says_on_which_cores_it_runs();
    return test::finish();
}
