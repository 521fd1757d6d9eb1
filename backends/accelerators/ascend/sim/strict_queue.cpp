#include "backends/accelerators/ascend/sim/strict_queue.hpp"

#include <utility>

namespace mkernel::ascend::sim {

using isa::Pipe;

namespace {

std::size_t flag_of(Pipe source, Pipe waiting, std::uint32_t event) {
    return (static_cast<std::size_t>(source) * isa::kPipes + static_cast<std::size_t>(waiting)) *
               isa::kEvents +
           event;
}

}  // namespace

void Queue::push(Pipe pipe, Effect effect) {
    if (!defers_) {
        effect();
        return;
    }
    add(pipe, {.kind = Item::Kind::effect, .effect = std::move(effect)});
}

void Queue::set(Pipe source, Pipe waiting, std::uint32_t event) {
    if (defers_) add(source, {.kind = Item::Kind::set, .flag = flag_of(source, waiting, event)});
}

void Queue::wait(Pipe source, Pipe waiting, std::uint32_t event) {
    if (!defers_) return;
    add(waiting, {.kind = Item::Kind::wait, .flag = flag_of(source, waiting, event)});
    const auto& scalar = pipes_[static_cast<std::size_t>(Pipe::S)];
    while (!scalar.empty() && step()) {
    }
}

void Queue::add(Pipe pipe, Item item) {
    pipes_[static_cast<std::size_t>(pipe)].push_back(std::move(item));
    ++pending_;
    // One instruction is issued, and up to a few run, so that some pile up and others do not.
    while ((pending_ > kMost || random_() % 2 == 0) && step()) {
    }
}

bool Queue::ready(const std::deque<Item>& pipe) const {
    return !pipe.empty() &&
           (pipe.front().kind != Item::Kind::wait || flags_[pipe.front().flag] != 0);
}

bool Queue::step() {
    const std::size_t first = random_() % pipes_.size();
    for (std::size_t i = 0; i < pipes_.size(); ++i) {
        auto& pipe = pipes_[(first + i) % pipes_.size()];
        if (!ready(pipe)) continue;
        Item item = std::move(pipe.front());
        pipe.pop_front();
        --pending_;
        if (item.kind == Item::Kind::effect) {
            item.effect();
        } else {
            flags_[item.flag] += item.kind == Item::Kind::set ? 1 : -1;
        }
        return true;
    }
    return false;
}

void Queue::drain() {
    while (step()) {
    }
}

void Queue::drain(Pipe pipe) {
    while (!pipes_[static_cast<std::size_t>(pipe)].empty() && step()) {
    }
}

}  // namespace mkernel::ascend::sim
