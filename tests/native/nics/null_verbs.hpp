// What a test sets on the null device (null_verbs.cpp), and what it sees of the calls made there.
#pragma once

#include <infiniband/verbs.h>

#include <cstdint>
#include <vector>

namespace mkernel::nics::testing {

struct NullDevice {
    // One of the two ports; attributes are reported as they stand here.
    struct Port {
        ibv_port_attr attributes{};
        std::vector<ibv_gid_entry> gids;
    };
    Port ports[2];
    bool extended_gids = true;  // GIDs are told with their types

    int dmabuf_errno =
        0;  // of every dmabuf registration; 0: EBADF for a bad descriptor, else taken

    ibv_wc_status status = IBV_WC_SUCCESS;  // of every send from now on
    std::uint32_t vendor_err = 0;
    std::vector<ibv_async_event> events;  // to be read, last first

    // The last calls.
    struct Registration {
        bool dmabuf = false;
        std::uint64_t address = 0;  // or I/O address
        std::uint64_t offset = 0;
        std::uint64_t length = 0;
        int fd = -1;
        int access = 0;
    } registration;
    ibv_qp_attr to_rtr{};
    ibv_qp_attr to_rts{};
    ibv_qp* qp = nullptr;
};

}  // namespace mkernel::nics::testing

extern "C" mkernel::nics::testing::NullDevice* null_verbs_device();
