// Assigns CPUs to computing and reading: big and little cores, as in the paper's schedule.
#pragma once

#include <filesystem>
#include <optional>
#include <set>
#include <string>

#include "fields.h"

namespace pi2::runner {

using Cpus = std::set<int>;

// Parses "0-3,6". Throws Problem with the name of the option.
Cpus parse_cpus(const std::string& option, const std::string& text);
std::string text_of(const Cpus& cpus);

struct Roles {
  std::optional<Cpus> compute, read;  // unset: those of the process
  std::string why;                    // why none were assigned although requested; else empty
};

// Divides `allowed` by the system's figures in `root` (/sys/devices/system/cpu): CPUs with less than half of the
// largest capacity read, or, without capacities, those with less than three quarters of the highest frequency; the
// others compute.
Roles auto_roles(const std::filesystem::path& root, const Cpus& allowed);

// The CPUs that this thread may use.
Cpus allowed_cpus();

// The roles of --cpus, --compute-cpus and --read-cpus ("": not given). `threads`: --threads, 0: not given. Throws
// Problem for CPUs that do not exist or that this process may not use, or for more threads than CPUs.
Roles roles_of(const std::string& cpus, const std::string& compute, const std::string& read, int threads);

// Binds this thread, and all threads that it starts later, to the computing CPUs. Throws Problem.
void bind_this_thread(const Roles& roles);
// Binds existing threads that read or wait for clients to the reading CPUs, or to `before`, all CPUs of the process.
// Throws Problem.
void bind_readers(const Roles& roles, const Cpus& before);

// For the report; null if nothing was requested.
Json report_of(const Roles& roles);

}  // namespace pi2::runner
