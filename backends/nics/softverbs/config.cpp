#include "backends/nics/softverbs/config.hpp"

#include <array>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>

#include <unistd.h>

namespace mkernel::nics::softverbs {
namespace {

[[noreturn]] void refuse(const char* name, std::string_view value, const char* wanted) {
    const std::string message =
        std::string(name) + "='" + std::string(value) + "' is not " + wanted;
    std::fprintf(stderr, "softverbs: %s\n", message.c_str());
    throw std::system_error(EINVAL, std::generic_category(), message);
}

// The environment's variables; it remembers the names that were read, so that it can refuse unknown ones: a
// misspelt fault that is not planted lets a test pass.
class Environment {
  public:
    // Returns the variable's value, or `otherwise` where it is unset or empty.
    std::uint64_t number(const char* name, std::uint64_t otherwise, std::uint64_t least,
                         std::uint64_t most) {
        const char* text = this->text(name);
        if (text == nullptr) return otherwise;
        const std::string_view given(text);
        std::uint64_t value = 0;
        const auto [end, error] = std::from_chars(given.data(), given.data() + given.size(), value);
        if (error != std::errc() || end != given.data() + given.size() || value < least ||
            value > most) {
            const std::string wanted =
                "a number from " + std::to_string(least) + " to " + std::to_string(most);
            refuse(name, given, wanted.c_str());
        }
        return value;
    }

    bool flag(const char* name, bool otherwise) {
        return number(name, otherwise ? 1 : 0, 0, 1) != 0;
    }

    std::vector<Fault> faults(const char* name);

    // Throws where a variable of the device is set that was not read.
    void refuse_others() const {
        for (char** entry = environ; *entry != nullptr; ++entry) {
            const std::string_view assignment(*entry);
            const std::string_view name = assignment.substr(0, assignment.find('='));
            if (!name.starts_with(kPrefix) || read_.contains(name)) continue;
            std::string wanted = "read by the device; it reads";
            for (const std::string_view known : read_) wanted.append(" ").append(known);
            refuse(std::string(name).c_str(), assignment.substr(name.size() + 1), wanted.c_str());
        }
    }

  private:
    static constexpr std::string_view kPrefix = "MKERNEL_SOFTVERBS_";

    // Returns null where the variable is unset or empty.
    const char* text(const char* name) {
        read_.insert(name);
        const char* found = std::getenv(name);
        return found == nullptr || *found == '\0' ? nullptr : found;
    }

