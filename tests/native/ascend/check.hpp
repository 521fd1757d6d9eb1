// A few lines of test harness: CHECK keeps going, `finish` says how many failed.
#pragma once

#include <cstdio>
#include <string>

namespace mkernel::ascend::test {

inline int g_failures = 0;

inline void check(bool ok, const char* what, const char* file, int line) {
    if (ok) return;
    ++g_failures;
    std::fprintf(stderr, "%s:%d: failed: %s\n", file, line, what);
}

// The message of the exception of type E that `body` throws; empty if it throws none.
template <class E, class Body>
std::string thrown(Body body) {
    try {
        body();
    } catch (const E& error) {
        return error.what();
    }
    return {};
}

// Whether a message holds a part of its text; prints both if not.
inline bool has(const std::string& text, const std::string& part) {
    if (text.find(part) != std::string::npos) return true;
    std::fprintf(stderr, "  wanted: %s\n  got: %s\n", part.c_str(), text.c_str());
    return false;
}

inline int finish() {
    std::printf("%s\n", g_failures == 0 ? "ok" : "FAILED");
    return g_failures == 0 ? 0 : 1;
}

}  // namespace mkernel::ascend::test

#define CHECK(...) ::mkernel::ascend::test::check((__VA_ARGS__), #__VA_ARGS__, __FILE__, __LINE__)
