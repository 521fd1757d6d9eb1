// Strict simulation: one broken kernel for each class of hazard, what it must not complain about,
// and every flag and fence of the AllGather+GEMM kernels taken away in turn.
//
// Cores are dry here: order is checked, nothing is computed. That results do not depend on the seed
// is shown where there are results (tests/unit/ascend/test_strict.py).
#include <algorithm>
#include <future>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "backends/accelerators/ascend/kernels/ag_gemm/comm.hpp"
#include "backends/accelerators/ascend/kernels/ag_gemm/compute.hpp"
#include "backends/accelerators/ascend/kernels/ag_gemm/send_order.hpp"
#include "backends/accelerators/ascend/kernels/gemm_reduce/comm.hpp"
#include "backends/accelerators/ascend/kernels/gemm_reduce/compute.hpp"
#include "backends/accelerators/ascend/sim/core.hpp"
#include "tests/native/ascend/check.hpp"
#include "tests/native/ascend/memory.hpp"
#include "tests/native/ascend/mutation.hpp"

using namespace mkernel;
using namespace mkernel::ascend;
using isa::Buffer;
using isa::DType;
using isa::GlobalView;
using isa::Pipe;
using isa::Tile;
using sim::IsaError;
using sim::Role;
using test::has;
using test::thrown;

