// The tile ISA as the functional core executes it: results, and what it refuses.
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "backends/accelerators/ascend/sim/core.hpp"
#include "backends/accelerators/ascend/sim/matrix_unit.hpp"
#include "tests/native/ascend/check.hpp"
#include "tests/native/ascend/memory.hpp"

using namespace mkernel;
using namespace mkernel::ascend;
using isa::Buffer;
using isa::DType;
using isa::GlobalView;
using isa::Pipe;
using isa::Tile;
using sim::IsaError;
using test::has;
using test::thrown;

namespace {

float half_to_float(std::uint16_t bits) {
    const int sign = bits >> 15, exponent = bits >> 10 & 31, mantissa = bits & 1023;
    const double value = exponent == 31  ? (mantissa == 0 ? INFINITY : NAN)
                         : exponent == 0 ? std::ldexp(mantissa, -24)
                                         : std::ldexp(1024 + mantissa, exponent - 25);
    return static_cast<float>(sign != 0 ? -value : value);
}

bool same(float a, float b) {
    return (std::isnan(a) && std::isnan(b)) || a == b;
}

struct Bench {
    explicit Bench(sim::Role kind, std::vector<sim::Record>* trace = nullptr)
        : scheduler(1), core((fill(), environment), kind, 3, 24, memory, trace) {}

    void fill() {
        environment.pad = pad.signals;
        environment.scheduler = &scheduler;
        environment.rank = 1;
        environment.memory.push_back(
            {reinterpret_cast<std::byte*>(gm.data()), gm.size() * 4, true});
        environment.memory.push_back({reinterpret_cast<std::byte*>(rom), sizeof(rom), false});
    }
    GlobalView view(DType dtype, std::uint32_t rows, std::uint32_t cols) {
        return {reinterpret_cast<std::byte*>(gm.data()), dtype, rows, cols, cols, 1};
    }

    test::Pad pad{8};
    std::vector<float> gm = std::vector<float>(1 << 16);
    float rom[64] = {};
    sim::Scheduler scheduler;
    sim::Environment environment;
    sim::OnChip memory;
    sim::Core core;
};

void conversions_are_exact(const sim::MatrixUnit& unit) {
    std::vector<std::uint16_t> all(65536);
    for (int i = 0; i < 65536; ++i) all[i] = static_cast<std::uint16_t>(i);
    std::vector<float> out(65536);
    for (const auto dtype : {DType::float16, DType::bfloat16}) {
        unit.pack_a(out.data(), 256, {reinterpret_cast<std::byte*>(all.data()), dtype, 256, 1}, 256,
                    256);
        int wrong = 0;
        for (int i = 0; i < 65536; ++i) {
            const float want = dtype == DType::float16
                                   ? half_to_float(all[i])
                                   : std::bit_cast<float>(static_cast<std::uint32_t>(i) << 16);
            wrong += same(out[i], want) ? 0 : 1;
        }
        CHECK(wrong == 0);
    }
}

// Each unit by itself, the fallbacks included: small integers, so that every order of sums is
// exact.
void units_multiply_exactly(const sim::MatrixUnit& unit) {
    constexpr std::uint32_t kM = 29, kN = 71, kK = 45, kRows = 32, kCols = 96;
    std::vector<std::uint16_t> a(kM * kK), b(kK * kN), b_t(kK * kN);  // bfloat16
    const auto small = [](std::uint32_t i) { return static_cast<float>(i * 7919 % 15) - 7.0f; };
    const auto bits = [](float x) {
        return static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(x) >> 16);
    };
    for (std::uint32_t i = 0; i < a.size(); ++i) a[i] = bits(small(i));
    for (std::uint32_t p = 0; p < kK; ++p) {
        for (std::uint32_t j = 0; j < kN; ++j) {
            b[p * kN + j] = b_t[j * kK + p] = bits(small(p * 131 + j));
        }
    }
    std::vector<float> left(kRows * kK), right(kK * kCols), sum(kRows * kCols, NAN), out(kM * kN);
    const auto* bytes_a = reinterpret_cast<std::byte*>(a.data());
    unit.pack_a(left.data(), kK, {bytes_a, DType::bfloat16, kK, 1}, kM, kK);
    for (const bool transposed : {false, true}) {
        auto& source = transposed ? b_t : b;
        unit.pack_b(right.data(),
                    {reinterpret_cast<std::byte*>(source.data()), DType::bfloat16,
                     transposed ? 1 : std::int64_t{kN}, transposed ? std::int64_t{kK} : 1},
                    kK, kN);
        unit.multiply(sum.data(), kRows / unit.mr, left.data(), kK, right.data(), kM, kN, kK,
                      false);
        unit.multiply(sum.data(), kRows / unit.mr, left.data(), kK, right.data(), kM, kN, kK, true);
        unit.unpack_c(reinterpret_cast<std::byte*>(out.data()), DType::float32, kN, sum.data(),
                      kRows / unit.mr, kM, kN);
        int wrong = 0;
        for (std::uint32_t i = 0; i < kM; ++i) {
            for (std::uint32_t j = 0; j < kN; ++j) {
                float want = 0;
                for (std::uint32_t p = 0; p < kK; ++p)
                    want += small(i * kK + p) * small(p * 131 + j);
                wrong += out[i * kN + j] == 2 * want ? 0 : 1;
            }
        }
        CHECK(wrong == 0);
    }
}

