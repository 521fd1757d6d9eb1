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

// The error of a library, or of a function in it, that cannot be loaded.
class LoadError : public std::runtime_error {
  public:
    using std::runtime_error::runtime_error;
};

// A shared library that stays loaded as long as this object.
class Library {
  public:
    // `name`: for the dynamic loader, or a path. Throws LoadError.
    explicit Library(const std::string& name);
    ~Library();
    Library(const Library&) = delete;
    Library& operator=(const Library&) = delete;

    const std::string& name() const { return name_; }
    // Returns the file that was loaded, links followed; `name` where that is not known.
    std::string path() const;

    // The result of a look-up: converts to any pointer to a function.
    struct Symbol {
        void* address;
        template <typename Function>
        operator Function() const {
            return reinterpret_cast<Function>(address);
        }
    };
    // Returns a function, of that version where one is named; null where the library lacks it.
    Symbol find(const char* function, const char* version = nullptr) const;
    // Returns a function in the same way; LoadError, with `why`, where the library lacks it.
    Symbol need(const char* function, const char* version, const char* why) const;

  private:
    std::string name_;
    void* handle_;
};

class Verbs {
    Library library_;
    Library::Symbol need(const char* function) const {
        return library_.need(function, "IBVERBS_1.1",
                             "it is not a verbs library, or older than rdma-core 17");
    }
    explicit Verbs(const std::string& library) : library_(library) {}

  public:
    // `library`: a name for the dynamic loader, or a path. Throws LoadError.
    static std::shared_ptr<const Verbs> load(const std::string& library) {
        return std::shared_ptr<const Verbs>(new Verbs(library));
    }

    const Library& library() const { return library_; }

    decltype(&::ibv_get_device_list) get_device_list = need("ibv_get_device_list");
    decltype(&::ibv_free_device_list) free_device_list = need("ibv_free_device_list");
    decltype(&::ibv_get_device_name) get_device_name = need("ibv_get_device_name");
    decltype(&::ibv_open_device) open_device = need("ibv_open_device");
    decltype(&::ibv_close_device) close_device = need("ibv_close_device");
    decltype(&::ibv_query_device) query_device = need("ibv_query_device");
    decltype(&::ibv_query_gid) query_gid = need("ibv_query_gid");
    decltype(&::ibv_alloc_pd) alloc_pd = need("ibv_alloc_pd");
    decltype(&::ibv_dealloc_pd) dealloc_pd = need("ibv_dealloc_pd");
    decltype(&::ibv_reg_mr) reg_mr = need("ibv_reg_mr");
    decltype(&::ibv_dereg_mr) dereg_mr = need("ibv_dereg_mr");
    decltype(&::ibv_create_comp_channel) create_comp_channel = need("ibv_create_comp_channel");
    decltype(&::ibv_destroy_comp_channel) destroy_comp_channel = need("ibv_destroy_comp_channel");
    decltype(&::ibv_create_cq) create_cq = need("ibv_create_cq");
    decltype(&::ibv_destroy_cq) destroy_cq = need("ibv_destroy_cq");
    decltype(&::ibv_get_cq_event) get_cq_event = need("ibv_get_cq_event");
    decltype(&::ibv_ack_cq_events) ack_cq_events = need("ibv_ack_cq_events");
    decltype(&::ibv_create_qp) create_qp = need("ibv_create_qp");
    decltype(&::ibv_modify_qp) modify_qp = need("ibv_modify_qp");
    decltype(&::ibv_destroy_qp) destroy_qp = need("ibv_destroy_qp");
    decltype(&::ibv_get_async_event) get_async_event = need("ibv_get_async_event");
    decltype(&::ibv_ack_async_event) ack_async_event = need("ibv_ack_async_event");
    // May be null: old libraries do not have it.
    decltype(&::_ibv_query_gid_ex) query_gid_ex =
        library_.find("_ibv_query_gid_ex", "IBVERBS_1.11");
    decltype(&::ibv_reg_dmabuf_mr) reg_dmabuf_mr =
        library_.find("ibv_reg_dmabuf_mr", "IBVERBS_1.12");

    // Queries a port as ibv_query_port does: by the provider's own function where there is one, else by the
    // exported one, which fills the older, shorter structure. Returns 0 or an errno.
    int query_port(ibv_context* context, std::uint8_t port, ibv_port_attr* attributes) const;

  private:
    decltype(&::ibv_query_port) query_port_compat_ = need("ibv_query_port");
};

// Return REM_ACCESS_ERR and the like, and QP_FATAL and the like. Never null.
const char* status_name(ibv_wc_status status);
const char* event_name(ibv_event_type event);

}  // namespace mkernel::nics::verbs
