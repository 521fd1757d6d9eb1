// The device's access to accelerators' memory, which it cannot touch itself: a mover that the accelerator
// registered copies it (transport/mover.hpp).
//
// A peer's region is mapped here before anything is read from it. Its owner *offers* it: a datagram with the
// region's token and a descriptor, to a socket of the peer's port in the abstract namespace, sent before the
// first packet that names the token. So the peer neither sends a request nor waits.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "backends/nics/softverbs/port.hpp"
#include "backends/transport/mover.hpp"

namespace mkernel::nics::softverbs {

// Returns the mover of this process; null where no accelerator has one.
transport::Mover* mover();

// An own region of device memory, for peers to map.
struct DeviceBacking {
    std::uint64_t token = 0;
    transport::ExportedMemory exported;
    std::shared_ptr<const Fd> fd;
};

// Copies under way, in batches that are numbered from 1. Used under the control lock.
class DeviceCopies {
  public:
    using Batch = std::uint64_t;

    // Adds a copy to the batch that is being filled. `due`: when it must be submitted at the latest; 0: at
    // once. Returns nothing where there is no room now, or it failed.
    std::optional<Batch> queue(std::uint64_t to, std::uint64_t from, std::uint64_t bytes,
                               std::uint64_t due = 0);
    // Submits the batch, where it has copies that are due. While batches are under way, small ones wait:
    // copies that come meanwhile go with them, so that the time a copy takes to start is paid less often.
    void submit(std::uint64_t now);
    // Polls; returns whether a batch ended meanwhile.
    bool poll(std::uint64_t now);
    [[nodiscard]] bool done(Batch batch) const { return batch <= done_; }
    // Returns the bytes of the batch that is being filled.
    [[nodiscard]] std::uint64_t waiting() const { return filled_; }
    [[nodiscard]] bool idle() const { return in_flight_.empty() && filled_ == 0; }
    // Waits for all of them. Returns false where it failed.
    bool drain();
    // Copies at once: waits for all earlier copies, too.
    bool copy(std::uint64_t to, std::uint64_t from, std::uint64_t bytes);
    // Returns true once the mover reported an error, or a copy did not end in time: nothing ends any more.
    [[nodiscard]] bool failed() const { return failed_; }

  private:
    void hand_over(std::uint64_t now);
    struct InFlight {
        std::uint64_t ticket;
        std::uint64_t since;
        std::uint64_t bytes;
    };
    std::deque<InFlight> in_flight_;  // batches done_ + 1, ...
    Batch done_ = 0;
    std::uint64_t bytes_ = 0;         // of all that is in flight
    std::uint64_t filled_ = 0;        // bytes of the batch that is being filled
    std::uint64_t due_ = UINT64_MAX;  // of its copies, the first
    bool failed_ = false;
};

// A port's end of the datagrams that offer device memory, and the offers that peers made here.
class Offers {
  public:
    // Throws std::system_error.
    explicit Offers(const PortAddress& own);

    struct Message {
        static constexpr std::uint64_t kMagic = 0x6d6b5f6f66666572;
        std::uint64_t magic = kMagic;
        std::uint64_t from = 0;  // cookie of the sender's port
        std::uint64_t token = 0;
        std::uint64_t length = 0;  // bytes of the region; 0: it is withdrawn
        transport::ExportedMemory memory;
    };

    // Takes the datagrams that have come. `copies` may still use memory that is withdrawn.
    void receive(DeviceCopies& copies);
    // Returns where bytes of a peer's region are for the mover; 0: the peer did not offer them.
    [[nodiscard]] std::uint64_t find(std::uint64_t cookie, std::uint64_t token,
                                     std::uint64_t offset, std::uint64_t length) const;
    // Unmaps everything that a port offered.
    void forget(std::uint64_t cookie, DeviceCopies& copies);
    void forget_all(DeviceCopies& copies);

    // Sends to the port of that cookie. Returns false where it cannot now.
    bool send(std::uint64_t cookie, const Message& message, int fd) const;

  private:
    struct Attached {
        std::uint64_t address = 0;
        std::uint64_t length = 0;
    };
    using Key = std::pair<std::uint64_t, std::uint64_t>;  // cookie, token
    void take(const Message& message, const Fd& fd, DeviceCopies& copies);

    Fd socket_;
    std::map<Key, Attached> attached_;
};

// The copies of one ring or flow that were queued before their packets' arrival; packets are named by their
// places in it, in bytes ever written.
class EarlyCopies {
  public:
    // Returns where to look on, when the packets before `tail` were taken.
    std::uint64_t look_on(std::uint64_t tail) { return looked_ = std::max(looked_, tail); }
    // Adds the copy of the packet at the place last looked at.
    void add(DeviceCopies::Batch batch) { copies_.push_back({looked_, batch}); }
    // Notes that the packet there, of so many bytes, has been looked at.
    void looked(std::uint64_t bytes) { looked_ += bytes; }
    // Returns true where the packet at `tail`, the next one to be taken, has a copy.
    [[nodiscard]] bool has(std::uint64_t tail) const {
        return !copies_.empty() && copies_.front().at == tail;
    }
    // Takes the copy of the packet at `tail`, which is taken now; 0: it has none.
    DeviceCopies::Batch take(std::uint64_t tail) {
        if (!has(tail)) return 0;
        const DeviceCopies::Batch batch = copies_.front().batch;
        copies_.pop_front();
        return batch;
    }
    void clear() { *this = {}; }

  private:
    struct Copy {
        std::uint64_t at;
        DeviceCopies::Batch batch;
    };
    std::deque<Copy> copies_;
    std::uint64_t looked_ = 0;
};

}  // namespace mkernel::nics::softverbs