// One random product through every instruction of the path, against float64.
void product(std::uint32_t m, std::uint32_t n, std::uint32_t k, isa::Layout b_layout, DType out) {
    Bench bench(sim::Role::cube);
    std::mt19937 random(m * 7919 + n * 31 + k);
    std::uniform_real_distribution<float> uniform(-1, 1);
    std::vector<float>& gm = bench.gm;
    float *a = gm.data(), *b = a + m * k, *c = b + k * n;
    for (std::uint32_t i = 0; i < m * k + k * n; ++i) gm[i] = uniform(random);
    auto& core = bench.core;
    const Tile a1{Buffer::L1, DType::float32, isa::Layout::row, 0, 64, 64, m, k};
    const Tile b1{Buffer::L1, DType::float32, b_layout, 64 * 64 * 4, 64, 96, k, n};
    const Tile c0{Buffer::L0C, DType::float32, isa::Layout::row, 0, 64, 96, m, n};
    core.tload(a1, {reinterpret_cast<std::byte*>(a), DType::float32, m, k, k, 1});
    if (b_layout == isa::Layout::row) {
        core.tload(b1, {reinterpret_cast<std::byte*>(b), DType::float32, k, n, n, 1});
    } else {
        core.tload(b1, {reinterpret_cast<std::byte*>(b), DType::float32, k, n, 1, k});
    }
    const std::uint32_t step = 16;
    for (std::uint32_t at = 0; at < k; at += step) {
        const std::uint32_t depth = std::min(step, k - at);
        const Tile a0{Buffer::L0A, DType::float32, isa::Layout::row, 4096, 64, 16, m, depth};
        const Tile b0{Buffer::L0B, DType::float32, isa::Layout::row, 8192, 16, 96, depth, n};
        core.textract(a0, a1, 0, at);
        core.textract(b0, b1, at, 0);
        if (at == 0) {
            core.tmatmul(c0, a0, b0);
        } else {
            core.tmatmul_acc(c0, a0, b0);
        }
    }
    core.tstore({reinterpret_cast<std::byte*>(c), out, m, n, n, 1}, c0);
    double worst = 0;
    for (std::uint32_t i = 0; i < m; ++i) {
        for (std::uint32_t j = 0; j < n; ++j) {
            double want = 0;
            for (std::uint32_t p = 0; p < k; ++p) {
                const float right = b_layout == isa::Layout::row ? b[p * n + j] : b[j * k + p];
                want += static_cast<double>(a[i * k + p]) * right;
            }
            double got;
            const std::size_t at = std::size_t{i} * n + j;
            if (out == DType::float32) {
                got = c[at];
            } else {
                const std::uint16_t bits = reinterpret_cast<std::uint16_t*>(c)[at];
                got = out == DType::float16 ? half_to_float(bits)
                                            : std::bit_cast<float>(std::uint32_t{bits} << 16);
            }
            worst = std::max(worst, std::abs(got - want) / (1 + std::abs(want)));
        }
    }
    CHECK(worst < (out == DType::float32 ? 1e-5 : out == DType::float16 ? 1e-3 : 1e-2));
}

