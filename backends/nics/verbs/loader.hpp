// The dlopen seam: the exported verbs functions, found at run time in the system's libibverbs, in
// our software provider, or in any library of that interface.
//
// Only control calls are in the table. ibv_post_send, ibv_post_recv, ibv_poll_cq and
// ibv_req_notify_cq are inline in the header and go through context->ops, whatever the provider.
// Nothing here may odr-use an exported ibv_* function: we do not link libibverbs.
#pragma once

#include <infiniband/verbs.h>

#include <memory>
#include <stdexcept>
#include <string>

namespace mkernel::nics::verbs {

// The library or a function in it cannot be loaded. `missing`: there is no such library.
class LoadError : public std::runtime_error {
  public:
    LoadError(const std::string& message, bool missing)
        : std::runtime_error(message), missing(missing) {}
    bool missing;
};

class Verbs {
  public:
    // `library`: a name for the dynamic loader, or a path. Throws LoadError.
    static std::shared_ptr<const Verbs> load(const std::string& library);
    ~Verbs();
    Verbs(const Verbs&) = delete;
    Verbs& operator=(const Verbs&) = delete;

    const std::string& library() const { return library_; }
    // The file that was loaded, links followed; as `library` where that is not known.
    std::string path() const;

    decltype(&::ibv_get_device_list) get_device_list = nullptr;
    decltype(&::ibv_free_device_list) free_device_list = nullptr;
    decltype(&::ibv_get_device_name) get_device_name = nullptr;
    decltype(&::ibv_open_device) open_device = nullptr;
    decltype(&::ibv_close_device) close_device = nullptr;
    decltype(&::ibv_query_device) query_device = nullptr;
    decltype(&::ibv_query_gid) query_gid = nullptr;
    decltype(&::ibv_alloc_pd) alloc_pd = nullptr;
    decltype(&::ibv_dealloc_pd) dealloc_pd = nullptr;
    decltype(&::ibv_reg_mr) reg_mr = nullptr;
    decltype(&::ibv_dereg_mr) dereg_mr = nullptr;
    decltype(&::ibv_create_comp_channel) create_comp_channel = nullptr;
    decltype(&::ibv_destroy_comp_channel) destroy_comp_channel = nullptr;
    decltype(&::ibv_create_cq) create_cq = nullptr;
    decltype(&::ibv_destroy_cq) destroy_cq = nullptr;
    decltype(&::ibv_get_cq_event) get_cq_event = nullptr;
    decltype(&::ibv_ack_cq_events) ack_cq_events = nullptr;
    decltype(&::ibv_create_qp) create_qp = nullptr;
    decltype(&::ibv_modify_qp) modify_qp = nullptr;
    decltype(&::ibv_destroy_qp) destroy_qp = nullptr;
    decltype(&::ibv_get_async_event) get_async_event = nullptr;
    decltype(&::ibv_ack_async_event) ack_async_event = nullptr;
    // May be null: not in old libraries.
    decltype(&::_ibv_query_gid_ex) query_gid_ex = nullptr;
    decltype(&::ibv_reg_dmabuf_mr) reg_dmabuf_mr = nullptr;

    // What ibv_query_port does: the provider's own function where there is one, else the exported
    // one, which fills the older, shorter structure. 0 or an errno.
    int query_port(ibv_context* context, std::uint8_t port, ibv_port_attr* attributes) const;

  private:
    Verbs() = default;
    decltype(&::ibv_query_port) query_port_compat_ = nullptr;
    std::string library_;
    void* handle_ = nullptr;
};

// REM_ACCESS_ERR and the like; QP_FATAL and the like. Never null.
const char* status_name(ibv_wc_status status);
const char* event_name(ibv_event_type event);

}  // namespace mkernel::nics::verbs
