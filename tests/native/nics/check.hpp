// The tests' macros and their registry. A failed check prints where and what, and the test goes on.
#pragma once

#include <cstdio>
#include <cstring>
#include <exception>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "tests/native/sanitized.hpp"

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

// Every test of this executable, in the order of their definitions.
inline std::vector<Test>& tests() {
    static std::vector<Test> all;
    return all;
}

struct Registered {
    Registered(const char* name, std::function<void()> body) {
        tests().emplace_back(name, std::move(body));
    }
};

#define TEST(name)                                                             \
    void name();                                                               \
    const ::mkernel::nics::testing::Registered name##_registered(#name, name); \
    void name()

// The library of verbs that a test opens.
inline std::string library;

// Runs all, or those whose name contains `only`. Returns the process's exit code.
inline int run(const char* only) {
    int ran = 0;
    for (const auto& [name, body] : tests()) {
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

// The main function of tests that take [NAME], or LIBRARY [NAME].
inline int run(int argc, char** argv) {
    return run(argc > 1 ? argv[1] : nullptr);
}
inline int run_on_library(int argc, char** argv) {
    if (argc < 2) return std::printf("usage: %s LIBRARY [TEST]\n", argv[0]), 2;
    library = argv[1];
    return run(argc > 2 ? argv[2] : nullptr);
}

}  // namespace mkernel::nics::testing