namespace {

std::byte* const kMemory = reinterpret_cast<std::byte*>(std::uintptr_t{1} << 44);

alignas(64) std::byte g_words[1024];  // what scalar instructions touch is real

sim::Environment dry() {
    sim::Environment environment;
    environment.dry = true;
    environment.rank = 3;
    environment.memory = {{kMemory, std::size_t{1} << 44, true, false},
                          {g_words, sizeof g_words, true}};
    environment.strict.emplace();
    return environment;
}

struct Bench {
    explicit Bench(Role kind) : core(environment, kind, 5, 24, memory, nullptr) {}
    sim::Environment environment = dry();
    sim::OnChip memory;
    sim::Core core;
};

GlobalView matrix(std::uint32_t rows, std::uint32_t cols, std::size_t at = 0) {
    return {kMemory + at, DType::float16, rows, cols, 1024, 1};
}

Tile tile(Buffer buffer, std::uint32_t offset, std::uint32_t rows, std::uint32_t cols) {
    return {.buffer = buffer,
            .dtype = buffer == Buffer::L0C ? DType::float32 : DType::float16,
            .offset = offset,
            .rows = rows,
            .cols = cols,
            .valid_rows = rows,
            .valid_cols = cols};
}

template <class Body>
void says(Role kind, std::vector<std::string> parts, Body body) {
    Bench bench(kind);
    const std::string text = thrown<IsaError>([&] { body(bench.core); });
    parts.push_back("rank 3 ");
    for (const std::string& part : parts) CHECK(has(text, part));
}

void order(sim::Core& core, Pipe source, Pipe waiting) {
    core.set_flag(source, waiting, 0);
    core.wait_flag(source, waiting, 0);
}

std::string line(int number) {
    return "test_strict.cpp:" + std::to_string(number);
}

void hazards() {
    const Tile a = tile(Buffer::L1, 0, 64, 64), l0a = tile(Buffer::L0A, 0, 64, 64);
    const Tile ub = tile(Buffer::UB, 0, 64, 64);

    int load = 0, other = 0;
    // A read before the write it needs.
    says(Role::cube,
         {"AIC core 5, TEXTRACT (pipe MTE1, ", "reads L1[0, 8192)", "may still write",
          "set_flag and wait_flag(MTE2, MTE1) are missing",
          "TLOAD (pipe MTE2, " + line(load = __LINE__ + 2)},
         [&](sim::Core& core) {
             core.tload(a, matrix(64, 64));
             core.textract(l0a, a, 0, 0);
         });
    // A half of L1 loaded again while it is still read.
    says(Role::cube,
         {"TLOAD (pipe MTE2, " + line(load = __LINE__ + 5), "overwrites L1[0, 8192)",
          "TEXTRACT (pipe MTE1, " + line(other = __LINE__ + 3) + ") may still read"},
         [&](sim::Core& core) {
             core.tload(a, matrix(64, 64)), order(core, Pipe::MTE2, Pipe::MTE1);
             core.textract(l0a, a, 0, 0);
             core.tload(a, matrix(64, 64));
         });
    // The same, ordered; then through a third pipe, and by a fence.
    {
        Bench bench(Role::cube);
        auto& core = bench.core;
        core.tload(a, matrix(64, 64));
        order(core, Pipe::MTE2, Pipe::MTE1);
        core.textract(l0a, a, 0, 0);
        order(core, Pipe::MTE1, Pipe::M);
        order(core, Pipe::M, Pipe::MTE2);
        core.tload(a, matrix(64, 64));
        core.fence();
        core.textract(l0a, a, 0, 0);
        order(core, Pipe::MTE1, Pipe::S);  // S issues everything
        core.tload(a, matrix(64, 64));
        core.fence();
        core.finish(true);
    }
    // Global memory, within a core.
    says(Role::comm, {"TLOAD", "bytes of global memory", "TSTORE (pipe MTE3"},
         [&](sim::Core& core) {
             core.tload(ub, matrix(64, 64));
             order(core, Pipe::MTE2, Pipe::MTE3);
             core.tstore(matrix(64, 64, 256), ub);  // columns [128, 192)
             core.tload(tile(Buffer::UB, 65536, 64, 64), matrix(64, 64, 128));  // [64, 128): apart
             core.tload(tile(Buffer::UB, 32768, 1, 128), matrix(1, 128, 129 + 2048 * 63 + 1));
         });

    // Out of bounds, overlapping tiles.
    says(Role::cube, {"TLOAD", "ends beyond the buffer's 524288 bytes"}, [&](sim::Core& core) {
        core.tload(tile(Buffer::L1, (512 << 10) - 4096, 64, 64), matrix(64, 64));
    });
    says(Role::cube, {"TLOAD", "overwrites L1[4096, 8192)", "tiles overlap"}, [&](sim::Core& core) {
        core.tload(a, matrix(64, 64));
        core.tload(tile(Buffer::L1, 4096, 64, 64), matrix(64, 64));
    });
    says(Role::cube, {"TEXTRACT", "reads L1[0, 8192), part of which", "the tiles overlap"},
         [&](sim::Core& core) {
             core.tload(a, matrix(64, 64));
             order(core, Pipe::MTE2, Pipe::MTE1);
             core.textract(l0a, a, 0, 0);
             order(core, Pipe::MTE1, Pipe::MTE2);
             core.tload(tile(Buffer::L1, 4096, 64, 64), matrix(64, 64));
             order(core, Pipe::MTE2, Pipe::MTE1);
             core.textract(l0a, a, 0, 0);
         });
    says(Role::comm, {"TPUT", "the tiles overlap"}, [&](sim::Core& core) {
        core.tput(0, matrix(64, 64, 1 << 20), matrix(64, 64), ub, tile(Buffer::UB, 4096, 64, 64));
    });

    // Uninitialised.
    says(Role::cube, {"TEXTRACT", "reads L1[0, 8192), which nothing has written"},
         [&](sim::Core& core) { core.textract(l0a, a, 0, 0); });
    says(Role::cube, {"TMATMUL_ACC", "reads L0C[0, 16384), which nothing has written"},
         [&](sim::Core& core) {
             const Tile b = tile(Buffer::L1, 8192, 64, 64), l0b = tile(Buffer::L0B, 0, 64, 64);
             core.tload(a, matrix(64, 64));
             core.tload(b, matrix(64, 64));
             order(core, Pipe::MTE2, Pipe::MTE1);
             core.textract(l0a, a, 0, 0);
             core.textract(l0b, b, 0, 0);
             order(core, Pipe::MTE1, Pipe::M);
             core.tmatmul_acc(tile(Buffer::L0C, 0, 64, 64), l0a, l0b);
         });
    says(Role::cube, {"reads 64x64 elements", "has written 64x48; the rest is uninitialised"},
         [&](sim::Core& core) {
             core.tload(a.with_valid(64, 48), matrix(64, 48));
             order(core, Pipe::MTE2, Pipe::MTE1);
             core.textract(l0a, a, 0, 0);
         });

    // Flags.
    says(Role::cube, {"WAIT_FLAG: MTE2→MTE1 event 0 was not set before", line(__LINE__ + 1)},
         [&](sim::Core& core) { core.wait_flag(Pipe::MTE2, Pipe::MTE1, 0); });
    says(Role::cube, {"was set and never waited for (" + line(__LINE__ + 1)}, [&](sim::Core& core) {
        core.set_flag(Pipe::MTE2, Pipe::MTE1, 0);
        core.finish(true);
    });
    says(Role::cube, {"SET_FLAG (pipe MTE2", "event 0 of MTE2→MTE1 is set again"},
         [&](sim::Core& core) {
             order(core, Pipe::MTE2, Pipe::MTE1);
             order(core, Pipe::MTE2, Pipe::MTE1);
         });

    // Signals raised too early.
    says(Role::comm,
         {"TNOTIFY (pipe S, ", "raises signal 9 of rank 1 while what TPUT (pipe MTE3",
          "fence() is missing"},
         [&](sim::Core& core) {
             core.tput(1, matrix(64, 64, 1 << 20), matrix(64, 64), ub,
                       tile(Buffer::UB, 8192, 64, 64));
             order(core, Pipe::MTE3, Pipe::S);  // done, but not visible
             core.tnotify(1, kMemory, 9, 1);
         });
    // A fence of one pipe is none of another.
    says(Role::comm, {"TNOTIFY (pipe S, ", "while what TSTORE (pipe MTE3", "fence() is missing"},
         [&](sim::Core& core) {
             core.tload(ub, matrix(64, 64));
             order(core, Pipe::MTE2, Pipe::MTE3);
             core.tstore(matrix(64, 64, 1 << 20), ub);
             core.fence(Pipe::MTE2);
             core.tnotify(1, kMemory, 9, 1);
         });
    says(Role::comm,
         {"NIC_PUT (pipe S, ", "queues a put to rank 2 while TLOAD (pipe MTE2", "may still read"},
         [&](sim::Core& core) {
             core.tload(ub, matrix(64, 64));
             (void)core.nic_put({.peer = 2});
         });
    CHECK(load > 0 && other > 0);
}

void scalar_hazards() {
    const Tile ub = tile(Buffer::UB, 0, 1, 16);
    const GlobalView words{g_words, DType::float16, 1, 16, 16, 1};
    const std::string missing = "fence() between the scalar cache and memory is missing";
    says(Role::comm,
         {"TLOAD (pipe MTE2, ", "part of which SSTORE (pipe S, " + line(__LINE__ + 2), missing},
         [&](sim::Core& core) {
             core.sstore(g_words + 8, 1);
             core.tload(ub, words);
         });
    // A flag is not enough: the cache may hold what was there before.
    says(Role::vector, {"SLOAD (pipe S, ", "TSTORE (pipe MTE3, ", missing}, [&](sim::Core& core) {
        core.tload(ub, matrix(1, 16));
        order(core, Pipe::MTE2, Pipe::MTE3);
        core.tstore(words, ub);
        order(core, Pipe::MTE3, Pipe::S);
        (void)core.sload(g_words + 4);
    });
    says(Role::comm, {"TNOTIFY (pipe S, ", "what SSTORE (pipe S, ", "fence() is missing"},
         [&](sim::Core& core) {
             core.sstore(g_words, 1);
             core.tnotify(3, g_words, 0, 1);
         });
    says(Role::comm, {"SLOAD: a record has no memory here"},
         [&](sim::Core& core) { (void)core.sload(kMemory); });
    says(Role::comm, {"SSTORE: the address is not four-byte aligned"},
         [&](sim::Core& core) { core.sstore(g_words + 2, 1); });
    says(Role::comm, {"TADD", "takes no int32"}, [&](sim::Core& core) {
        Tile wrong = ub;
        wrong.dtype = DType::int32;
        core.tadd(wrong, wrong, wrong);
    });

    Bench bench(Role::comm);
    for (std::uint32_t i = 0; i < 16; ++i) bench.core.sstore(g_words + 4 * i, 100 + int(i));
    bench.core.sstore(g_words + 20, 7);
    CHECK(bench.core.sload(g_words + 20) == 7);  // a core sees its own stores
    bench.core.fence();
    bench.core.tload(ub, words);
    order(bench.core, Pipe::MTE2, Pipe::S);
    bench.core.sstore(g_words, 5);  // ordered after the load
    bench.core.fence();
    bench.core.tnotify(3, g_words, 0, 1);
    CHECK(bench.core.sload(g_words) == 5 && bench.core.sload(g_words + 60) == 115);
}

// --- effects put off ------------------------------------------------------------------------------

// What two loads, an extract and a store do in each pipe's order, with a flag before the extract.
std::string interleaving(std::optional<std::uint64_t> seed) {
    std::string text;
    sim::Queue queue(seed);
    queue.push(Pipe::MTE2, [&] { text += 'a'; });
    queue.set(Pipe::MTE2, Pipe::MTE1, 3);
    queue.push(Pipe::MTE2, [&] { text += 'b'; });
    queue.wait(Pipe::MTE2, Pipe::MTE1, 3);
    queue.push(Pipe::MTE1, [&] { text += 'c'; });
    queue.push(Pipe::FIX, [&] { text += 'd'; });
    queue.set(Pipe::MTE1, Pipe::S, 0);
    queue.wait(Pipe::MTE1, Pipe::S, 0);
    CHECK(text.find('c') != std::string::npos);  // S has waited for it
    queue.drain();
    return text;
}

void seeds_explore_legal_orders() {
    CHECK(interleaving(std::nullopt) == "abcd");
    std::set<std::string> seen;
    for (std::uint64_t seed = 0; seed < 1000; ++seed) seen.insert(interleaving(seed));
    for (const std::string& each : seen) {
        CHECK(each.size() == 4 && each.find('a') < each.find('b') &&
              each.find('a') < each.find('c'));
    }
    CHECK(seen.size() == 8);  // 4! / 3: a is the first of a, b and c
    CHECK(interleaving(11) == interleaving(11));
}

// --- signals that nobody raises -----------------------------------------------------------------

struct Pair {
    Pair() {
        environment.dry = false;
        environment.pad = pad.signals;
        environment.scheduler = &scheduler;
        environment.waits = &waits.emplace(environment.pad, environment.rank, 2);
        environment.deadline_ns = transport::monotonic_ns() + 60'000'000'000;
    }
    // A comm core that waits for its own rank's signal 1, in a thread; `body` once it sleeps. What
    // `body` throws; the core is aborted then.
    template <class Body>
    std::string beside_a_waiting_core(Body body) {
        std::promise<std::string> said;
        scheduler.reserve(2);
        scheduler.submit(0, {[&] {
                             sim::Core comm(environment, Role::comm, 0, 1, on_chip[0], nullptr);
                             came.set_value(comm.twait(1, 2, environment.rank));
                         }});
        while (waits->all().empty()) std::this_thread::yield();
        scheduler.submit(1, {[&] {
                             std::string text = thrown<IsaError>(body);
                             environment.pad.abort(transport::AbortCode::peer_failure, {});
                             said.set_value(std::move(text));
                         }});
        CHECK(!came.get_future().get());
        return said.get_future().get();
    }
    sim::Environment environment = dry();
    test::Pad pad{8};
    sim::Scheduler scheduler{2};
    std::optional<sim::Waits> waits;
    sim::OnChip on_chip[2];
    std::promise<bool> came;  // what a wait returned
};

void waits_in_vain() {
    const auto timed_out = [](const Pair& pair, std::uint32_t signal, std::uint32_t peer) {
        const transport::AbortRecord& record = pair.environment.pad.abort_record();
        CHECK(transport::abort_code(record) == transport::AbortCode::timeout);
        const transport::Diagnosis& who = record.diagnosis;
        CHECK(who.waiter == transport::Waiter::compute_kernel && who.core == 4);
        CHECK(who.signal == signal && who.peer == peer && who.seen == 0 && who.wanted == 1);
    };
    {  // The kernels wait for each other.
        Pair pair;
        const std::string text = pair.beside_a_waiting_core([&] {
            sim::Core compute(pair.environment, Role::cube, 4, 8, pair.on_chip[1], nullptr);
            (void)compute.twait(5, 1, pair.environment.rank);
        });
        CHECK(has(text, "rank 3, deadlock"));
        CHECK(has(text, "AIV core 0 for signal 1 of rank 3 to be 2, now 0 (test_strict.cpp:"));
        CHECK(has(text, "AIC core 4 for signal 5 of rank 3 to be 1, now 0 (test_strict.cpp:"));
        CHECK(pair.waits->at_deadline().empty());
    }
    {  // The other one returns without the signal.
        Pair pair;
        CHECK(
            has(pair.beside_a_waiting_core([&] { pair.waits->ended(); }), "AIV core 0 for signal"));
    }
    {  // Another rank may still raise what one of them waits for, until the deadline.
        Pair pair;
        const std::string text = pair.beside_a_waiting_core([&] {
            sim::Environment soon = pair.environment;
            soon.deadline_ns = transport::monotonic_ns() + 50'000'000;
            sim::Core compute(soon, Role::cube, 4, 8, pair.on_chip[1], nullptr);
            CHECK(pair.waits->at_deadline().empty());
            CHECK(!compute.twait(5, 1, 0));
        });
        CHECK(text.empty());
        timed_out(pair, 5, 0);
        const std::string report = pair.waits->at_deadline();
        CHECK(has(report, "AIV core 0 for signal 1 of rank 3 to be 2, now 0 (test_strict.cpp:"));
        CHECK(has(report, "; AIC core 4 for signal 5 of rank 0 to be 1, now 0 (test_strict.cpp:"));
    }
    {  // A core at work may still raise it too: the comm core, which never sleeps here.
        Pair pair;
        pair.environment.deadline_ns = transport::monotonic_ns();
        sim::Core compute(pair.environment, Role::cube, 4, 8, pair.on_chip[1], nullptr);
        pair.scheduler.reserve(1);
        pair.scheduler.submit(1, {[&] { pair.came.set_value(compute.twait(5, 1, 3)); }});
        CHECK(!pair.came.get_future().get());
        timed_out(pair, 5, 3);
        CHECK(has(pair.waits->at_deadline(), "AIC core 4 for signal 5 of rank 3 to be 1, now 0"));
    }
}

// --- the AllGather+GEMM kernels -----------------------------------------------------------------

class Gather : public test::DryRank {
  public:
    Gather(std::uint32_t world, std::uint32_t near) : DryRank(0, world, near) {
        args_.geometry = {.world = world,
                          .m_local = 70,
                          .n = 100,
                          .k = 200,
                          .tile_m = 32,
                          .tile_n = 64,
                          .tile_k = 64,
                          .step_k = 32,
                          .tiles_per_chunk = 3};
        const ag_gemm::Geometry& g = args_.geometry;
        args_.a = view(1, g.m_local, g.k, g.dtype);
        args_.b = view(2, g.k, g.n, g.dtype);
        args_.out = view(3, g.m_local * world, g.n, DType::float32);
        bind(args_);
        send_order_ = ag_gemm::send_order(g, 2, near - 1);
        args_.send_order = send_order_.data();
    }

