// The software device as a mistaken backend would use it: the conformance suite must notice. It is a library
// of its own, loaded in the device's place; functions that it does not define are the device's.
//
// MKERNEL_PLANTED_MISTAKE: `none`; `miscount`, a group of messages on SRD claims one fewer than it has;
// `missing-receive`, only the first thousand receives of a queue pair are posted.
#include <arpa/inet.h>
#include <dlfcn.h>
#include <infiniband/efadv.h>

#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <mutex>
#include <string_view>
#include <unordered_map>

#include "backends/nics/verbs/immediate.hpp"

namespace verbs = mkernel::nics::verbs;

namespace {

constexpr std::uint32_t kReceives = 1000;

// The device's own functions, which the two replacements call.
decltype(ibv_qp_ex::wr_rdma_write_imm) write_imm = nullptr;
decltype(ibv_context_ops::post_recv) post_recv = nullptr;

void miscounting_write_imm(ibv_qp_ex* qp, std::uint32_t rkey, std::uint64_t remote, __be32 imm) {
    const std::uint32_t immediate = ntohl(imm);
    const bool part = verbs::is_group(immediate) && verbs::kind_of(immediate) == verbs::Kind::part;
    write_imm(qp, rkey, remote, part ? htonl(immediate - 1) : imm);
}

int forgetful_post_recv(ibv_qp* qp, ibv_recv_wr* wr, ibv_recv_wr** bad) {
    static std::mutex mutex;
    static std::unordered_map<const ibv_qp*, std::uint32_t> posted;
    std::uint32_t count = 0;
    for (const ibv_recv_wr* each = wr; each != nullptr; each = each->next) ++count;
    {
        const std::lock_guard lock(mutex);
        if ((posted[qp] += count) > kReceives) return 0;
    }
    return post_recv(qp, wr, bad);
}

// Returns the device's function of that name; null: there is none.
template <class Function>
Function* of_device(const char* name) {
    // Loaded already, as this library needs it.
    void* device = ::dlopen("libmkernel_softverbs.so", RTLD_NOW | RTLD_NOLOAD);
    if (device == nullptr) return errno = ENODEV, nullptr;
    auto* found = reinterpret_cast<Function*>(::dlsym(device, name));
    ::dlclose(device);
    return found;
}

bool chosen(std::string_view mistake) {
    const char* wanted = std::getenv("MKERNEL_PLANTED_MISTAKE");
    return wanted != nullptr && mistake == wanted;
}

void forget_receives(ibv_context* context) {
    if (!chosen("missing-receive") || context->ops.post_recv == forgetful_post_recv) return;
    post_recv = context->ops.post_recv;
    context->ops.post_recv = forgetful_post_recv;
}

}  // namespace

extern "C" __attribute__((visibility("default"))) ibv_qp* ibv_create_qp(ibv_pd* pd,
                                                                        ibv_qp_init_attr* init) {
    auto* create = of_device<decltype(ibv_create_qp)>("ibv_create_qp");
    ibv_qp* qp = create != nullptr ? create(pd, init) : nullptr;
    if (qp != nullptr) forget_receives(qp->context);
    return qp;
}

extern "C" __attribute__((visibility("default"))) ibv_qp* efadv_create_qp_ex(
    ibv_context* context, ibv_qp_init_attr_ex* init, efadv_qp_init_attr* efa_init,
    std::uint32_t length) {
    auto* create = of_device<decltype(efadv_create_qp_ex)>("efadv_create_qp_ex");
    ibv_qp* qp = create != nullptr ? create(context, init, efa_init, length) : nullptr;
    if (qp == nullptr) return nullptr;
    if (chosen("miscount")) {
        auto* extended = reinterpret_cast<ibv_qp_ex*>(qp);
        write_imm = extended->wr_rdma_write_imm;
        extended->wr_rdma_write_imm = miscounting_write_imm;
    }
    forget_receives(context);
    return qp;
}
