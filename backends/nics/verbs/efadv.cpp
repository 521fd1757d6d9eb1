#include "backends/nics/verbs/efadv.hpp"

#include <dlfcn.h>

namespace mkernel::nics::verbs {
namespace {

void* open(const std::string& library) {
    void* handle = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (handle == nullptr) {
        const char* why = dlerror();
        const std::string text = why != nullptr ? why : "unknown error";
        throw LoadError(library + " cannot be loaded: " + text,
                        text.find("No such file") != std::string::npos);
    }
    return handle;
}

template <typename Function>
void need(void* handle, const std::string& library, const char* name, Function& slot) {
    slot = reinterpret_cast<Function>(dlsym(handle, name));
    if (slot == nullptr) {
        throw LoadError(library + " lacks " + name + "; SRD needs rdma-core 28 or later", false);
    }
}

}  // namespace

std::shared_ptr<const Efadv> Efadv::load(const Verbs& verbs, const std::string& library) {
    std::shared_ptr<Efadv> efa(new Efadv);
    efa->verbs_handle_ = open(verbs.library());
    efa->handle_ = open(library);
    need(efa->handle_, library, "efadv_create_qp_ex", efa->create_qp_ex);
    need(efa->handle_, library, "efadv_query_device", efa->query_device);
    need(efa->verbs_handle_, verbs.library(), "ibv_create_ah", efa->create_ah);
    need(efa->verbs_handle_, verbs.library(), "ibv_destroy_ah", efa->destroy_ah);
    need(efa->verbs_handle_, verbs.library(), "ibv_qp_to_qp_ex", efa->qp_to_qp_ex);
    return efa;
}

Efadv::~Efadv() {
    if (handle_ != nullptr) dlclose(handle_);
    if (verbs_handle_ != nullptr) dlclose(verbs_handle_);
}

}  // namespace mkernel::nics::verbs