    // What strict simulation says of block `index` of 2 without the syncs of those numbers.
    std::string run(Role kind, std::uint32_t index, std::vector<std::uint32_t> without) {
        return says(kind, index, 2, std::move(without), [&](sim::Core& core) {
            return kind == Role::comm ? ag_gemm::comm(core, args_) : ag_gemm::compute(core, args_);
        });
    }

  private:
    ag_gemm::Args args_;
    std::vector<std::uint32_t> send_order_;
};

void every_sync_is_needed(const char* name, std::uint32_t world, std::uint32_t near) {
    Gather kernels(world, near);
    for (const auto role : {Role::comm, Role::cube}) {
        const test::Mutations found = test::every_sync_is_needed(name, kernels, role);
        // Two blocks; both ends of four stages of L1, and of two halves of L0 and of L0C.
        CHECK(found.idle_syncs == 0 && found.idle_pairs == (role == Role::cube ? 2 * 2 * 8 : 0));
    }
}

// --- the kernels of GEMM+ReduceScatter and GEMM+AllReduce ---------------------------------------

class Reduce : public test::DryRank {
  public:
    Reduce(std::uint32_t world, std::uint32_t near, bool replicated, DType partial_dtype,
           std::uint32_t k, std::uint32_t segments = 0)
        : DryRank(0, world, near) {
        args_.geometry = {.world = world,
                          .m = replicated ? 200 : 70 * world,
                          .n = 200,
                          .k = k,
                          .tile_m = 32,
                          .tile_n = 64,
                          .tile_k = 64,
                          .step_k = 32,
                          .tiles_per_chunk = 2,
                          .replicated = replicated,
                          .out_dtype = DType::float16,
                          .partial_dtype = partial_dtype,
                          .band = 2,
                          .segments = segments};
        const gemm_reduce::Geometry& g = args_.geometry;
        args_.a = view(1, g.m, g.k, g.dtype);
        args_.b = view(2, g.k, g.n, g.dtype);
        args_.out = view(3, g.grid_rows(), g.n, g.out_dtype);
        bind(args_);
    }

