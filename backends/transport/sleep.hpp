// Waits of the host's threads for each other without using the CPU: a futex on a word, an eventfd.
//
// Neither orders memory, and a sleeper may wake without cause: a sleeper looks again at what it waits for,
// before and after.
#pragma once

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <climits>
#include <cstdint>

namespace mkernel::transport {

// The threads that may wake a sleeper: those of this process, or of any that maps the word.
enum class Reach { process, host };

// Sleeps until `wake_all` of the word, or for `most_ns`, below a second. Returns at once where the word is
// not `seen`.
inline void sleep_while(const std::uint32_t* word, std::uint32_t seen, std::uint64_t most_ns,
                        Reach reach) {
    const timespec most{0, static_cast<long>(most_ns)};
    const int operation = reach == Reach::process ? FUTEX_WAIT_PRIVATE : FUTEX_WAIT;
    syscall(SYS_futex, word, operation, seen, &most, nullptr, 0);
}

inline void wake_all(const std::uint32_t* word, Reach reach) {
    const int operation = reach == Reach::process ? FUTEX_WAKE_PRIVATE : FUTEX_WAKE;
    syscall(SYS_futex, word, operation, INT_MAX, nullptr, nullptr, 0);
}

// Returns the half of a word that a futex lies on.
inline const std::uint32_t* low_half(const std::uint64_t* word) {
    return reinterpret_cast<const std::uint32_t*>(word);
}

// Makes an eventfd readable.
inline void ring(int eventfd) {
    const std::uint64_t one = 1;
    // A write fails only when the counter is full: then it is readable already.
    [[maybe_unused]] const ssize_t written = ::write(eventfd, &one, sizeof(one));
}

// Makes a non-blocking eventfd unreadable.
inline void hush(int eventfd) {
    std::uint64_t count = 0;
    [[maybe_unused]] const ssize_t got = ::read(eventfd, &count, sizeof(count));
}

// Yields between two looks at a word that others change soon.
inline void yield() {
    sched_yield();
}

}  // namespace mkernel::transport
