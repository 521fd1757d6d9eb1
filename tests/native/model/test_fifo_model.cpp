// The command FIFO's two rings in every interleaving: nothing is lost, torn, doubled or out of a producer's
// order, nobody sleeps for ever, and who gives up leaves no hole. Every order of every operation is seen to
// be needed, or said why it stays.
#include <cstring>

#include "backends/transport/fifo.hpp"
#include "backends/transport/fifo_device.hpp"
#include "backends/transport/sleep.hpp"
#include "tests/native/model/protocol.hpp"
#include "tests/native/nics/pair.hpp"
#include "tests/native/transport/faulty_fifo.hpp"

using namespace mkernel;
using mkernel::testing::Fault;
using mkernel::testing::numbered;
using mkernel::transport::WaitResult;

namespace {

constexpr std::uint64_t kTimeout = 1'000'000'000;

bool same(const transport::PutCommand& one, const transport::PutCommand& other) {
    return one.local_offset == other.local_offset && one.remote_offset == other.remote_offset &&
           one.bytes == other.bytes && one.region == other.region && one.value == other.value;
}

// One slot after another as they come, each whole and in its producer's order.
class Drained {
  public:
    explicit Drained(std::uint32_t producers) : next_(producers) {}

    void take(const transport::PutCommand& got) {
        model::require(got.region < next_.size(), "a command of nobody");
        model::require(same(got, numbered(got.region, next_[got.region])),
                       "a command is torn, lost, doubled or out of order");
        ++next_[got.region];
    }
    [[nodiscard]] std::uint64_t count() const {
        std::uint64_t sum = 0;
        for (const std::uint64_t each : next_) sum += each;
        return sum;
    }

  private:
    std::vector<std::uint64_t> next_;
};

void name_slots(const transport::FifoRingMemory& ring) {
    for (std::uint64_t i = 0; i < ring.capacity; ++i) model::name(&ring.slots[i].commit, "commit");
    model::name(ring.tail, "tail");
}

// Threads in place of a grid's, and the drainer.
class DeviceRing : public model::Scenario {
  public:
    DeviceRing(std::uint64_t slots, std::uint32_t producers, std::uint32_t each, Fault fault)
        : fifo_(slots), producers_(producers), each_(each), fault_(fault), drained_(producers) {
        const transport::FifoRingMemory& ring = fifo_.handle().device.memory;
        tickets_ = transport::FifoTickets::of(ring);
        device_ = {ring.slots, ring.tail, &tickets_, ring.capacity};
        name_slots(ring);
        model::name(&tickets_.free, "free");
        model::name(&tickets_.head, "head");
        model::name(&tickets_.reading, "reading");
    }

    std::vector<std::function<void()>> threads() override {
        std::vector<std::function<void()>> all;
        for (std::uint32_t producer = 0; producer < producers_; ++producer) {
            all.emplace_back([this, producer] {
                for (std::uint32_t n = 0; n < each_; ++n) {
                    const auto ended =
                        testing::push(device_, numbered(producer, n), {&abort_, kTimeout}, fault_);
                    model::require(ended == WaitResult::ok, "a push gave up");
                }
            });
        }
        all.emplace_back([this] {
            transport::PutCommand got;
            while (drained_.count() < producers_ * each_) {
                while (!fifo_.device().pop(got)) transport::yield();
                drained_.take(got);
                fifo_.device().release();
            }
        });
        return all;
    }
    std::string wrong() override {
        return fifo_.depth() == 0 ? "" : "something is left in the ring";
    }

  private:
    transport::Fifo fifo_;
    transport::FifoTickets tickets_;
    transport::FifoDevice device_;
    std::uint32_t abort_ = 0;
    std::uint32_t producers_, each_;
    Fault fault_;
    Drained drained_;
};

// Two threads, one slot, nobody drains: one gives up at the deadline, which ends the pushes.
class GivingUp : public model::Scenario {
  public:
    explicit GivingUp(Fault fault) : fifo_(1), fault_(fault) {
        const transport::FifoRingMemory& ring = fifo_.handle().device.memory;
        tickets_ = transport::FifoTickets::of(ring);
        device_ = {ring.slots, ring.tail, &tickets_, ring.capacity};
        model::name(&tickets_.stopped, "stopped");
    }

    std::vector<std::function<void()>> threads() override {
        const auto push = [this] {
            ++ended_[static_cast<int>(
                testing::push(device_, numbered(0, 0), {&abort_, kTimeout}, fault_))];
        };
        return {push, push, push};
    }
    std::string wrong() override {
        if (tickets_.head != 1) return "a ticket was taken that nobody publishes";
        if (ended_[0] != 1 || ended_[1] != 1 || ended_[2] != 1) return "not one each: " + counts();
        return fifo_.device().published() == 1 ? "" : "the one command is not there";
    }

  private:
    [[nodiscard]] std::string counts() const {
        return std::to_string(ended_[0]) + " ok, " + std::to_string(ended_[1]) + " aborted, " +
               std::to_string(ended_[2]) + " timed out";
    }

