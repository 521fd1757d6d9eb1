#include "backends/nics/verbs/registration.hpp"

#include <unistd.h>

#include <cerrno>
#include <string>

namespace mkernel::nics::verbs {
namespace {

constexpr int kAccess = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE;

std::string what(const Rail& rail, const char* call, std::uint32_t region,
                 const LocalMemory& memory) {
    return rail.name + ": " + call + " of region " + std::to_string(region) + " (" +
           std::to_string(memory.bytes) + " bytes) failed: " + reason(errno);
}

ibv_mr* by_address(const Rail& rail, const LocalMemory& memory) {
    return rail.verbs->reg_mr(rail.pd.get(),
                              reinterpret_cast<void*>(static_cast<std::uintptr_t>(memory.address)),
                              memory.bytes, kAccess);
}

Registered by_dmabuf(const Rail& rail, std::uint32_t region, const LocalMemory& memory) {
    const auto page = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
    if (memory.address % page != memory.dmabuf_offset % page) {
        throw SetupError("region " + std::to_string(region) + ": its address and its offset " +
                         std::to_string(memory.dmabuf_offset) +
                         " in the dmabuf differ modulo a page; export the dmabuf from the "
                         "allocation's granularity on");
    }
    ibv_mr* mr = rail.verbs->reg_dmabuf_mr(rail.pd.get(), memory.dmabuf_offset, memory.bytes,
                                           memory.address, memory.dmabuf, kAccess);
    if (mr == nullptr) {
        throw SetupError(what(rail, "ibv_reg_dmabuf_mr", region, memory) +
                         "; check that the dmabuf holds all of it");
    }
    return {rail.own(mr), Rung::dmabuf};
}

}  // namespace

Registered register_with(const Rail& rail, std::uint32_t region, const LocalMemory& memory,
                         bool peermem) {
    if (!memory.device) {
        ibv_mr* mr = by_address(rail, memory);
        if (mr == nullptr) {
            throw SetupError(what(rail, "ibv_reg_mr", region, memory) +
                             "; check the address and the limit of locked memory (ulimit -l)");
        }
        return {rail.own(mr), Rung::host};
    }
    if (rail.takes_dmabuf && memory.dmabuf >= 0) return by_dmabuf(rail, region, memory);
    if (peermem) {
        ibv_mr* mr = by_address(rail, memory);
        if (mr == nullptr) {
            throw SetupError(what(rail, "ibv_reg_mr through peermem", region, memory) +
                             "; is it memory of a device that peermem serves?");
        }
        return {rail.own(mr), Rung::peermem};
    }
    throw SetupError(rail.name + " cannot reach region " + std::to_string(region) +
                     ", which is device memory: by dmabuf not, for " +
                     (rail.takes_dmabuf ? "its accelerator exports none"
                                        : "the device or its driver does not register dmabufs "
                                          "(ibv_reg_dmabuf_mr)") +
                     "; by peermem not, for the module nvidia_peermem is not loaded. Use a kernel "
                     "and drivers with dmabuf, or run `modprobe nvidia_peermem`");
}

}  // namespace mkernel::nics::verbs
