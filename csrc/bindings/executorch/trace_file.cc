#include "bindings/executorch/trace_file.h"

#include <sys/stat.h>

#include <algorithm>
#include <cstdio>
#include <vector>

#include "io/output_file.h"
#include "pi2/trace.h"

namespace pi2::et {
namespace {

// In the order of Stage and TraceCounter; the names of torch_pi2.observe.trace.
struct Named {
  const char* name;
  const char* args[2];
};
constexpr Named kStages[] = {
    {"ffn", {"layer", "tokens"}},    {"predict", {"neurons", "tokens"}},
    {"linear", {"rows", "columns"}}, {"attention", {"keys", "tokens"}},
    {"predict rows", {"block", ""}}, {"linear rows", {"block", ""}},
    {"compute", {"layer", "chunk"}}, {"reduce", {"layer", "block"}},
    {"begin", {"layer", "chunks"}},  {"submit", {"layer", "reads"}},
    {"wait", {"layer", ""}},         {"join", {"layer", ""}},
    {"verify", {"layer", "chunk"}},  {"pread", {"bytes", "offset"}},
    {"read", {"layer", "chunk"}},
};
constexpr Named kCounters[] = {{"reads under way", {"reads", ""}},
                               {"bytes read", {"bytes", ""}},
                               {"cache: hot", {"bundles", ""}},
                               {"cache: cold", {"bundles", ""}}};
constexpr std::int64_t kCapacity = 1 << 18;
constexpr std::size_t kPiece = 1 << 20;

struct Row {
  TraceEvent event;
  std::int64_t lane;
};

std::string microseconds(std::int64_t nanoseconds) {
  char text[40];
  std::snprintf(text, sizeof(text), "%lld.%03lld", static_cast<long long>(nanoseconds / 1000),
                static_cast<long long>(nanoseconds % 1000));
  return text;
}

std::string args_of(const Named& named, const TraceEvent& event) {
  std::string out;
  for (int i = 0; i < 2; ++i)
    if (*named.args[i] != 0 && event.args[i] >= 0)
      out += std::string(out.empty() ? "\"" : ", \"") + named.args[i] + "\": " + std::to_string(event.args[i]);
  return "{" + out + "}";
}

std::string event_text(const Row& row, std::int64_t zero, std::int64_t number) {
  const TraceEvent& e = row.event;
  const auto stage = static_cast<std::size_t>(e.stage);
  const std::string at = ", \"pid\": 1, \"tid\": " + std::to_string(row.lane + 1) + ", \"ts\": ";
  const std::string begin = at + microseconds(e.begin_ns - zero);
  if (e.kind == TraceKind::kCounter)
    return std::string("{\"name\": \"") + kCounters[stage].name + "\", \"ph\": \"C\"" + begin +
           ", \"args\": " + args_of(kCounters[stage], e) + "}";
  const std::string name = std::string("{\"name\": \"") + kStages[stage].name + "\", \"cat\": ";
  const std::string args = ", \"args\": " + args_of(kStages[stage], e) + "}";
  if (e.kind == TraceKind::kSpan)
    return name + "\"pi2\", \"ph\": \"X\"" + begin + ", \"dur\": " + microseconds(e.duration_ns) + args;
  const std::string id = "\"io\", \"id\": " + std::to_string(number);
  return name + id + ", \"ph\": \"b\"" + begin + args + ",\n" + name + id + ", \"ph\": \"e\"" + at +
         microseconds(e.begin_ns - zero + e.duration_ns) + "}";
}

// For example a FIFO: opening it waits for its reader, and the reader takes closing it for the end.
bool is_stream(const std::string& path) {
  struct stat there;
  return stat(path.c_str(), &there) == 0 && !S_ISREG(there.st_mode) && !S_ISDIR(there.st_mode);
}

Problem not_written(const std::string& path, const std::string& why) {
  return problem(Fault::kArgument, "trace " + path, "a file that can be written", why,
                 "Give option trace another one.");
}

// Writes the file in pieces; stops if `write` returns an error message.
template <class Write>
std::string write_events(const Trace& trace, const std::vector<Row>& rows, std::int64_t lost, const Write& write) {
  std::string text = "{\"displayTimeUnit\": \"ms\", \"otherData\": {\"events\": " + std::to_string(rows.size()) +
                     ", \"lost_events\": " + std::to_string(lost) +
                     "}, \"traceEvents\": [\n{\"name\": \"process_name\", \"ph\": \"M\", \"ts\": 0, \"pid\": 1, "
                     "\"tid\": 0, \"args\": {\"name\": \"torch_pi2\"}}";
  for (const TraceLane& lane : trace.lanes)
    text += ",\n{\"name\": \"thread_name\", \"ph\": \"M\", \"ts\": 0, \"pid\": 1, \"tid\": " +
            std::to_string(lane.number + 1) + ", \"args\": {\"name\": \"" + (lane.io ? "I/O " : "compute ") +
            std::to_string(lane.number) + "\"}}";
  const std::int64_t zero = rows.empty() ? 0 : rows.front().event.begin_ns;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    text += ",\n" + event_text(rows[i], zero, static_cast<std::int64_t>(i));
    if (text.size() < kPiece) continue;
    const std::string wrong = write(text);
    if (!wrong.empty()) return wrong;
    text.clear();
  }
  return write(text + "\n]}\n");
}

}  // namespace

Problem begin_trace(const std::string& path) {
  {
    OutputFile trial;  // reports an unwritable path before anything is computed
    const std::string wrong = is_stream(path) ? std::string() : trial.open(path);
    if (!wrong.empty()) return not_written(path, wrong);
  }
  if (trace_start(kCapacity)) return {};
  return problem(Fault::kState, "trace " + path, "one trace at a time", "another under way",
                 "End that one first; it records the whole process.");
}

Problem write_trace(const std::string& path) {
  const Trace trace = trace_stop();
  std::vector<Row> rows;
  std::int64_t lost = trace.lost;
  for (const TraceLane& lane : trace.lanes) {
    lost += lane.lost();
    for (std::int64_t i = 0; i < lane.kept(); ++i)
      rows.push_back({lane.events[static_cast<std::size_t>(i)], lane.number});
  }
  std::stable_sort(rows.begin(), rows.end(), [](const Row& a, const Row& b) {
    return a.event.begin_ns != b.event.begin_ns ? a.event.begin_ns < b.event.begin_ns
                                                : a.event.duration_ns > b.event.duration_ns;
  });
  OutputFile out;
  std::string wrong = out.open(path);
  const auto write = [&](const std::string& text) {
    return out.write(text.data(), static_cast<std::int64_t>(text.size()));
  };
  if (wrong.empty()) wrong = write_events(trace, rows, lost, write);
  if (wrong.empty()) wrong = out.close();
  return wrong.empty() ? Problem() : not_written(path, wrong);
}

}  // namespace pi2::et
