// Two ranks for native tests and benchmarks: each a session on the software device with one
// registered memfd buffer and a signal pad.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <vector>

#include "backends/nics/cx7/rc_nic.hpp"
#include "backends/nics/efa/srd_nic.hpp"
#include "backends/nics/session.hpp"
#include "backends/nics/verbs/loader.hpp"
#include "backends/transport/signal_pad.hpp"

namespace mkernel::nics::testing {

// Memory that a rank registers, and what its owner sees in it.
class Region {
  public:
    virtual ~Region() = default;
    Region(const Region&) = delete;
    Region& operator=(const Region&) = delete;
    [[nodiscard]] const LocalMemory& local() const { return local_; }
    [[nodiscard]] std::byte* data() const { return data_; }
    [[nodiscard]] std::size_t bytes() const { return local_.bytes; }
    [[nodiscard]] std::uint64_t address() const { return local_.address; }

  protected:
    Region() = default;
    LocalMemory local_{};
    std::byte* data_ = nullptr;
};

// Memory of the host.
class Memory final : public Region {
  public:
    explicit Memory(std::size_t bytes, bool shared = true) {
        if (shared) {
            fd_ = ::memfd_create("test", MFD_CLOEXEC);
            if (fd_ < 0 || ::ftruncate(fd_, static_cast<off_t>(bytes)) != 0) throw std::bad_alloc();
        }
        void* data = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                            shared ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS, fd_, 0);
        if (data == MAP_FAILED) throw std::bad_alloc();
        data_ = static_cast<std::byte*>(data);
        local_ = {reinterpret_cast<std::uint64_t>(data), bytes};
    }
    ~Memory() override {
        ::munmap(data_, bytes());
        if (fd_ >= 0) ::close(fd_);
    }

  private:
    int fd_ = -1;
};

inline constexpr std::uint32_t kSignals = 1024;
inline constexpr std::array<std::uint32_t, 1> kOneLane{0};  // on the first rail

// How a rank's NIC is opened.
struct Setup {
    verbs::Options options{};
    std::vector<verbs::PortName> ports{{"soft0"}};
    std::uint32_t qps = 1;  // on each port
    bool srd = false;
    std::uint64_t slots = 1024;

    // The rail of each lane to a peer.
    [[nodiscard]] std::vector<std::uint32_t> rails() const {
        std::vector<std::uint32_t> of;
        for (std::uint32_t i = 0; i < ports.size() * qps; ++i) {
            of.push_back(i % static_cast<std::uint32_t>(ports.size()));
        }
        return of;
    }
    [[nodiscard]] std::unique_ptr<Nic> nic(const std::string& library) const {
        const auto verbs = verbs::Verbs::load(library);
        if (srd) return std::make_unique<efa::SrdNic>(verbs, library, ports, options);
        return std::make_unique<cx7::RcNic>(verbs, ports, options);
    }
};

// One rank. Order: endpoints and key → exchange → join, or connect and start.
class Rank {
    std::unique_ptr<Region> region_;  // outlives the session

  public:
    Rank(const std::string& library, std::uint32_t peer, std::unique_ptr<Region> region,
         const Setup& setup = {})
        : region_(std::move(region)),
          memory(*region_),
          pad_memory_(transport::SignalPad::bytes(kSignals)),
          pad(transport::SignalPad::format(pad_memory_.data(), kSignals)),
          session(setup.nic(library), setup.slots),
          peer_(peer) {
        endpoints = session.nic().add_peer(peer, setup.rails());
        key = session.nic().register_memory(0, memory.local());
    }
    Rank(const std::string& library, std::uint32_t peer, std::size_t bytes, const Setup& setup = {})
        : Rank(library, peer, std::make_unique<Memory>(bytes), setup) {}
    void connect(const std::vector<Endpoint>& remote, const RemoteKey& remote_key) {
        session.nic().connect(peer_, remote);
        session.nic().bind(0, peer_, remote_key);
    }
    void join(const std::vector<Endpoint>& remote, const RemoteKey& remote_key) {
        connect(remote, remote_key);
        start();
    }
    void start() { session.start(reinterpret_cast<std::uint64_t>(pad_memory_.data()), {}); }
    transport::WaitResult put(std::uint64_t bytes, std::uint32_t signal, std::uint32_t value = 1,
                              std::uint64_t local = 0, std::uint64_t remote = 0) {
        transport::PutCommand c;
        c.local_offset = local;
        c.remote_offset = remote;
        c.bytes = bytes;
        c.peer = peer_;
        c.signal = signal;
        c.value = value;
        return session.put(c, 30);
    }
    // Asks for an own signal once all puts so far are complete.
    transport::WaitResult complete(std::uint32_t signal, std::uint32_t value = 1) {
        transport::PutCommand c;
        c.peer = transport::PutCommand::kSelf;
        c.signal = signal;
        c.value = value;
        return session.put(c, 30);
    }
    bool wait(std::uint32_t signal, std::uint64_t value, double seconds = 30) {
        return pad.wait(signal, value,
                        transport::monotonic_ns() + static_cast<std::uint64_t>(seconds * 1e9),
                        {}) == transport::WaitResult::ok;
    }

    Region& memory;

  private:
    Memory pad_memory_;

  public:
    transport::SignalPad pad;
    Session session;
    std::vector<Endpoint> endpoints;
    RemoteKey key;

  private:
    std::uint32_t peer_;
};

// Two joined ranks of this process.
struct Couple {
    template <class Memories>  // a size or a Region each
    Couple(const std::string& library, Memories of_one, Memories of_other, const Setup& here,
           const Setup& there)
        : one(library, 1, std::move(of_one), here), other(library, 0, std::move(of_other), there) {
        one.join(other.endpoints, other.key);
        other.join(one.endpoints, one.key);
    }
    Couple(const std::string& library, std::size_t bytes, const Setup& here, const Setup& there)
        : Couple(library, bytes, bytes, here, there) {}
    Couple(const std::string& library, std::size_t bytes, const Setup& both)
        : Couple(library, bytes, both, both) {}
    Rank one;
    Rank other;
};

}  // namespace mkernel::nics::testing
