// A word of memory that several threads or processes of a host share, as an atomic. All host code of the
// transport goes through here, so that a model of its protocols can do so too (tests/native/model).
#pragma once

#include <atomic>

namespace mkernel::transport {

template <class T>
std::atomic_ref<T> shared(T& word) {
    return std::atomic_ref<T>(word);
}

// atomic_ref takes no const object before C++26, also for loads.
template <class T>
std::atomic_ref<T> shared(const T& word) {
    return std::atomic_ref<T>(const_cast<T&>(word));
}

}  // namespace mkernel::transport
