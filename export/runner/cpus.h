// Which CPUs compute and which read: big cores and little ones, as the paper's schedule has them.
#pragma once

#include <filesystem>
#include <optional>
#include <set>
#include <string>

#include "fields.h"

namespace pi2::runner {

using Cpus = std::set<int>;

// "0-3,6". Throws Problem, which names the option.
Cpus parse_cpus(const std::string& option, const std::string& text);
std::string text_of(const Cpus& cpus);

struct Roles {
  std::optional<Cpus> compute, read;  // nothing: as the process
  std::string why;                    // there are none though they were asked for; empty: there are, or they were not
};

// Of `allowed`, by what the system says in `root` (/sys/devices/system/cpu): those whose capacity is below half of the
// largest read, or where it tells none those whose highest frequency is below three quarters; the others compute.
Roles auto_roles(const std::filesystem::path& root, const Cpus& allowed);

// CPUs that this thread may use.
Cpus allowed_cpus();

// What --cpus, --compute-cpus and --read-cpus ask for ("": not given), of CPUs that are there and that this process may
// use. `threads`: of --threads, 0: not given. Throws Problem: they are not, or there are more threads than CPUs.
Roles roles_of(const std::string& cpus, const std::string& compute, const std::string& read, int threads);

// Binds this thread, and all that it starts from now on, to the CPUs that compute. Throws Problem.
void bind_this_thread(const Roles& roles);
// Binds those that are there and read or wait for clients: to the CPUs that read, or to all that the process had,
// `before`. Throws Problem.
void bind_readers(const Roles& roles, const Cpus& before);

// For the report: null if nothing was asked for.
Json report_of(const Roles& roles);

}  // namespace pi2::runner
