#include "backends/nics/verbs/loader.hpp"

#include <dlfcn.h>
#include <link.h>

#include <cstring>
#include <filesystem>
#include <iterator>
#include <map>

namespace mkernel::nics::verbs {

Library::Library(const std::string& name) : name_(name) {
    // RTLD_LOCAL: two providers that export the same names may live in one process.
    handle_ = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (handle_ == nullptr) {
        const char* why = dlerror();
        throw LoadError(name + " cannot be loaded: " + (why != nullptr ? why : "unknown error"));
    }
}

Library::~Library() {
    dlclose(handle_);
}

std::string Library::path() const {
    link_map* map = nullptr;
    if (dlinfo(handle_, RTLD_DI_LINKMAP, &map) != 0 || map == nullptr) return name_;
    std::error_code error;
    const auto real = std::filesystem::canonical(map->l_name, error);
    return error ? name_ : real.string();
}

// The system's library exports two generations of most names: the lookup takes the one whose structures the
// header describes. A provider without symbol versions answers the plain look-up.
Library::Symbol Library::find(const char* function, const char* version) const {
    void* found = version != nullptr ? dlvsym(handle_, function, version) : nullptr;
    return {found != nullptr ? found : dlsym(handle_, function)};
}

Library::Symbol Library::need(const char* function, const char* version, const char* why) const {
    const Symbol found = find(function, version);
    if (found.address == nullptr) throw LoadError(name_ + " lacks " + function + "; " + why);
    return found;
}

int Verbs::query_port(ibv_context* context, std::uint8_t port, ibv_port_attr* attributes) const {
    std::memset(attributes, 0, sizeof(*attributes));
    verbs_context* extended = verbs_get_ctx_op(context, query_port);
    if (extended != nullptr) {
        return extended->query_port(context, port, attributes, sizeof(*attributes));
    }
    return query_port_compat_(context, port, reinterpret_cast<_compat_ibv_port_attr*>(attributes));
}

const char* status_name(ibv_wc_status status) {
    static constexpr const char* kNames[] = {"SUCCESS",
                                             "LOC_LEN_ERR",
                                             "LOC_QP_OP_ERR",
                                             "LOC_EEC_OP_ERR",
                                             "LOC_PROT_ERR",
                                             "WR_FLUSH_ERR",
                                             "MW_BIND_ERR",
                                             "BAD_RESP_ERR",
                                             "LOC_ACCESS_ERR",
                                             "REM_INV_REQ_ERR",
                                             "REM_ACCESS_ERR",
                                             "REM_OP_ERR",
                                             "RETRY_EXC_ERR",
                                             "RNR_RETRY_EXC_ERR",
                                             "LOC_RDD_VIOL_ERR",
                                             "REM_INV_RD_REQ_ERR",
                                             "REM_ABORT_ERR",
                                             "INV_EECN_ERR",
                                             "INV_EEC_STATE_ERR",
                                             "FATAL_ERR",
                                             "RESP_TIMEOUT_ERR",
                                             "GENERAL_ERR",
                                             "TM_ERR",
                                             "TM_RNDV_INCOMPLETE"};
    static_assert(std::size(kNames) == IBV_WC_TM_RNDV_INCOMPLETE + 1);
    return status < std::size(kNames) ? kNames[status] : "UNKNOWN_STATUS";
}

const char* event_name(ibv_event_type event) {
#define EVENT(name) {IBV_EVENT_##name, #name}
    static const std::map<ibv_event_type, const char*> kNames = {
        EVENT(CQ_ERR),        EVENT(QP_FATAL),     EVENT(QP_REQ_ERR),
        EVENT(QP_ACCESS_ERR), EVENT(DEVICE_FATAL), EVENT(PORT_ACTIVE),
        EVENT(PORT_ERR),      EVENT(GID_CHANGE),   EVENT(WQ_FATAL)};
#undef EVENT
    const auto found = kNames.find(event);
    return found != kNames.end() ? found->second : "OTHER_EVENT";
}

}  // namespace mkernel::nics::verbs
