// Memory of every kind through the software device, of both personalities. Every byte of device memory goes
// through a mover, here one over host memory that nobody else can touch (fake_mover.hpp).
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "backends/nics/verbs/devices.hpp"
#include "check.hpp"
#include "fake_mover.hpp"
#include "hello.hpp"
#include "pair.hpp"
#include "setting.hpp"
#include "threads.hpp"

using namespace mkernel;
using namespace mkernel::nics;
using mkernel::nics::testing::FakeMover;
using mkernel::nics::testing::library;
using mkernel::nics::testing::Setting;
using mkernel::transport::monotonic_ns;
using mkernel::transport::PutCommand;
using mkernel::transport::WaitResult;

namespace {

constexpr std::uint64_t kKiB = 1 << 10;
constexpr std::uint64_t kMiB = 1 << 20;

using testing::Rank;

// Where a rank's region lies.
struct Kind {
    bool device = true;
    bool flush = false;
};

std::unique_ptr<testing::Region> region(std::size_t bytes, Kind kind) {
    if (kind.device) return std::make_unique<testing::DeviceRegion>(bytes, kind.flush);
    return std::make_unique<testing::Memory>(bytes);
}

struct Couple : testing::Couple {
    Couple(std::size_t bytes, const testing::Setup& setup, Kind here = {}, Kind there = {})
        : testing::Couple(library, region(bytes, here), region(bytes, there), setup, setup) {}
};

bool put(Rank& from, std::uint64_t bytes, std::uint64_t local, std::uint64_t remote,
         std::uint32_t signal) {
    return from.put(bytes, signal, 1, local, remote) == WaitResult::ok;
}

testing::Setup setup(bool srd, std::uint32_t qps = 1) {
    testing::Setup made;
    made.srd = srd;
    made.qps = qps;
    made.options.stripe_bytes = 64 * kKiB;
    return made;
}

// The mover as it is at the beginning of a test.
FakeMover& fresh(std::uint64_t delay_ns = 0) {
    FakeMover::set(library);
    FakeMover& mover = FakeMover::get();
    mover.delay_ns = delay_ns;
    mover.room = UINT64_MAX;
    mover.copy_error = 0;
    mover.copies = mover.batches = mover.bytes = mover.flushes = mover.refused = 0;
    return mover;
}

// `bytes` of `from`, all XORed with `mask`, into `to`: by words, for the sake of sanitizers.
void copy_masked(std::byte* to, const std::byte* from, std::uint64_t bytes, std::byte mask) {
    const std::uint64_t words = 0x0101010101010101u * static_cast<std::uint64_t>(mask);
    std::uint64_t at = 0;
    for (; at + 8 <= bytes; at += 8) {
        std::uint64_t word = 0;
        std::memcpy(&word, from + at, 8);
        word ^= words;
        std::memcpy(to + at, &word, 8);
    }
    for (; at < bytes; ++at) to[at] = from[at] ^ mask;
}

void fill(std::byte* to, std::uint64_t bytes, std::uint64_t seed) {
    constexpr std::uint64_t kOdd = 0x9e3779b97f4a7c15;  // no two words are alike
    std::uint64_t at = 0;
    for (; at + 8 <= bytes; at += 8) {
        const std::uint64_t word = (at + 8 + (seed << 40)) * kOdd;
        std::memcpy(to + at, &word, 8);
    }
    for (; at < bytes; ++at) to[at] = static_cast<std::byte>((at + seed) * kOdd >> 32);
}
void fill(Rank& rank, std::uint64_t seed) {
    fill(rank.memory.data(), rank.memory.bytes(), seed);
}

// Puts of these sizes, misaligned at both ends: each is all there when its signal is seen, and nothing
// beside it was written.
void arrive(Couple& pair, const std::vector<std::uint64_t>& sizes, std::byte mask = {}) {
    constexpr std::uint64_t kGuard = 64;
    constexpr std::byte kUntouched{0xee};
    std::uint64_t step = 0;
    for (const std::uint64_t size : sizes) {
        ++step;
        const std::uint64_t local = step * 3 % 61;
        const std::uint64_t remote = kGuard + step * 7 % 59;
        const std::byte* source = pair.one.memory.data() + local;
        std::byte* target = pair.other.memory.data() + remote;
        fill(pair.one.memory.data() + local, size, step);
        std::vector<std::byte> wanted(kGuard + size + kGuard, kUntouched);
        copy_masked(wanted.data() + kGuard, source, size, mask);
        std::fill_n(target - kGuard, wanted.size(), kUntouched);
        copy_masked(target, source, size, ~mask);  // differs from what comes in every bit
        CHECK(put(pair.one, size, local, remote, 5));
        CHECK(pair.other.wait(5, step));
        const bool right = std::memcmp(target - kGuard, wanted.data(), wanted.size()) == 0;
        if (!right) std::printf("  %llu bytes are wrong\n", static_cast<unsigned long long>(size));
        CHECK(right);
    }
    CHECK(pair.one.session.flush(10));
    CHECK(!pair.one.session.failure() && !pair.other.session.failure());
}

const std::vector<std::uint64_t> kSizes{
    0,     1,     2,          3,       4,       5,    6,        7,           8,    9,
    63,    64,    65,         255,     1000,    1023, 1024,     1025,        4096, 65535,
    65536, 65537, 256 * kKiB, 262'143, 262'145, kMiB, kMiB + 1, 3 * kMiB + 5};

TEST(every_size_arrives_between_every_two_kinds_of_memory) {
    for (const bool srd : {false, true}) {
        for (const std::uint32_t qps : {1u, 4u}) {
            for (const auto& [here, there] :
                 {std::pair{false, false}, {true, true}, {false, true}, {true, false}}) {
                FakeMover& mover = fresh(20'000);
                Couple pair(3 * kMiB + 256, setup(srd, qps), {here}, {there});
                arrive(pair, kSizes);
                CHECK(here || there ? mover.copies > kSizes.size() : mover.copies == 0);
            }
            CHECK(FakeMover::get().attached() == 0);
        }
    }
}

TEST(puts_of_several_messages_arrive) {
    const Setting longest("MKERNEL_SOFTVERBS_MAX_MESSAGE", "1000");
    for (const bool srd : {false, true}) {
        Couple pair(kMiB, setup(srd), {false}, {false});
        arrive(pair, {999, 1000, 1001, 1999, 2000, 2001, 2999, 3000, 3001, 3999, 4000, 4001});
    }
}

// A driver may map memory only when its kernels have ended, and kernels may wait for what a put brings.
TEST(memory_of_peers_is_mapped_before_anything_is_sent) {
    for (const bool srd : {false, true}) {
        FakeMover& mover = fresh();
        const Couple pair(kMiB, setup(srd));
        const std::uint64_t late = monotonic_ns() + 30'000'000'000;
        while (mover.attached() < 2 && monotonic_ns() < late) std::this_thread::yield();
        CHECK(mover.attached() == 2);
    }
}

TEST(a_large_put_arrives) {
    constexpr std::size_t kLarge = (kSanitized ? 16 : 256) * kMiB;
    for (const bool srd : {false, true}) {
        fresh();
        Couple pair(kLarge + 256, setup(srd, srd ? 2 : 1));
        arrive(pair, {kLarge});
    }
}

TEST(device_memory_is_taken_where_there_is_a_mover) {
    const auto dmabuf = [] { return setup(false).nic(library)->capabilities().dmabuf; };
    FakeMover::set(library, false);
    CHECK(!dmabuf());
    FakeMover& mover = fresh();
    CHECK(dmabuf());
    const auto nic = setup(false).nic(library);
    const std::uint64_t address = mover.allocate(kMiB);
    nic->register_memory(1, {address, kMiB, true, 0, 0});
    CHECK(nic->registrations().dmabuf == 1);
    const auto refused = [&](const LocalMemory& memory) {
        try {
            nic->register_memory(2, memory);
        } catch (const SetupError&) {
            return true;
        }
        return false;
    };
    const testing::Memory host(4096);
    CHECK(refused({address, kMiB + 1, true, 0, 0}));     // beyond the allocation
    CHECK(refused({host.address(), 4096, true, 0, 0}));  // none of the device's
    CHECK(refused({address, kMiB, true, -1, 0}));        // exported by nobody, and no peermem
    nic->deregister_memory(1);
    testing::Setup peermem = setup(false);
    peermem.options.peermem = true;
    const auto other = peermem.nic(library);
    other->register_memory(1, {address, kMiB, true, -1, 0});
    CHECK(other->registrations().peermem == 1);
    other->deregister_memory(1);
    mover.free(address);
}

// Many puts at once in both directions, while copies take their time: each signal promises its bytes, and
// small copies go in few batches.
TEST(signals_come_after_their_bytes_and_copies_in_batches) {
    constexpr std::uint32_t kPuts = 256;
    constexpr std::uint64_t kPiece = 8 * kKiB;
    for (const bool srd : {false, true}) {
        for (const std::uint32_t qps : {1u, 2u}) {
            FakeMover& mover = fresh(300'000);
            Couple pair(2 * kPuts * kPiece, setup(srd, qps));
            fill(pair.one, 1);
            fill(pair.other, 2);
            const auto run = [&](Rank& from, Rank& to, std::uint64_t half) {
                for (std::uint32_t i = 0; i < kPuts; ++i) {
                    const std::uint64_t at = half + i * kPiece;
                    CHECK(put(from, kPiece - 1, at, at + 1, i));
                }
                for (std::uint32_t i = 0; i < kPuts; ++i) {
                    const std::uint64_t at = half + i * kPiece;
                    CHECK(to.wait(i, 1));
                    CHECK(std::memcmp(from.memory.data() + at, to.memory.data() + at + 1,
                                      kPiece - 1) == 0);
                }
            };
            std::thread back([&] { run(pair.other, pair.one, kPuts * kPiece); });
            run(pair.one, pair.other, 0);
            back.join();
            CHECK(mover.copies >= 2 * kPuts);
            CHECK(mover.batches < mover.copies / 2);
        }
    }
}

// Whether all is copied in half the time that an emulated link of so many Mb/s needs to bring it; signals come
// as the link brings the bytes, in any case.
bool copied_ahead(bool srd, int mbps) {
    constexpr std::uint32_t kPuts = 64;
    constexpr std::uint64_t kPiece = 64 * kKiB;
    const Setting rate("MKERNEL_SOFTVERBS_BANDWIDTH_MBPS", std::to_string(mbps));
    const Setting latency("MKERNEL_SOFTVERBS_LATENCY_NS", "1000000");
    const Setting twice("MKERNEL_SOFTVERBS_DUPLICATES", "0");
    const std::uint64_t link_ns = kPiece * 8 * 1000 / static_cast<std::uint64_t>(mbps);  // of one
    FakeMover& mover = fresh();
    Couple pair(kPuts * kPiece, setup(srd));
    fill(pair.one, 6);
    const std::uint64_t start = monotonic_ns();
    const auto place = [](std::uint32_t i) { return i * 37 % kPuts; };
    for (std::uint32_t i = 0; i < kPuts; ++i) {
        const std::uint64_t at = place(i) * kPiece;
        CHECK(put(pair.one, kPiece, at, at, place(i)));
    }
    while (mover.copies < kPuts && monotonic_ns() - start < kPuts * link_ns / 2) {
        std::this_thread::yield();
    }
    const bool ahead = mover.copies == kPuts;
    for (std::uint32_t i = 0; i < kPuts; ++i) {
        const std::uint64_t at = place(i) * kPiece;
        CHECK(pair.other.wait(place(i), 1));
        CHECK(monotonic_ns() - start >= (i + 1) * link_ns);
        CHECK(std::memcmp(pair.one.memory.data() + at, pair.other.memory.data() + at, kPiece) == 0);
    }
    CHECK(mover.copies == kPuts);
    CHECK(pair.one.session.flush(10));
    return ahead;
}

// What is on an emulated link is copied before it arrives, so that copies have time. Copies that wait for
// their bytes to arrive are never ahead, however slow the link is; a busy machine's are on a slower one.
TEST(copies_go_ahead_of_arrivals_and_signals_do_not) {
    for (const bool srd : {false, true}) {
        CHECK(copied_ahead(srd, 100) || copied_ahead(srd, 25) || copied_ahead(srd, 6));
    }
}

// A completion of the sender comes after the last read of the source, also of what is placed twice or held
// back: what arrives is what the source held when it was put.
void source_may_be_written_again(const testing::Setup& both, bool device) {
    const Setting twice("MKERNEL_SOFTVERBS_DUPLICATES", "100");
    fresh(50'000);
    constexpr std::uint64_t kPiece = 3000;
    const std::uint32_t rounds = device ? 100 : 300;
    Couple pair((rounds + 1) * kPiece, both, {device}, {device});
    for (std::uint32_t round = 1; round <= rounds; ++round) {
        std::memset(pair.one.memory.data(), static_cast<int>(round), kPiece);
        CHECK(put(pair.one, kPiece, 0, round * kPiece, 1));
        CHECK(pair.one.complete(9, 2) == WaitResult::ok);
        CHECK(pair.one.wait(9, 2 * std::uint64_t{round}));
    }
    CHECK(pair.other.wait(1, rounds));
    std::uint64_t wrong = 0;
    for (std::uint64_t i = kPiece; i < (rounds + 1) * kPiece; ++i) {
        wrong += pair.other.memory.data()[i] != static_cast<std::byte>(i / kPiece) ? 1 : 0;
    }
    CHECK(wrong == 0);
    CHECK(pair.one.session.statistics().puts == rounds);
}

TEST(a_source_may_be_written_again_after_a_completion) {
    for (const bool srd : {false, true}) {
        source_may_be_written_again(setup(srd), true);
        for (const std::uint32_t qps : {1u, 4u})
            source_may_be_written_again(setup(srd, qps), false);
    }
}

TEST(later_puts_overwrite_earlier_ones_on_an_ordered_queue_pair) {
    fresh(10'000);
    Couple pair(64 * kKiB, setup(false));
    constexpr std::uint64_t kPuts = 500;
    fill(pair.one, 4);
    for (std::uint64_t i = 0; i < kPuts; ++i) CHECK(put(pair.one, 2000, i * 64, 0, 1));
    CHECK(pair.other.wait(1, kPuts));
    CHECK(std::memcmp(pair.one.memory.data() + (kPuts - 1) * 64, pair.other.memory.data(), 2000) ==
          0);
}

TEST(a_mover_without_room_is_back_pressure) {
    for (const bool srd : {false, true}) {
        FakeMover& mover = fresh(20'000);
        mover.room = 300 * kKiB;
        Couple pair(8 * kMiB + 256, setup(srd));
        arrive(pair, {8 * kMiB, 5 * kMiB + 1});
        CHECK(mover.refused > 0);
    }
}

// What was carried shows it, wherever it lies.
TEST(bytes_are_scrambled_in_device_memory_too) {
    for (const bool srd : {false, true}) {
        for (const auto& [here, there] : {std::pair{true, true}, {false, true}, {true, false}}) {
            const Setting scramble("MKERNEL_SOFTVERBS_SCRAMBLE", "90");
            fresh();
            Couple pair(kMiB + 256, setup(srd), {here}, {there});
            arrive(pair, {1, 1000, 65537, kMiB}, std::byte{90});
        }
    }
}

TEST(relaxed_writes_land_before_their_immediate) {
    const Setting relaxed("MKERNEL_SOFTVERBS_RELAXED_ORDERING", "1");
    const Setting small("MKERNEL_SOFTVERBS_MAX_MESSAGE", "5000");
    fresh(20'000);
    Couple pair(kMiB + 256, setup(false));
    arrive(pair, {1, 4999, 5001, 65537, kMiB});
}

// The device holds back what it wrote until it is flushed: with the accelerator's flush, every signal
// comes after its bytes; without, the bytes are not there.
TEST(a_flush_that_is_left_out_is_seen) {
    for (const bool srd : {false, true}) {
        for (const bool flushes : {true, false}) {
            const Setting unflushed("MKERNEL_SOFTVERBS_UNFLUSHED", "1");
            FakeMover& mover = fresh();
            Couple pair(kMiB, setup(srd, 2), {}, {.flush = flushes});
            fill(pair.one, 6);
            for (std::uint64_t i = 1; i <= 50; ++i) {
                const std::uint64_t size = i * 4000;
                std::memset(pair.other.memory.data(), 0xee, kMiB);
                CHECK(put(pair.one, size, i, 2 * i, 1));
                CHECK(pair.other.wait(1, i));
                const bool there = std::memcmp(pair.one.memory.data() + i,
                                               pair.other.memory.data() + 2 * i, size) == 0;
                CHECK(there == flushes);
            }
            CHECK((mover.flushes > 0) == flushes);
        }
    }
}

// Whether they are equal now, while the device may still write: a race that the fault plants, and that
// ThreadSanitizer therefore does not look at.
[[gnu::no_sanitize("thread")]] bool equal_now(const std::byte* one, const std::byte* other,
                                              std::size_t bytes) {
    const volatile std::byte* seen = other;
    for (std::size_t i = 0; i < bytes; ++i) {
        if (seen[i] != one[i]) return false;
    }
    return true;
}

// What a device tells of too early is not there with its signal; on an honest one it is.
TEST(bytes_that_come_behind_their_signal_are_seen) {
    for (const bool srd : {false, true}) {
        for (const bool late : {false, true}) {
            const Setting lateness("MKERNEL_SOFTVERBS_LATE_NS", late ? "200000000" : "0");
            fresh();
            Couple pair(kMiB, setup(srd));
            fill(pair.one, 6);
            std::memset(pair.other.memory.data(), 0xee, kMiB);
            const auto there = [&] {
                return equal_now(pair.one.memory.data(), pair.other.memory.data(), 70'000);
            };
            CHECK(put(pair.one, 70'000, 0, 0, 1));
            CHECK(pair.other.wait(1, 1));
            CHECK(there() != late);
            const std::uint64_t limit = transport::monotonic_ns() + 20'000'000'000;
            while (!there() && transport::monotonic_ns() < limit) sched_yield();
            CHECK(there());
        }
    }
}

TEST(a_failed_flush_is_a_failure_of_the_session) {
    static transport::DeviceFlush broken{[](void*) { return -EIO; }, nullptr};
    fresh();
    Couple pair(kMiB, setup(false));
    const std::uint64_t more = FakeMover::get().allocate(4096);
    pair.other.session.nic().register_memory(1, {more, 4096, true, 0, 0, &broken});
    CHECK(put(pair.one, 100, 0, 0, 1));
    CHECK(!pair.other.wait(1, 1));
    CHECK(pair.other.pad.load(1) == 0);  // what its bytes were to come with is not told
    CHECK(pair.other.session.failure() && pair.other.session.failure()->status == "FLUSH_FAILED");
    pair.other.session.close();
    FakeMover::get().free(more);
}

TEST(a_mover_that_fails_is_a_failure_of_the_receiver) {
    for (const bool srd : {false, true}) {
        FakeMover& mover = fresh();
        Couple pair(kMiB, setup(srd));
        CHECK(put(pair.one, 100, 0, 0, 1));
        CHECK(pair.other.wait(1, 1));
        mover.copy_error = -EIO;
        CHECK(put(pair.one, 100, 0, 0, 1));
        CHECK(!pair.other.wait(1, 2));
        const auto failure = pair.other.session.failure();
        CHECK(failure && failure->status == "DEVICE_FATAL");
        mover.copy_error = 0;
    }
}

// A card wakes in no time: an engine whose device's memory is an accelerator's is awake before the put, where
// somebody polls for what it may bring. Who polls for host memory wakes nobody.
TEST(an_engine_is_awake_for_who_polls_on) {
    struct Nobody : SignalSink {
        bool raise(std::uint32_t, std::uint32_t, std::uint64_t) override { return false; }
    } nobody;
    constexpr double kAwakeS = 0.02;  // of a core, which no engine that sleeps is charged
    for (const bool srd : {false, true}) {
        for (const bool device : {false, true}) {
            fresh();
            Rank rank(library, 1, region(kKiB, {device}), setup(srd));
            const testing::NamedThread engine("softverbs");
            std::this_thread::sleep_for(std::chrono::milliseconds(50));
            const double before = engine.cpu_s();
            const std::uint64_t end = monotonic_ns() + (device ? 10'000'000'000 : 200'000'000);
            while (monotonic_ns() < end && engine.cpu_s() < before + kAwakeS) {
                for (int i = 0; i < 1000; ++i) rank.session.nic().poll(nobody);
            }
            CHECK((engine.cpu_s() >= before + kAwakeS) == device);
        }
    }
}

// Regions come and go beside traffic; the peer lets go of device memory too.
void regions_come_and_go(bool srd, bool device) {
    FakeMover& mover = fresh(5'000);
    testing::Setup both = setup(srd, 2);
    both.slots = 64;  // what a round waits behind
    Couple pair(kMiB, both, {device}, {device});
    std::atomic<bool> over{false};
    std::uint64_t puts = 0;
    std::thread producer([&] {
        for (; !over; ++puts) CHECK(put(pair.one, puts % 9000, 0, 0, 2));
    });
    Session& mine = pair.one.session;
    Session& theirs = pair.other.session;
    PutCommand c;
    c.bytes = kMiB;
    c.peer = 1;
    c.region = 1;
    c.signal = 3;
    c.value = 1;
    for (std::uint32_t round = 1; round <= 20; ++round) {
        const auto here = region(kMiB, {device});
        const auto there = region(kMiB, {device});
        mine.nic().register_memory(1, here->local());
        mine.nic().bind(1, 1, theirs.nic().register_memory(1, there->local()));
        std::memset(here->data(), static_cast<int>(round), kMiB);
        CHECK(mine.put(c, 10) == WaitResult::ok);
        CHECK(pair.other.wait(3, round));
        CHECK(there->data()[0] == static_cast<std::byte>(round));
        CHECK(std::memcmp(there->data(), there->data() + 1, kMiB - 1) == 0);
        for (Session* session : {&mine, &theirs}) {
            const auto count = [&] {
                const Registrations all = session->nic().registrations();
                return device ? all.dmabuf : all.host;
            };
            CHECK(count() == 2);
            CHECK(session->deregister(1, 10));
            CHECK(count() == 1);
        }
    }
    over = true;
    producer.join();
    CHECK(pair.other.wait(2, puts));
    const std::uint64_t late = monotonic_ns() + 10'000'000'000;
    while (mover.attached() > 2 && monotonic_ns() < late) std::this_thread::yield();
    CHECK(mover.attached() <= 2);  // what the two regions 0 need
    CHECK(!mine.failure() && !theirs.failure());
    // It is gone: a put of it is refused, not written anywhere.
    CHECK(mine.put(c, 10) == WaitResult::ok);
    CHECK(!mine.flush(10));
    CHECK(mine.failure() && mine.failure()->status == "INVALID_PUT");
}

TEST(regions_come_and_go_beside_traffic) {
    for (const bool srd : {false, true}) {
        for (const bool device : {false, true}) regions_come_and_go(srd, device);
    }
    CHECK(FakeMover::get().attached() == 0);
}

// The same between processes. The child puts and is put to, then the parent kills it: what it leaves is
// an error of the path, not of the mover.
TEST(two_processes_reach_each_others_memory) {
    for (const bool srd : {false, true}) {
        fresh(10'000);
        int to_child[2];
        int to_parent[2];
        CHECK(::pipe(to_child) == 0 && ::pipe(to_parent) == 0);
        const pid_t child = ::fork();
        const bool parent = child != 0;
        const int out = parent ? to_child[1] : to_parent[1];
        const int in = parent ? to_parent[0] : to_child[0];
        constexpr std::uint64_t kPiece = 100'000;
        Rank me(library, parent ? 1 : 0, region(40 * kPiece, {}), setup(srd));
        fill(me, parent ? 1 : 2);
        testing::say(out, me.endpoints[0], me.key);
        const testing::Hello peer = testing::hear(in);
        me.join({peer.endpoint}, peer.key);
        char ready = 1;  // both are connected
        CHECK(::write(out, &ready, 1) == 1 && ::read(in, &ready, 1) == 1);
        for (std::uint64_t i = 0; i < 20; ++i) {
            put(me, kPiece - i, i * kPiece, (20 + i) * kPiece, 1);
        }
        bool right = me.wait(1, 20);
        const std::vector<std::byte> came(me.memory.data() + 20 * kPiece,
                                          me.memory.data() + 40 * kPiece);
        right = me.session.flush(10) && right;  // the peer has read what is written now
        fill(me, parent ? 2 : 1);               // what the peer had
        for (std::uint64_t i = 0; i < 20; ++i) {
            right = right && std::memcmp(me.memory.data() + i * kPiece, came.data() + i * kPiece,
                                         kPiece - i) == 0;
        }
        if (!parent) {
            me.session.flush(10);
            put(me, 0, 0, 0, right ? 2 : 3);
            me.session.flush(10);
            ::pause();
            ::_exit(0);
        }
        if (const auto why = me.session.failure()) std::printf("  %s\n", why->message.c_str());
        CHECK(right);
        CHECK(me.wait(2, 1));
        ::kill(child, SIGKILL);
        ::waitpid(child, nullptr, 0);
        CHECK(put(me, kPiece, 0, 0, 1));
        CHECK(!me.wait(4, 1));
        const auto failure = me.session.failure();
        CHECK(failure &&
              (failure->status == "RETRY_EXC_ERR" || failure->status == "RESP_TIMEOUT_ERR"));
        for (const int fd : {to_child[0], to_child[1], to_parent[0], to_parent[1]}) ::close(fd);
    }
}

}  // namespace

int main(int argc, char** argv) {
    return testing::run_on_library(argc, argv);
}
