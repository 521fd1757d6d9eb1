// Whether a test was built under a sanitizer. Sanitizers are there for what threads and memory do: what host
// and device cost, and mutations, are judged without them.
#pragma once

namespace mkernel {
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
inline constexpr bool kSanitized = true;
#else
inline constexpr bool kSanitized = false;
#endif
}  // namespace mkernel
