// The signature of a call, which differs between calls of an op: everything that its checks and its plan see
// of the arguments.
#pragma once

#include <cstdint>
#include <vector>

namespace mkernel::calls {

// Two signatures are equal exactly when their words are.
class Signature {
  public:
    Signature() { words_.reserve(kUsual); }
    void add(std::uint64_t word) { words_.push_back(word); }
    template <typename T>
    void add(T* object) {
        add(static_cast<std::uint64_t>(reinterpret_cast<std::uintptr_t>(object)));
    }

    [[nodiscard]] const std::vector<std::uint64_t>& words() const { return words_; }

    bool operator==(const Signature& other) const { return words_ == other.words_; }
    [[nodiscard]] std::size_t hash() const {
        std::uint64_t hash = words_.size();
        for (const std::uint64_t word : words_) {
            hash = (hash ^ word) * 0x9e3779b97f4a7c15;
            hash ^= hash >> 32;
        }
        return hash;
    }

  private:
    static constexpr std::size_t kUsual = 96;

    std::vector<std::uint64_t> words_;
};

struct SignatureHash {
    std::size_t operator()(const Signature& signature) const { return signature.hash(); }
};

}  // namespace mkernel::calls