    std::string run(Role kind, std::uint32_t index, std::vector<std::uint32_t> without,
                    std::uint32_t blocks = 2) {
        return says(kind, index, blocks, std::move(without), [&](sim::Core& core) {
            return kind == Role::comm ? gemm_reduce::comm(core, args_)
                                      : gemm_reduce::compute(core, args_);
        });
    }

  private:
    gemm_reduce::Args args_;
};

void every_sync_of_sums_is_needed() {
    struct Shared {
        std::uint32_t world, near, segments;
    };
    for (const bool replicated : {false, true}) {
        for (const auto partial : {DType::float16, DType::float32}) {
            for (const Shared& of : {Shared{3, 3, 0}, {4, 2, 0}, {1, 1, 4}, {4, 2, 4}, {2, 2, 8}}) {
                Reduce kernels(of.world, of.near, replicated, partial, 200, of.segments);
                for (const auto role : {Role::comm, Role::cube}) {
                    const test::Mutations found = test::every_sync_is_needed(
                        replicated ? "AllReduce" : "ReduceScatter", kernels, role);
                    CHECK(found.idle_syncs == 0);
                    CHECK(role == Role::cube || found.idle_pairs == 0);
                }
            }
        }
    }
}

// What L1 keeps of A is loaded once for all tiles of its rows, whether all of K fits or not.
void rows_of_a_are_loaded_once() {
    const auto loads = [](std::uint32_t k) {
        Reduce kernels(2, 2, false, DType::float16, k);
        CHECK(kernels.run(Role::cube, 0, {}, 4).empty());
        std::uint64_t bytes = 0;
        for (const sim::Record& each : kernels.trace()) {
            if (each.kind == sim::Kind::tload) bytes += each.amount;
        }
        return bytes;
    };
    // Block 0 of 4 has a row group of 32 rows with all of B's 200 columns, then one of 6 with 128.
    CHECK(loads(512) == (32 + 6 + 200 + 128) * std::uint64_t{512} * 2);
    // 116 of 128 K tiles are kept.
    CHECK(loads(8192) == (32 + 6 + 200 + 128) * std::uint64_t{8192} * 2 +
                             (3 * 32 + 6) * std::uint64_t{12} * 64 * 2);
}

}  // namespace

int main() {
    hazards();
    scalar_hazards();
    seeds_explore_legal_orders();
    waits_in_vain();
    every_sync_is_needed("one node", 3, 3);
    every_sync_is_needed("two nodes", 4, 2);
    every_sync_of_sums_is_needed();
    rows_of_a_are_loaded_once();
    return test::finish();
}
