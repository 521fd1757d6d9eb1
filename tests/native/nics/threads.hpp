// What the threads of this process cost, by their names.
#pragma once

#include <time.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <string>

namespace mkernel::nics::testing {

// A thread of this process.
class NamedThread {
  public:
    // The only one of that name.
    explicit NamedThread(const std::string& name) {
        for (const auto& entry : std::filesystem::directory_iterator("/proc/self/task")) {
            std::string comm;
            std::getline(std::ifstream(entry.path() / "comm") >> std::ws, comm);
            if (comm == name) folder_ = entry.path();
        }
        if (folder_.empty()) throw std::runtime_error("no thread is called " + name);
    }

    // What it was charged since it began, in seconds of a core.
    [[nodiscard]] double cpu_s() const {
        const auto id = static_cast<clockid_t>(std::stol(folder_.filename().string()));
        constexpr clockid_t kThreadSchedulerClock = 6;  // see clock_getcpuclockid(3) and the kernel
        timespec now{};
        if (clock_gettime(~id << 3 | kThreadSchedulerClock, &now) != 0) {
            throw std::runtime_error("the thread has no clock");
        }
        return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
    }

    // How often it went to sleep.
    [[nodiscard]] std::uint64_t sleeps() const {
        std::ifstream status(folder_ / "status");
        for (std::string word; status >> word;) {
            std::uint64_t count = 0;
            if (word == "voluntary_ctxt_switches:" && status >> count) return count;
        }
        throw std::runtime_error("the kernel does not count context switches");
    }

  private:
    std::filesystem::path folder_;
};

}  // namespace mkernel::nics::testing
