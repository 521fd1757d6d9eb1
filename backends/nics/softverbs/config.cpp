#include "backends/nics/softverbs/config.hpp"

#include <cerrno>
#include <cstdlib>
#include <limits>

namespace mkernel::nics::softverbs {
namespace {

// The variable's value, or `otherwise` where it is unset, not a number, or out of range.
std::uint64_t number(const char* name, std::uint64_t otherwise, std::uint64_t least,
                     std::uint64_t most) {
    const char* text = std::getenv(name);
    if (text == nullptr || *text == '\0') return otherwise;
    char* end = nullptr;
    errno = 0;
    const unsigned long long value = std::strtoull(text, &end, 10);
    if (errno != 0 || *end != '\0' || value < least || value > most) return otherwise;
    return value;
}

}  // namespace

Config Config::from_environment() {
    constexpr auto kAny = std::numeric_limits<std::uint64_t>::max();
    Config config;
    config.latency_ns = number("MKERNEL_SOFTVERBS_LATENCY_NS", 0, 0, 1'000'000'000);
    config.drop_after = number("MKERNEL_SOFTVERBS_DROP_AFTER", 0, 0, kAny);
    config.max_message = static_cast<std::uint32_t>(
        number("MKERNEL_SOFTVERBS_MAX_MESSAGE", config.max_message, 1, 1u << 30));
    config.scramble = static_cast<std::uint8_t>(number("MKERNEL_SOFTVERBS_SCRAMBLE", 0, 0, 255));
    config.seed = number("MKERNEL_SOFTVERBS_SEED", config.seed, 0, kAny);
    config.reorder = number("MKERNEL_SOFTVERBS_REORDER", 1, 0, 1) != 0;
    config.duplicates = static_cast<std::uint32_t>(
        number("MKERNEL_SOFTVERBS_DUPLICATES", config.duplicates, 0, 100));
    config.srd_timeout_ms =
        number("MKERNEL_SOFTVERBS_SRD_TIMEOUT_MS", config.srd_timeout_ms, 1, 600'000);
    config.rdma_write = number("MKERNEL_SOFTVERBS_RDMA_WRITE", 1, 0, 1) != 0;
    config.by_reference = number("MKERNEL_SOFTVERBS_BY_REFERENCE", 1, 0, 1) != 0;
    return config;
}

}  // namespace mkernel::nics::softverbs
