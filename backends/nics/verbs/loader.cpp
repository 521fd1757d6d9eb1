#include "backends/nics/verbs/loader.hpp"

#include <dlfcn.h>
#include <link.h>

#include <cerrno>
#include <cstring>
#include <filesystem>

namespace mkernel::nics::verbs {
namespace {

// The system's library exports two generations of most names: ask for the one whose structures the
// header describes. A provider without symbol versions answers the plain look-up.
template <typename Function>
void find(void* handle, const char* name, const char* version, Function& slot) {
    void* symbol = dlvsym(handle, name, version);
    if (symbol == nullptr) symbol = dlsym(handle, name);
    slot = reinterpret_cast<Function>(symbol);
}

template <typename Function>
void need(void* handle, const std::string& library, const char* name, Function& slot) {
    find(handle, name, "IBVERBS_1.1", slot);
    if (slot == nullptr) {
        throw LoadError(
            library + " lacks " + name + "; it is not a verbs library, or older than rdma-core 17",
            false);
    }
}

}  // namespace

std::shared_ptr<const Verbs> Verbs::load(const std::string& library) {
    // RTLD_LOCAL: two providers that export the same names may live in one process.
    void* handle = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (handle == nullptr) {
        const char* why = dlerror();
        const std::string text = why != nullptr ? why : "unknown error";
        throw LoadError(library + " cannot be loaded: " + text,
                        text.find("No such file") != std::string::npos);
    }
    std::shared_ptr<Verbs> verbs(new Verbs);
    verbs->library_ = library;
    verbs->handle_ = handle;
    Verbs& v = *verbs;
    need(handle, library, "ibv_get_device_list", v.get_device_list);
    need(handle, library, "ibv_free_device_list", v.free_device_list);
    need(handle, library, "ibv_get_device_name", v.get_device_name);
    need(handle, library, "ibv_open_device", v.open_device);
    need(handle, library, "ibv_close_device", v.close_device);
    need(handle, library, "ibv_query_device", v.query_device);
    need(handle, library, "ibv_query_port", v.query_port_compat_);
    need(handle, library, "ibv_query_gid", v.query_gid);
    need(handle, library, "ibv_alloc_pd", v.alloc_pd);
    need(handle, library, "ibv_dealloc_pd", v.dealloc_pd);
    need(handle, library, "ibv_reg_mr", v.reg_mr);
    need(handle, library, "ibv_dereg_mr", v.dereg_mr);
    need(handle, library, "ibv_create_comp_channel", v.create_comp_channel);
    need(handle, library, "ibv_destroy_comp_channel", v.destroy_comp_channel);
    need(handle, library, "ibv_create_cq", v.create_cq);
    need(handle, library, "ibv_destroy_cq", v.destroy_cq);
    need(handle, library, "ibv_get_cq_event", v.get_cq_event);
    need(handle, library, "ibv_ack_cq_events", v.ack_cq_events);
    need(handle, library, "ibv_create_qp", v.create_qp);
    need(handle, library, "ibv_modify_qp", v.modify_qp);
    need(handle, library, "ibv_destroy_qp", v.destroy_qp);
    need(handle, library, "ibv_get_async_event", v.get_async_event);
    need(handle, library, "ibv_ack_async_event", v.ack_async_event);
    find(handle, "_ibv_query_gid_ex", "IBVERBS_1.11", v.query_gid_ex);
    find(handle, "ibv_reg_dmabuf_mr", "IBVERBS_1.12", v.reg_dmabuf_mr);
    return verbs;
}

std::string Verbs::path() const {
    link_map* map = nullptr;
    if (dlinfo(handle_, RTLD_DI_LINKMAP, &map) != 0 || map == nullptr) return library_;
    std::error_code error;
    const auto real = std::filesystem::canonical(map->l_name, error);
    return error ? library_ : real.string();
}

Verbs::~Verbs() {
    if (handle_ != nullptr) dlclose(handle_);
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
    switch (status) {
        case IBV_WC_SUCCESS:
            return "SUCCESS";
        case IBV_WC_LOC_LEN_ERR:
            return "LOC_LEN_ERR";
        case IBV_WC_LOC_QP_OP_ERR:
            return "LOC_QP_OP_ERR";
        case IBV_WC_LOC_EEC_OP_ERR:
            return "LOC_EEC_OP_ERR";
        case IBV_WC_LOC_PROT_ERR:
            return "LOC_PROT_ERR";
        case IBV_WC_WR_FLUSH_ERR:
            return "WR_FLUSH_ERR";
        case IBV_WC_MW_BIND_ERR:
            return "MW_BIND_ERR";
        case IBV_WC_BAD_RESP_ERR:
            return "BAD_RESP_ERR";
        case IBV_WC_LOC_ACCESS_ERR:
            return "LOC_ACCESS_ERR";
        case IBV_WC_REM_INV_REQ_ERR:
            return "REM_INV_REQ_ERR";
        case IBV_WC_REM_ACCESS_ERR:
            return "REM_ACCESS_ERR";
        case IBV_WC_REM_OP_ERR:
            return "REM_OP_ERR";
        case IBV_WC_RETRY_EXC_ERR:
            return "RETRY_EXC_ERR";
        case IBV_WC_RNR_RETRY_EXC_ERR:
            return "RNR_RETRY_EXC_ERR";
        case IBV_WC_LOC_RDD_VIOL_ERR:
            return "LOC_RDD_VIOL_ERR";
        case IBV_WC_REM_INV_RD_REQ_ERR:
            return "REM_INV_RD_REQ_ERR";
        case IBV_WC_REM_ABORT_ERR:
            return "REM_ABORT_ERR";
        case IBV_WC_INV_EECN_ERR:
            return "INV_EECN_ERR";
        case IBV_WC_INV_EEC_STATE_ERR:
            return "INV_EEC_STATE_ERR";
        case IBV_WC_FATAL_ERR:
            return "FATAL_ERR";
        case IBV_WC_RESP_TIMEOUT_ERR:
            return "RESP_TIMEOUT_ERR";
        case IBV_WC_GENERAL_ERR:
            return "GENERAL_ERR";
        case IBV_WC_TM_ERR:
            return "TM_ERR";
        case IBV_WC_TM_RNDV_INCOMPLETE:
            return "TM_RNDV_INCOMPLETE";
    }
    return "UNKNOWN_STATUS";
}

const char* event_name(ibv_event_type event) {
    switch (event) {
        case IBV_EVENT_CQ_ERR:
            return "CQ_ERR";
        case IBV_EVENT_QP_FATAL:
            return "QP_FATAL";
        case IBV_EVENT_QP_REQ_ERR:
            return "QP_REQ_ERR";
        case IBV_EVENT_QP_ACCESS_ERR:
            return "QP_ACCESS_ERR";
        case IBV_EVENT_DEVICE_FATAL:
            return "DEVICE_FATAL";
        case IBV_EVENT_PORT_ACTIVE:
            return "PORT_ACTIVE";
        case IBV_EVENT_PORT_ERR:
            return "PORT_ERR";
        case IBV_EVENT_GID_CHANGE:
            return "GID_CHANGE";
        case IBV_EVENT_WQ_FATAL:
            return "WQ_FATAL";
        default:
            return "OTHER_EVENT";
    }
}

}  // namespace mkernel::nics::verbs
