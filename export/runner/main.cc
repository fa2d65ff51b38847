// pi2_runner: generates text with a bundle of torch_pi2.export. See options.cc for what it takes.
#include <executorch/runtime/platform/platform.h>

#include <cstdio>
#include <optional>

#include "session.h"

namespace pi2::runner {
namespace {

// Of ExecuTorch's log only what went wrong: standard error is for people.
void log(et_timestamp_t, et_pal_log_level_t level, const char* file, const char*, std::size_t line, const char* text,
         std::size_t) {
  if (level != et_pal_log_level_t::kError && level != et_pal_log_level_t::kFatal) return;
  std::fprintf(stderr, "ExecuTorch: %s (%s:%zu)\n", text, file, line);
}

Run answer(const Options& o, bool& has_text) {
  Session session(o);
  has_text = session.has_tokenizer();
  const bool streams = !o.json && o.request.sequences == 1;
  if (streams && !o.chat) std::fputs(o.prompt.c_str(), stdout);
  const auto show = [](int, const std::string& text) {
    std::fputs(text.c_str(), stdout);
    std::fflush(stdout);
  };
  Run run = session.generate(o, streams ? Stream(show) : Stream());
  session.close();  // what it writes then (the trace) is there before this program says that all went well
  return run;
}

int main(int argc, char** argv) {
  const Options o = parse_options(argc, argv);
  if (o.help) {
    std::fputs(kUsage, stdout);
    return 0;
  }
  executorch::runtime::register_pal(executorch::runtime::PalImpl::create(log, __FILE__));
  bool has_text = false;
  const Run run = answer(o, has_text);
  if (o.json) {
    std::puts(report(run).dump(-1, ' ', false, Json::error_handler_t::replace).c_str());
    return 0;
  }
  const bool several = o.request.sequences > 1;
  int number = 0;
  for (const Answer& answer : run.generated.answers) {
    if (several) std::printf("[%d] ", number++);
    if (!has_text) {
      std::fputs("ids:", stdout);
      for (const std::int64_t id : answer.ids) std::printf(" %lld", static_cast<long long>(id));
    } else if (several) {
      std::fputs(answer.text.c_str(), stdout);
    }
    std::putchar('\n');
  }
  std::fflush(stdout);
  std::fprintf(stderr, "%s\n", summary(run).c_str());
  return 0;
}

}  // namespace
}  // namespace pi2::runner

int main(int argc, char** argv) {
  try {
    return pi2::runner::main(argc, argv);
  } catch (const std::exception& error) {
    std::fflush(stdout);
    std::fprintf(stderr, "pi2_runner: %s\n", error.what());
    return 2;
  }
}
