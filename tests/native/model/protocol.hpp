// What tests of a modelled protocol share: a scenario from a type, and that every order counts.
#pragma once

#include <algorithm>
#include <cstdio>
#include <string>
#include <vector>

#include "tests/native/model/explore.hpp"
#include "tests/native/nics/check.hpp"

namespace mkernel::model {

template <class Made, class... Arguments>
Make scenario(Arguments... arguments) {
    return [=] { return std::make_unique<Made>(arguments...); };
}

// In every execution.
inline Found holds(const char* what, const Make& make, const Settings& settings = {}) {
    Found found = explore(make, settings);
    std::printf("     %s: %llu executions%s%s\n", what,
                static_cast<unsigned long long>(found.executions),
                found.wrong.empty() ? "" : ", of which the last is wrong: ", found.wrong.c_str());
    return found;
}

// An operation that may be done with less order without harm, and why it is not.
struct Spare {
    std::string weaker;
    std::string why;
};

// Plants every weaker order, one at a time: each is found to break a scenario, except the spare ones, which
// break none. Returns what is not as told.
inline std::vector<std::string> orders_count(
    const std::vector<std::pair<Make, Settings>>& scenarios, const std::vector<Spare>& spare) {
    std::set<Operation> operations;
    for (const auto& [make, settings] : scenarios) {
        operations.merge(explore(make, settings).operations);
    }
    std::vector<std::string> surprises;
    std::vector<std::string> met;
    for (const Weaker& each : weaker(operations)) {
        std::string wrong;
        for (const auto& [make, settings] : scenarios) {
            Settings planted = settings;
            planted.weaker = each;
            wrong = explore(make, planted).wrong;
            if (!wrong.empty()) break;
        }
        const std::string what = text(each);
        const bool told = std::any_of(spare.begin(), spare.end(),
                                      [&](const Spare& one) { return one.weaker == what; });
        std::printf("     %s: %s\n", what.c_str(),
                    wrong.empty() ? "breaks nothing" : wrong.c_str());
        if (told) met.push_back(what);
        if (told != wrong.empty()) surprises.push_back(what);
    }
    for (const Spare& one : spare) {
        if (std::find(met.begin(), met.end(), one.weaker) == met.end()) {
            surprises.push_back(one.weaker + ": no such operation");
        }
    }
    for (const std::string& each : surprises) std::printf("     not as told: %s\n", each.c_str());
    return surprises;
}

}  // namespace mkernel::model