void refusals() {
    Bench cube(sim::Role::cube), vector(sim::Role::comm);
    const Tile tile{Buffer::L1, DType::float16, isa::Layout::row, 0, 16, 32, 16, 32};
    const auto load = [&](Tile t, GlobalView v) {
        return thrown<IsaError>([&] { cube.core.tload(t, v); });
    };
    const GlobalView good = cube.view(DType::float16, 16, 32);
    CHECK(load(tile, good).empty());

    Tile late = tile;
    late.offset = (512 << 10) - 512;
    CHECK(has(load(late, good), "rank 1 AIC core 3, TLOAD: L1[523776, 524800) 16x32 float16"));
    CHECK(has(load(late, good), "ends beyond the buffer's 524288 bytes"));
    CHECK(has(load(tile.with_valid(17, 32), good), "valid part is larger"));
    CHECK(has(load(tile.with_valid(8, 32), good), "the view is 16x32"));
    CHECK(has(load(tile, cube.view(DType::bfloat16, 16, 32)), "another dtype"));
    CHECK(has(
        load(tile, {cube.view(DType::float16, 16, 32).at(8191, 0), DType::float16, 16, 32, 32, 1}),
        "outside the call's tensors"));
    late.offset = 8;
    CHECK(has(load(late, good), "not 32-byte aligned"));
    CHECK(
        has(thrown<IsaError>([&] { vector.core.tload(tile, vector.view(DType::float16, 16, 32)); }),
            "this kind of core has no such buffer"));

    const Tile ub{Buffer::UB, DType::float32, isa::Layout::row, 0, 8, 8, 8, 8};
    CHECK(has(thrown<IsaError>([&] { cube.core.tadd(ub, ub, ub); }), "no such buffer"));
    const GlobalView rom{reinterpret_cast<std::byte*>(vector.rom), DType::float32, 8, 8, 8, 1};
    CHECK(thrown<IsaError>([&] { vector.core.tload(ub, rom); }).empty());
    CHECK(has(thrown<IsaError>([&] { vector.core.tstore(rom, ub); }), "writes 256 bytes"));

    const Tile l0a{Buffer::L0A, DType::float16, isa::Layout::row, 0, 16, 16, 16, 16};
    CHECK(has(thrown<IsaError>([&] { cube.core.textract(l0a, tile, 0, 17); }),
              "reads beyond the valid part"));
    const Tile l0b{Buffer::L0B, DType::float16, isa::Layout::row, 0, 32, 32, 32, 32};
    const Tile l0c{Buffer::L0C, DType::float32, isa::Layout::row, 0, 16, 32, 16, 32};
    CHECK(has(thrown<IsaError>([&] { cube.core.tmatmul(l0c, l0a, l0b); }), "shapes do not match"));
    CHECK(has(thrown<IsaError>([&] { cube.core.tmatmul(l0c, l0b, l0a); }), "takes L0A and L0B"));

    // Flags.
    CHECK(has(thrown<IsaError>([&] { cube.core.wait_flag(Pipe::MTE2, Pipe::MTE1, 2); }),
              "MTE2→MTE1 event 2 was not set before"));
    cube.core.set_flag(Pipe::MTE2, Pipe::MTE1, 2);
    CHECK(has(thrown<IsaError>([&] { cube.core.set_flag(Pipe::MTE2, Pipe::MTE1, 2); }),
              "already set"));
    CHECK(has(thrown<IsaError>([&] { cube.core.finish(true); }), "never waited for"));
    CHECK(thrown<IsaError>([&] { cube.core.finish(false); }).empty());
    cube.core.wait_flag(Pipe::MTE2, Pipe::MTE1, 2);
    CHECK(thrown<IsaError>([&] { cube.core.finish(true); }).empty());
    CHECK(has(thrown<IsaError>([&] { cube.core.set_flag(Pipe::M, Pipe::FIX, 8); }), "event 8"));
}

