// The tests' one macro and registry. A failed check prints where and what, and the test goes on.
#pragma once

#include <cstdio>
#include <cstring>
#include <exception>
#include <functional>
#include <string>
#include <utility>
#include <vector>

namespace mkernel::nics::testing {

inline int failures = 0;

inline void check(bool held, const char* what, const char* file, int line) {
    if (held) return;
    ++failures;
    std::printf("%s:%d: check failed: %s\n", file, line, what);
}

#define CHECK(condition) \
    ::mkernel::nics::testing::check((condition), #condition, __FILE__, __LINE__)

using Test = std::pair<const char*, std::function<void()>>;

// Runs all, or those whose name contains argv[first]. Returns the process's exit code.
inline int run(const std::vector<Test>& tests, const char* only = nullptr) {
    int ran = 0;
    for (const auto& [name, body] : tests) {
        if (only != nullptr && std::strstr(name, only) == nullptr) continue;
        const int before = failures;
        try {
            body();
        } catch (const std::exception& error) {
            ++failures;
            std::printf("%s threw: %s\n", name, error.what());
        }
        std::printf("%s %s\n", failures == before ? "ok  " : "FAIL", name);
        std::fflush(stdout);
        ++ran;
    }
    if (ran == 0) std::printf("no test of that name\n");
    return failures == 0 && ran != 0 ? 0 : 1;
}

}  // namespace mkernel::nics::testing
