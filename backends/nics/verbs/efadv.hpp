// What the SRD backend needs beyond plain verbs: EFA's direct verbs, and the calls on address
// handles and extended queue pairs. Older headers lack the newer constants, so they are here; what
// a device really has is asked at run time.
#pragma once

#include <infiniband/efadv.h>

#include <memory>
#include <string>

#include "backends/nics/verbs/loader.hpp"

namespace mkernel::nics::verbs {

// Bits of efadv_device_attr::device_caps.
inline constexpr std::uint32_t kEfaRnrRetry = 1u << 1;
inline constexpr std::uint32_t kEfaRdmaWrite = 1u << 3;
inline constexpr std::uint32_t kEfaUnsolicitedWriteRecv = 1u << 4;  // not used: see srd_nic.hpp

class Efadv {
  public:
    // `library`: where efadv_* are; libibverbs itself is `verbs`. Throws LoadError.
    static std::shared_ptr<const Efadv> load(const Verbs& verbs, const std::string& library);
    ~Efadv();
    Efadv(const Efadv&) = delete;
    Efadv& operator=(const Efadv&) = delete;

    decltype(&::efadv_create_qp_ex) create_qp_ex = nullptr;
    decltype(&::efadv_query_device) query_device = nullptr;
    decltype(&::ibv_create_ah) create_ah = nullptr;
    decltype(&::ibv_destroy_ah) destroy_ah = nullptr;
    decltype(&::ibv_qp_to_qp_ex) qp_to_qp_ex = nullptr;

  private:
    Efadv() = default;
    void* verbs_handle_ = nullptr;
    void* handle_ = nullptr;
};

}  // namespace mkernel::nics::verbs