void puts_copy_and_leave_the_rest() {
    Bench bench(sim::Role::comm);
    float* gm = bench.gm.data();
    for (int i = 0; i < 5000; ++i) gm[i] = static_cast<float>(i);
    // 100 rows of 37 out of a stride of 50, through two UB tiles of 16 rows each.
    const GlobalView from{reinterpret_cast<std::byte*>(gm), DType::float32, 100, 37, 50, 1};
    const GlobalView to{reinterpret_cast<std::byte*>(gm + 10000), DType::float32, 100, 37, 40, 1};
    const Tile ping{Buffer::UB, DType::float32, isa::Layout::row, 0, 16, 40, 0, 0};
    Tile pong = ping;
    pong.offset = ping.bytes();
    bench.core.tput(1, to, from, ping, pong);
    int wrong = 0;
    for (int r = 0; r < 100; ++r) {
        for (int c = 0; c < 40; ++c) {
            const float want = c < 37 ? static_cast<float>(r * 50 + c) : 0.0f;
            wrong += gm[10000 + r * 40 + c] == want ? 0 : 1;
        }
    }
    CHECK(wrong == 0);
}

// As one finds it that was stopped, and goes on when the others have given it up.
void what_is_late_reaches_no_other_rank() {
    const auto reaches = [](std::uint32_t peer, std::uint64_t until_ns, bool aborted) {
        Bench bench(sim::Role::comm);
        bench.environment.peers_wait_until_ns = until_ns;
        if (aborted) bench.environment.pad.abort(transport::AbortCode::timeout, {});
        bench.gm[0] = 7;
        const GlobalView from = bench.view(DType::float32, 1, 1);
        GlobalView to = from;
        to.base += 64;
        const Tile ping{Buffer::UB, DType::float32, isa::Layout::row, 0, 1, 8, 0, 0};
        Tile pong = ping;
        pong.offset = ping.bytes();
        test::Pad theirs(8);
        bench.core.tput(peer, to, from, ping, pong);
        bench.core.tnotify(peer, theirs.memory(), 3, 5);
        const bool put = bench.gm[16] == 7;
        CHECK(put == (theirs.signals.load(3) == 5));
        return put;
    };
    const std::uint64_t now = transport::monotonic_ns(), minute = 60'000'000'000;
    for (const std::uint32_t peer : {1u, 2u}) {  // itself, another
        CHECK(reaches(peer, 0, false));
        CHECK(reaches(peer, now + minute, false));
        CHECK(reaches(peer, now - 1, false) == (peer == 1));
        CHECK(reaches(peer, now + minute, true) == (peer == 1));
    }
}

void a_traced_core_never_takes_the_short_cut() {
    std::vector<sim::Record> trace;
    Bench traced(sim::Role::cube, &trace), plain(sim::Role::cube);
    for (auto* bench : {&traced, &plain}) {
        bench->environment.pad.expected(2).move_on(3);
        bench->environment.pad.add(2, 8);
    }
    CHECK(plain.core.ttest(2, 5));
    CHECK(!plain.core.ttest(2, 6));
    CHECK(!traced.core.ttest(2, 5));
    traced.core.annotate(9);
    CHECK(traced.core.twait(2, 5, 1));
    CHECK(plain.core.twait(2, -4, 1));  // what no call is known to have added either
    CHECK(trace.size() == 1 && trace[0].kind == sim::Kind::twait && trace[0].chunk == 9 &&
          trace[0].amount == 5);
    traced.environment.pad.abort(transport::AbortCode::cancelled, {});
    CHECK(!traced.core.twait(2, 5, 1));
}

}  // namespace

int main() {
    CHECK(std::string(sim::matrix_units().back()->name) == "portable");
    for (const auto* unit : sim::matrix_units()) {
        std::printf("%s\n", unit->name);
        conversions_are_exact(*unit);
        units_multiply_exactly(*unit);
    }
    for (const auto layout : {isa::Layout::row, isa::Layout::column}) {
        for (const auto out : {DType::float32, DType::float16, DType::bfloat16}) {
            product(64, 96, 64, layout, out);
            product(1, 1, 1, layout, out);
            product(7, 33, 19, layout, out);
            product(63, 95, 61, layout, out);
        }
    }
    refusals();
    puts_copy_and_leave_the_rest();
    what_is_late_reaches_no_other_rank();
    a_traced_core_never_takes_the_short_cut();
    return test::finish();
}
