// A verbs device whose network does what the explorer chooses: of what is on its way, any of the things that
// may happen next. The executable that links it exports the verbs functions, so that the backends load it as they
// load any other library.
//
// What a queue pair promises is all that holds. RC: its messages take effect in order, and so do their
// completions at the sender. SRD: in any order, both. Queue pairs know nothing of each other. A message
// takes effect as a whole: its bytes are at the receiver, then its receive completes; the
// sender's completion comes later. Data is plain: a block of it that the network reads or writes while somebody
// else does, unordered, is a race. Completion queues order: who polled a completion comes after what it tells.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

namespace mkernel::model {

// Data is looked at in blocks of so many bytes.
inline constexpr std::uint64_t kBlock = 64;

void reads_bytes(std::uint64_t address, std::uint64_t bytes);
void writes_bytes(std::uint64_t address, std::uint64_t bytes);

// What is wrong with the network.
enum class Broken {
    nothing,
    rc_reorders,      // messages of an RC queue pair overtake each other
    completes_early,  // the sender hears of a message before it has taken effect
    arrives_early,    // the receiver hears of a message before its bytes are there
    loses_the_last,   // a group's parts say that there is one message fewer
    holds_one_back,   // the first message waits for later ones to be seen, complete before that
};

// One at a time; of one execution. Two ranks share it.
class Network {
  public:
    Network(std::uint64_t most_bytes, Broken broken);
    ~Network();
    Network(const Network&) = delete;
    Network& operator=(const Network&) = delete;

    // Data of the ranks; other memory, as of credits, is the backend's own.
    void data(std::uint64_t address, std::uint64_t bytes) { data_.emplace_back(address, bytes); }
    // Lets one thing happen. False: nothing is on its way.
    bool step();

    struct Pair;
    struct Queue;
    struct Message {
        std::uint64_t wr_id = 0, from = 0, to = 0, bytes = 0;
        std::uint32_t peer_qp = 0, immediate = 0;
        bool told = false, signaled = false;
        bool placed = false;     // its bytes are there
        bool delivered = false;  // and its receive is complete
        bool completed = false;  // at the sender
    };

    const std::uint64_t most_bytes;  // of a message
    const Broken broken;
    std::vector<std::unique_ptr<Pair>> pairs;  // by number - 1

  private:
    void place(const Message& message);
    void deliver(Message& message);
    [[nodiscard]] bool held_back(const Pair& pair, std::uint64_t number) const;

    std::vector<std::pair<std::uint64_t, std::uint64_t>> data_;
};

}  // namespace mkernel::model