    transport::Fifo fifo_;
    transport::FifoTickets tickets_;
    transport::FifoDevice device_;
    std::uint32_t abort_ = 0;
    Fault fault_;
    int ended_[3]{};
};

// Threads of the host, and a drainer that sleeps as the proxy does.
class HostRing : public model::Scenario {
  public:
    HostRing(std::uint64_t slots, std::uint32_t producers, std::uint32_t each)
        : memory_(transport::SignalPad::bytes(1), false),
          pad_(transport::SignalPad::format(memory_.data(), 1)),
          fifo_(slots),
          producers_(producers),
          each_(each),
          drained_(producers) {
        const transport::FifoHandle& ring = fifo_.handle();
        name_slots(fifo_.host().memory());
        model::name(ring.head, "head");
        model::name(ring.waiting, "waiting");
        model::name(ring.sleeping, "sleeping");
    }

    std::vector<std::function<void()>> threads() override {
        std::vector<std::function<void()>> all;
        for (std::uint32_t producer = 0; producer < producers_; ++producer) {
            all.emplace_back([this, producer] {
                for (std::uint32_t n = 0; n < each_; ++n) {
                    const auto ended = fifo_.handle().push(
                        numbered(producer, n), pad_, transport::monotonic_ns() + kTimeout, {});
                    model::require(ended == WaitResult::ok, "a push gave up");
                }
            });
        }
        all.emplace_back([this] {
            transport::PutCommand got;
            while (drained_.count() < producers_ * each_) {
                if (fifo_.host().pop(got)) {
                    drained_.take(got);
                    fifo_.release();
                    continue;
                }
                fifo_.prepare_sleep();
                if (!fifo_.ready()) model::poll(fifo_.wake_fd());
                fifo_.end_sleep();
            }
        });
        return all;
    }
    std::string wrong() override {
        return fifo_.depth() == 0 ? "" : "something is left in the ring";
    }

  private:
    nics::testing::Memory memory_;
    transport::SignalPad pad_;
    transport::Fifo fifo_;
    std::uint32_t producers_, each_;
    Drained drained_;
};

using model::scenario;

model::Settings few() {
    model::Settings settings;
    settings.deviations = 2;
    return settings;
}
model::Settings late() {
    model::Settings settings = few();
    settings.deadline = true;
    return settings;
}

TEST(a_devices_ring) {
    CHECK(model::holds("2 producers of 2, 1 slot", scenario<DeviceRing>(1u, 2u, 2u, Fault::none),
                       few())
              .wrong.empty());
    CHECK(model::holds("2 producers of 2, 2 slots", scenario<DeviceRing>(2u, 2u, 2u, Fault::none))
              .wrong.empty());
    CHECK(model::holds("3 producers of 1, 2 slots", scenario<DeviceRing>(2u, 3u, 1u, Fault::none))
              .wrong.empty());
    CHECK(model::holds("nobody drains", scenario<GivingUp>(Fault::none), late()).wrong.empty());
}

TEST(a_devices_ring_with_faults) {
    const auto broken = [](Fault fault) {
        return !model::holds("a fault", scenario<DeviceRing>(1u, 2u, 2u, fault)).wrong.empty();
    };
    CHECK(broken(Fault::commit_before_payload));
    CHECK(broken(Fault::tail_not_waited_for));
    CHECK(!model::holds("a fault", scenario<GivingUp>(Fault::ticket_before_room), late())
               .wrong.empty());
}

TEST(a_devices_orders) {
    const auto surprises = model::orders_count(
        {{scenario<DeviceRing>(2u, 2u, 2u, Fault::none), {}},
         {scenario<DeviceRing>(2u, 3u, 1u, Fault::none), {}},
         {scenario<GivingUp>(Fault::none), late()}},
        {{"load of commit, seq_cst as acquire", "the host's ring needs it, which is the same code"},
         {"store of tail, seq_cst as release", "likewise"},
         {"change of stopped, acquire as relaxed", "who sees it does nothing more"}});
    CHECK(surprises.empty());
}

TEST(a_hosts_ring) {
    CHECK(model::holds("2 producers of 2, 1 slot", scenario<HostRing>(1u, 2u, 2u), few())
              .wrong.empty());
    CHECK(model::holds("1 producer of 3, 2 slots", scenario<HostRing>(2u, 1u, 3u)).wrong.empty());
}

TEST(a_hosts_orders) {
    const auto surprises = model::orders_count(
        {{scenario<HostRing>(1u, 2u, 1u), {}}, {scenario<HostRing>(1u, 1u, 2u), {}}},
        {{"load of head, acquire as relaxed", "a count, for whether to wake and for statistics"},
         {"change of sleeping, acq_rel as acquire", "it says who rings, and orders nothing"},
         {"change of sleeping, acq_rel as release", "likewise"},
         {"change of sleeping, acq_rel as relaxed", "likewise"},
         {"load of tail, seq_cst as acquire", "the futex compares with what is newest"},
         {"load of tail, seq_cst as relaxed", "likewise, and the push that follows acquires"},
         {"store of tail, seq_cst as release", "likewise: a sleeper has been counted before"}});
    CHECK(surprises.empty());
}

}  // namespace

int main(int argc, char** argv) {
    return nics::testing::run(argc, argv);
}
