#include "cpus.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <vector>

namespace pi2::runner {
namespace {

namespace fs = std::filesystem;

constexpr const char* kRoot = "/sys/devices/system/cpu";

// The number in a file; 0: it cannot be read.
double number_of(const fs::path& file) {
  std::ifstream in(file);
  double value = 0;
  return in >> value ? value : 0;
}

// The numbers by CPU; empty if any is unknown.
std::map<int, double> numbers_of(const fs::path& root, const Cpus& cpus, const char* file) {
  std::map<int, double> found;
  for (const int cpu : cpus) {
    const double number = number_of(root / ("cpu" + std::to_string(cpu)) / file);
    if (number <= 0) return {};
    found[cpu] = number;
  }
  return found;
}

void check_there(const std::string& option, const Cpus& cpus, const Cpus& allowed) {
  const long there = sysconf(_SC_NPROCESSORS_CONF);
  for (const int cpu : cpus) {
    if (cpu >= there) {
      throw Problem(option, "CPUs of this machine, 0 to " + std::to_string(there - 1), std::to_string(cpu),
                    "See lscpu -e, or take --cpus auto.");
    }
    if (!allowed.contains(cpu)) {
      throw Problem(option, "CPUs that this process may use (" + text_of(allowed) + ")", std::to_string(cpu),
                    "A cpuset or taskset keeps it from it: name others, or change that.");
    }
  }
}

void bind(pid_t thread, const Cpus& cpus) {
  cpu_set_t set;
  CPU_ZERO(&set);
  for (const int cpu : cpus) CPU_SET(static_cast<std::size_t>(cpu), &set);
  if (sched_setaffinity(thread, sizeof set, &set) == 0 || errno == ESRCH) return;  // ESRCH: the thread has ended
  throw Problem("--cpus", "threads that can be bound to CPUs " + text_of(cpus), std::strerror(errno),
                "Leave the option out, or change what keeps this process from them.");
}

}  // namespace

Cpus parse_cpus(const std::string& option, const std::string& text) {
  Cpus cpus;
  const char *at = text.data(), *const end = at + text.size();
  bool good = at != end;
  while (good) {
    int first = -1;
    std::from_chars_result read = std::from_chars(at, end, first);
    int last = first;
    if (read.ec == std::errc() && read.ptr != end && *read.ptr == '-') {
      read = std::from_chars(read.ptr + 1, end, last);
    }
    good = read.ec == std::errc() && first >= 0 && last >= first && last < CPU_SETSIZE;
    for (int cpu = first; good && cpu <= last; ++cpu) cpus.insert(cpu);
    if (read.ptr == end) break;
    good = good && *read.ptr == ',';
    at = read.ptr + 1;
  }
  if (!good)
    throw Problem(option, "CPUs such as 4-7 or 0,2-3", "'" + text + "'", "Correct it; --help lists the options.");
  return cpus;
}

std::string text_of(const Cpus& cpus) {
  std::string text;
  for (auto at = cpus.begin(); at != cpus.end();) {
    const int first = *at;
    int last = first;
    while (++at != cpus.end() && *at == last + 1) ++last;
    text += (text.empty() ? "" : ",") + std::to_string(first) + (last > first ? "-" + std::to_string(last) : "");
  }
  return text;
}

Roles auto_roles(const fs::path& root, const Cpus& allowed) {
  double share = 0.5;
  std::map<int, double> speed = numbers_of(root, allowed, "cpu_capacity");
  if (speed.empty()) {
    share = 0.75;
    speed = numbers_of(root, allowed, "cpufreq/cpuinfo_max_freq");
  }
  if (speed.empty()) return {{}, {}, "the system does not tell how fast the CPUs are"};
  const double fastest = std::max_element(speed.begin(), speed.end(), [](const auto& a, const auto& b) {
                           return a.second < b.second;
                         })->second;
  Cpus compute, read;
  for (const auto& [cpu, number] : speed) (number < share * fastest ? read : compute).insert(cpu);
  if (read.empty()) return {{}, {}, "CPUs " + text_of(allowed) + " are about equally fast"};
  return {compute, read, ""};
}

Cpus allowed_cpus() {
  cpu_set_t set;
  CPU_ZERO(&set);
  Cpus cpus;
  if (sched_getaffinity(0, sizeof set, &set) != 0) return cpus;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (CPU_ISSET(static_cast<std::size_t>(cpu), &set)) cpus.insert(cpu);
  }
  return cpus;
}

Roles roles_of(const std::string& cpus, const std::string& compute, const std::string& read, int threads) {
  const Cpus allowed = allowed_cpus();
  Roles roles;
  if (cpus == "auto") {
    roles = auto_roles(kRoot, allowed);
  } else {
    const auto take = [&](const char* option, const std::string& text) {
      std::optional<Cpus> found;
      if (text.empty()) return found;
      found = parse_cpus(option, text);
      check_there(option, *found, allowed);
      return found;
    };
    roles.compute = take(cpus.empty() ? "--compute-cpus" : "--cpus", cpus.empty() ? compute : cpus);
    roles.read = take(cpus.empty() ? "--read-cpus" : "--cpus", cpus.empty() ? read : cpus);
  }
  if (roles.compute && threads > std::ssize(*roles.compute)) {
    throw Problem("--threads",
                  "at most " + std::to_string(roles.compute->size()) + ", one for each of the CPUs that compute (" +
                      text_of(*roles.compute) + ")",
                  std::to_string(threads), "Pass fewer, or name more CPUs.");
  }
  return roles;
}

void bind_this_thread(const Roles& roles) {
  if (roles.compute) bind(0, *roles.compute);
}

void bind_readers(const Roles& roles, const Cpus& before) {
  if (!roles.compute && !roles.read) return;
  std::error_code error;
  for (const fs::directory_entry& task : fs::directory_iterator("/proc/self/task", error)) {
    std::ifstream in(task.path() / "comm");
    std::string name;
    std::getline(in, name);
    if (name != "pi2-read" && name != "pi2-http") continue;
    bind(static_cast<pid_t>(std::atoi(task.path().filename().c_str())), roles.read.value_or(before));
  }
  if (error)
    throw Problem("/proc/self/task", "this process's threads", error.message(), "Leave out --cpus and its like.");
}

Json report_of(const Roles& roles) {
  if (!roles.compute && !roles.read && roles.why.empty()) return {};
  const auto text = [](const std::optional<Cpus>& cpus) { return cpus ? Json(text_of(*cpus)) : Json(); };
  return {{"compute", text(roles.compute)},
          {"read", text(roles.read)},
          {"why", roles.why.empty() ? Json() : Json(roles.why)}};
}

}  // namespace pi2::runner
