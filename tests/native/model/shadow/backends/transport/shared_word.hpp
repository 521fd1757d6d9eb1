// In place of the transport's: its words are the model's.
#pragma once

#include <atomic>
#include <cstdint>
#include <optional>

#include "tests/native/model/explore.hpp"

namespace mkernel::model {

inline Order order_of(std::memory_order order) {
    switch (order) {
        case std::memory_order_relaxed:
            return Order::relaxed;
        case std::memory_order_acquire:
        case std::memory_order_consume:
            return Order::acquire;
        case std::memory_order_release:
            return Order::release;
        case std::memory_order_acq_rel:
            return Order::acq_rel;
        default:
            return Order::seq_cst;
    }
}

// What the transport uses of std::atomic_ref.
template <class T>
class Ref {
  public:
    explicit Ref(T& word) : word_(&word) {}

    T load(std::memory_order order = std::memory_order_seq_cst) const {
        return static_cast<T>(model::load(word_, sizeof(T), order_of(order)));
    }
    void store(T value, std::memory_order order = std::memory_order_seq_cst) const {
        model::store(word_, sizeof(T), value, order_of(order));
    }
    T exchange(T value, std::memory_order order = std::memory_order_seq_cst) const {
        return change(order, [=](std::uint64_t) { return value; });
    }
    T fetch_add(T by, std::memory_order order = std::memory_order_seq_cst) const {
        return change(order, [=](std::uint64_t was) { return static_cast<T>(was + by); });
    }
    T fetch_or(T bits, std::memory_order order = std::memory_order_seq_cst) const {
        return change(order, [=](std::uint64_t was) { return static_cast<T>(was | bits); });
    }
    T fetch_sub(T by, std::memory_order order = std::memory_order_seq_cst) const {
        return change(order, [=](std::uint64_t was) { return static_cast<T>(was - by); });
    }
    bool compare_exchange_strong(T& expected, T desired,
                                 std::memory_order order = std::memory_order_seq_cst) const {
        const T wanted = expected;
        expected =
            static_cast<T>(model::change(word_, sizeof(T), order_of(order), [=](std::uint64_t was) {
                return static_cast<T>(was) == wanted ? std::optional<std::uint64_t>(desired)
                                                     : std::nullopt;
            }));
        return expected == wanted;
    }
    bool compare_exchange_weak(T& expected, T desired,
                               std::memory_order order = std::memory_order_seq_cst) const {
        return compare_exchange_strong(expected, desired, order);
    }

  private:
    template <class Next>
    T change(std::memory_order order, Next next) const {
        return static_cast<T>(model::change(
            word_, sizeof(T), order_of(order),
            [=](std::uint64_t was) { return std::optional<std::uint64_t>(next(was)); }));
    }

    T* word_;
};

}  // namespace mkernel::model

namespace mkernel::transport {

template <class T>
model::Ref<T> shared(T& word) {
    return model::Ref<T>(word);
}

template <class T>
model::Ref<T> shared(const T& word) {
    return model::Ref<T>(const_cast<T&>(word));
}

}  // namespace mkernel::transport
