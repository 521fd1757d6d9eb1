// The soft device's engine has a microsecond for a message on a fast rail: it allocates nothing for one.
#include <atomic>
#include <cstdlib>
#include <new>

#include "setting.hpp"
#include "srd_end.hpp"

using namespace mkernel::nics;
using namespace mkernel::nics::testing;
using mkernel::transport::monotonic_ns;

namespace {

std::atomic<std::uint64_t> allocations{0};  // of all threads and libraries of this process

void* allocate(std::size_t bytes, std::size_t alignment) {
    allocations.fetch_add(1, std::memory_order_relaxed);
    return std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
}

}  // namespace

void* operator new(std::size_t bytes) {
    void* made = allocate(bytes, alignof(std::max_align_t));
    if (made == nullptr) throw std::bad_alloc();
    return made;
}
void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept {
    return allocate(bytes, alignof(std::max_align_t));
}
void* operator new(std::size_t bytes, std::align_val_t alignment) {
    void* made = allocate(bytes, static_cast<std::size_t>(alignment));
    if (made == nullptr) throw std::bad_alloc();
    return made;
}
void operator delete(void* made) noexcept {
    std::free(made);
}
void operator delete(void* made, std::size_t) noexcept {
    std::free(made);
}
void operator delete(void* made, std::align_val_t) noexcept {
    std::free(made);
}
void operator delete(void* made, std::size_t, std::align_val_t) noexcept {
    std::free(made);
}

namespace {

// So many messages from one end to the other, a part of a queue at a time; the bytes lie where the peer's engine can
// map them.
void carry(srd::Pair& p, std::uint32_t messages) {
    constexpr std::uint32_t kBytes = 2000;
    std::uint32_t posted = 0;
    std::uint32_t sent = 0;
    std::uint32_t arrived = 0;
    const std::uint64_t deadline = monotonic_ns() + 30'000'000'000u;
    while ((sent < messages || arrived < messages) && monotonic_ns() < deadline) {
        while (posted < messages && posted - sent < 64) {
            CHECK(p.write(posted, kBytes, posted) == 0);
            ++posted;
        }
        ibv_wc wc{};
        while (ibv_poll_cq(p.a.cq, 1, &wc) > 0) sent += wc.status == IBV_WC_SUCCESS ? 1 : 0;
        while (ibv_poll_cq(p.b.cq, 1, &wc) > 0) {
            CHECK(wc.status == IBV_WC_SUCCESS && p.b.receive(0) == 0);
            ++arrived;
        }
    }
    CHECK(sent == messages && arrived == messages);
}

TEST(an_srd_message_takes_no_memory) {
    constexpr std::uint32_t kMessages = 3000;
    srd::Pair p;
    for (std::uint32_t i = 0; i < 512; ++i) CHECK(p.b.receive(0) == 0);
    carry(p, kMessages);  // what grows with the traffic has its size
    const std::uint64_t before = allocations.load();
    CHECK(before > 0);
    carry(p, kMessages);
    const std::uint64_t made = allocations.load() - before;
    std::printf("%llu allocations for %u messages\n", static_cast<unsigned long long>(made),
                kMessages);
    CHECK(made < kMessages / 20);
}

}  // namespace

int main(int argc, char** argv) {
    return testing::run_on_library(argc, argv);
}
