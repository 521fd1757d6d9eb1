// The functions that the SRD backend needs beyond plain verbs: EFA's direct verbs, and the calls on address
// handles and extended queue pairs. Older headers lack the newer constants, so they are here; the features of
// a device are queried at run time.
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
    Library verbs_;
    Library efa_;
    static Library::Symbol need(const Library& library, const char* function) {
        return library.need(function, nullptr, "SRD needs rdma-core 28 or later");
    }

  public:
    // `library`: where efadv_* are; libibverbs itself is `verbs`. Throws LoadError.
    Efadv(const Verbs& verbs, const std::string& library)
        : verbs_(verbs.library().name()), efa_(library) {}

    decltype(&::efadv_create_qp_ex) create_qp_ex = need(efa_, "efadv_create_qp_ex");
    decltype(&::efadv_query_device) query_device = need(efa_, "efadv_query_device");
    decltype(&::ibv_create_ah) create_ah = need(verbs_, "ibv_create_ah");
    decltype(&::ibv_destroy_ah) destroy_ah = need(verbs_, "ibv_destroy_ah");
    decltype(&::ibv_qp_to_qp_ex) qp_to_qp_ex = need(verbs_, "ibv_qp_to_qp_ex");
};

}  // namespace mkernel::nics::verbs
