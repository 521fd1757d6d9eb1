// In place of the transport's: copies of a command are accesses of plain data.
#pragma once

#define PutCommand PlainPutCommand
#include_next "backends/transport/put_command.hpp"
#undef PutCommand

#include "tests/native/model/explore.hpp"

namespace mkernel::transport {

struct PutCommand : PlainPutCommand {
    PutCommand() = default;
    PutCommand(const PutCommand& other) : PlainPutCommand(other) { model::reads(&other); }
    PutCommand& operator=(const PutCommand& other) {
        model::reads(&other);
        model::writes(this);
        PlainPutCommand::operator=(other);
        return *this;
    }
};

}  // namespace mkernel::transport