    std::set<std::string_view> read_;
};

constexpr std::array<std::pair<std::string_view, FaultKind>, 6> kKinds = {{
    {"drop", FaultKind::drop},
    {"cut", FaultKind::cut},
    {"stall", FaultKind::stall},
    {"qp-error", FaultKind::qp_error},
    {"cq-overflow", FaultKind::cq_overflow},
    {"registration", FaultKind::registration},
}};

// Takes a number from the front of the text.
std::optional<std::uint64_t> take_number(std::string_view& text) {
    std::uint64_t value = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (error != std::errc()) return std::nullopt;
    text.remove_prefix(static_cast<std::size_t>(end - text.data()));
    return value;
}

bool take_prefix(std::string_view& text, std::string_view prefix) {
    if (!text.starts_with(prefix)) return false;
    text.remove_prefix(prefix.size());
    return true;
}

std::optional<std::uint64_t> take_milliseconds(std::string_view& text) {
    const auto value = take_number(text);
    if (!value || *value > 600'000 || !take_prefix(text, "ms")) return std::nullopt;
    return *value * 1'000'000;
}

std::optional<Fault> parse_fault(std::string_view text) {
    Fault fault;
    const auto at = text.find('@');
    bool known = false;
    for (const auto& [name, kind] : kKinds) {
        if (text.substr(0, at) != name) continue;
        fault.kind = kind;
        known = true;
    }
    if (!known || at == std::string_view::npos) return std::nullopt;
    text.remove_prefix(at + 1);
    std::string_view timed = text;
    if (const auto time = take_milliseconds(timed); time) {
        fault.timed = true;
        fault.after = *time;
        text = timed;
    } else if (const auto count = take_number(text); count) {
        fault.after = *count;
    } else {
        return std::nullopt;
    }
    const bool lasting = fault.kind == FaultKind::cut || fault.kind == FaultKind::stall;
    if (lasting && take_prefix(text, "+")) {
        const auto time = take_milliseconds(text);
        if (!time || *time == 0) return std::nullopt;
        fault.for_ns = *time;
    }
    return text.empty() ? std::optional(fault) : std::nullopt;
}

std::vector<Fault> Environment::faults(const char* name) {
    std::vector<Fault> found;
    const char* text = this->text(name);
    if (text == nullptr) return found;
    std::string_view left(text);
    while (true) {
        const auto comma = left.find(',');
        const auto fault = parse_fault(left.substr(0, comma));
        if (!fault) {
            refuse(name, left.substr(0, comma),
                   "KIND@COUNT or KIND@TIMEms; cut and stall may end in +TIMEms. Kinds: drop, cut, "
                   "stall, qp-error, cq-overflow, registration");
        }
        found.push_back(*fault);
        if (comma == std::string_view::npos) return found;
        left.remove_prefix(comma + 1);
    }
}

}  // namespace

Config Config::from_environment() {
    constexpr auto kAny = std::numeric_limits<std::uint64_t>::max();
    constexpr std::uint64_t kSecond = 1'000'000'000;
    Config c;
    Environment env;
    c.latency_ns = env.number("MKERNEL_SOFTVERBS_LATENCY_NS", c.latency_ns, 0, kSecond);
    c.jitter_ns = env.number("MKERNEL_SOFTVERBS_JITTER_NS", c.jitter_ns, 0, kSecond);
    c.bandwidth_mbps =
        env.number("MKERNEL_SOFTVERBS_BANDWIDTH_MBPS", c.bandwidth_mbps, 0, 10'000'000);
    c.seed = env.number("MKERNEL_SOFTVERBS_SEED", c.seed, 0, kAny);
    c.faults = env.faults("MKERNEL_SOFTVERBS_FAULTS");
    c.max_message = static_cast<std::uint32_t>(
        env.number("MKERNEL_SOFTVERBS_MAX_MESSAGE", c.max_message, 1, 1u << 30));
    c.scramble = static_cast<std::uint8_t>(env.number("MKERNEL_SOFTVERBS_SCRAMBLE", 0, 0, 255));
    c.unflushed = env.flag("MKERNEL_SOFTVERBS_UNFLUSHED", c.unflushed);
    c.late_ns = env.number("MKERNEL_SOFTVERBS_LATE_NS", c.late_ns, 0, 60 * kSecond);
    c.by_reference = env.flag("MKERNEL_SOFTVERBS_BY_REFERENCE", c.by_reference);
    c.relaxed = env.flag("MKERNEL_SOFTVERBS_RELAXED_ORDERING", c.relaxed);
    c.reorder = env.flag("MKERNEL_SOFTVERBS_REORDER", c.reorder);
    c.hold_ns = env.number("MKERNEL_SOFTVERBS_HOLD_NS", c.hold_ns, 1, kSecond);
    c.duplicates = static_cast<std::uint32_t>(
        env.number("MKERNEL_SOFTVERBS_DUPLICATES", c.duplicates, 0, 100));
    c.srd_timeout_ms = env.number("MKERNEL_SOFTVERBS_SRD_TIMEOUT_MS", c.srd_timeout_ms, 1, 600'000);
    c.srd_queue = static_cast<std::uint32_t>(
        env.number("MKERNEL_SOFTVERBS_SRD_QUEUE", c.srd_queue, 0, 1u << 16));
    c.rdma_write = env.flag("MKERNEL_SOFTVERBS_RDMA_WRITE", c.rdma_write);
    c.rnr_retry = env.flag("MKERNEL_SOFTVERBS_RNR_RETRY", c.rnr_retry);
    env.refuse_others();
    return c;
}

}  // namespace mkernel::nics::softverbs
