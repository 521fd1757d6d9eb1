// The tile ISA as the functional core executes it: results, and what it refuses.
#include <bit>
#include <cmath>
#include <cstring>
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

void waits_count_what_this_call_adds() {
    std::vector<sim::Record> trace;
    Bench bench(sim::Role::cube, &trace);
    bench.environment.pad.expected(2).move_on(3);
    bench.environment.pad.add(2, 8);
    bench.core.annotate(9);
    CHECK(bench.core.twait(2, 5, 1));
    CHECK(trace.size() == 1 && trace[0].kind == sim::Kind::twait && trace[0].chunk == 9 &&
          trace[0].amount == 5);
    CHECK(bench.core.twait(2, -4, 1));  // what no call is known to have added either
    bench.environment.pad.abort(transport::AbortCode::cancelled, {});
    CHECK(!bench.core.twait(2, 5, 1));
}

}  // namespace

int main() {
    CHECK(std::string(sim::matrix_units().back()->name) == "portable");
    for (const auto* unit : sim::matrix_units()) {
        std::printf("%s\n", unit->name);
        conversions_are_exact(*unit);
        units_multiply_exactly(*unit);
    }
    refusals();
    puts_copy_and_leave_the_rest();
    what_is_late_reaches_no_other_rank();
    waits_count_what_this_call_adds();
    return test::finish();
}
