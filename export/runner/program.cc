#include "program.h"

#include <executorch/extension/module/module.h>
#include <executorch/extension/tensor/tensor.h>
#include <executorch/runtime/backend/interface.h>
#include <executorch/runtime/platform/platform.h>
#include <pi2/executorch.h>
#include <pthread.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <map>
#include <mutex>
#include <vector>

#ifdef PI2_HAVE_ETDUMP
#include <executorch/devtools/etdump/etdump_flatcc.h>
#endif

#include "base/arena.h"
#include "output.h"

// From ExecuTorch's library; the executorch package lacks its header.
namespace executorch::extension::threadpool {
class ThreadPool {
 public:
  std::size_t get_thread_count() const;
  bool _unsafe_reset_threadpool(std::uint32_t threads);
};
ThreadPool* get_threadpool();
}  // namespace executorch::extension::threadpool

namespace pi2::runner {
namespace {

using executorch::aten::ScalarType;
using executorch::extension::from_blob;
using executorch::extension::Module;
using executorch::extension::TensorPtr;
using executorch::runtime::Error;
using executorch::runtime::EValue;
using executorch::runtime::HierarchicalAllocator;
using executorch::runtime::Result;
using executorch::runtime::TensorInfo;
using Verification = executorch::runtime::Program::Verification;

// Error lines of ExecuTorch's log. Allocates nothing, since memory may be exhausted.
std::mutex log_mutex;
char log_kept[4096];
std::size_t log_bytes = 0;

void log(et_timestamp_t, et_pal_log_level_t level, const char* file, const char*, std::size_t line, const char* text,
         std::size_t) {
  if (level != et_pal_log_level_t::kError && level != et_pal_log_level_t::kFatal) return;
  const std::lock_guard<std::mutex> lock(log_mutex);
  const std::size_t room = sizeof(log_kept) - log_bytes;
  const int bytes = std::snprintf(log_kept + log_bytes, room, "ExecuTorch: %s (%s:%zu)\n", text, file, line);
  if (bytes > 0 && static_cast<std::size_t>(bytes) < room) log_bytes += static_cast<std::size_t>(bytes);
  if (level == et_pal_log_level_t::kFatal)
    std::fwrite(log_kept, 1, log_bytes, stderr);  // fatal: ExecuTorch ends the program
}

// Called before each operation.
void clear_errors() {
  pi2_et_clear_error();
  const std::lock_guard<std::mutex> lock(log_mutex);
  log_bytes = 0;
}

// Throws the message of Pi2Backend, or else ExecuTorch's error code.
[[noreturn]] void failed(const std::string& what, const char* expected, Error error) {
  if (const std::string said = pi2_et_error(); !said.empty()) throw RunError(said);
  {
    const std::lock_guard<std::mutex> lock(log_mutex);
    std::fwrite(log_kept, 1, log_bytes, stderr);
  }
  char code[16];
  std::snprintf(code, sizeof code, "0x%02x", static_cast<unsigned>(error));
  throw RunError(what, expected,
                 std::string("ExecuTorch's error ") + code + " (" + executorch::runtime::to_string(error) + ")",
                 "Its log above says more; --verify finds damage.");
}

// During its lifetime, threads that this thread starts are named for computing: they inherit its name.
class NamesItsThreads {
 public:
  NamesItsThreads() {
    pthread_getname_np(pthread_self(), before_, sizeof before_);
    pthread_setname_np(pthread_self(), "pi2-compute");
  }
  ~NamesItsThreads() { pthread_setname_np(pthread_self(), before_); }
  NamesItsThreads(const NamesItsThreads&) = delete;
  NamesItsThreads& operator=(const NamesItsThreads&) = delete;

 private:
  char before_[16] = "";
};

std::string shape_of(const std::vector<std::int64_t>& sizes) {
  std::string text;
  for (const std::int64_t size : sizes) text += (text.empty() ? "[" : ", ") + std::to_string(size);
  return text + "]";
}

std::string shape_of(const Result<TensorInfo>& info) {
  if (!info.ok()) return "no tensor";
  return shape_of(std::vector<std::int64_t>(info->sizes().begin(), info->sizes().end()));
}

}  // namespace

void keep_log() { executorch::runtime::register_pal(executorch::runtime::PalImpl::create(log, __FILE__)); }

void set_engine_option(const char* key, const std::string& value) {
  if (pi2_et_set(key, value.c_str()) != 0) throw Problem(std::string(pi2_et_error()));
}

void share_weights(bool share) {
  if (pi2_et_share_weights(share ? 1 : 0) != 0) throw Problem(std::string(pi2_et_error()));
}

void clear_engine_error() { pi2_et_clear_error(); }

void throw_engine_error() {
  if (const std::string said = pi2_et_error(); !said.empty()) throw Problem(said);
}

Json take_engine_stats() {
  std::string text;
  for (std::int64_t bytes = pi2_et_stats(nullptr, 0, 0); bytes > static_cast<std::int64_t>(text.size());) {
    text.resize(static_cast<std::size_t>(bytes) + 64);
    bytes = pi2_et_stats(text.data(), static_cast<std::int64_t>(text.size()), 1);
    if (bytes < 0) text.clear();
  }
  if (text.empty()) throw_engine_error();
  const Json all = Json::parse(text.c_str());
  return all.at("stores").empty() ? Json::object() : all.at("stores")[0];
}

void set_threads(int threads) {
  const NamesItsThreads named;
  auto* pool = executorch::extension::threadpool::get_threadpool();
  if (pool == nullptr || !pool->_unsafe_reset_threadpool(static_cast<std::uint32_t>(threads))) {
    throw Problem("--threads", "a thread pool of that size", "a failure of ExecuTorch's", "Pass fewer.");
  }
}

int threads() {
  const NamesItsThreads named;  // the first call starts them
  const auto* pool = executorch::extension::threadpool::get_threadpool();
  return pool == nullptr ? 1 : static_cast<int>(pool->get_thread_count());
}

struct Program::State {
  // The planned memory of a method. Methods share the arenas, and so one KV cache.
  struct Planned {
    std::vector<executorch::runtime::Span<std::uint8_t>> spans;
    HierarchicalAllocator allocator;
    explicit Planned(std::vector<executorch::runtime::Span<std::uint8_t>> all)
        : spans(std::move(all)), allocator({spans.data(), spans.size()}) {}
  };

  std::string file;
  std::int64_t vocab;
  std::deque<Arena> arenas;
  std::map<std::string, Planned> loaded;             // outlives the module's methods
  executorch::runtime::EventTracer* dump = nullptr;  // owned by the module
  std::unique_ptr<Module> module;
  std::vector<EValue> outputs;

  void check(const Manifest& manifest);
  void allocate();
  std::vector<std::int64_t> planned_bytes(const std::string& method) const;

  const EValue& run(const std::string& method, const std::vector<EValue>& inputs) {
    clear_errors();
    auto found = module->execute(method, inputs);
    if (!found.ok()) failed(file + ", " + method, "a call that succeeds", found.error());
    outputs = std::move(*found);
    if (outputs.empty()) throw Problem(file + ", " + method, "an output", "none", "Export the bundle again.");
    return outputs[0];
  }

  const float* logits(const std::string& method, const std::vector<EValue>& inputs, std::int64_t rows) {
    const EValue& output = run(method, inputs);
    if (output.isTensor()) {
      const auto& tensor = output.toTensor();
      if (tensor.scalar_type() == ScalarType::Float && tensor.numel() == rows * vocab) {
        return tensor.const_data_ptr<float>();
      }
    }
    throw Problem(file + ", " + method,
                  "logits, float32 [" + std::to_string(rows) + ", 1, " + std::to_string(vocab) + "]", "another output",
                  "The program is of another bundle: copy it again, or export it again.");
  }
};

// Checks that the program has what the manifest says.
void Program::State::check(const Manifest& manifest) {
  const auto names = module->method_names();
  if (!names.ok()) failed(file, "a program of ExecuTorch", names.error());
  const auto require = [&](const std::string& what, const std::string& expected, const std::string& found) {
    if (found == expected) return;
    throw Problem(file + ", " + what, expected + ", as manifest.json says", found,
                  "The program counts: copy the bundle again, or export again.");
  };
  const auto check = [&](const std::string& method, const std::vector<std::int64_t>& ids, std::int64_t rows) {
    require("method " + method, "there", names->contains(method) ? "there" : "none");
    const auto about = module->method_meta(method);
    if (!about.ok()) failed(file + ", " + method, "a method that ExecuTorch describes", about.error());
    require("input of " + method, shape_of(ids), shape_of(about->input_tensor_meta(0)));
    if (rows > 0) require("logits of " + method, shape_of({rows, 1, vocab}), shape_of(about->output_tensor_meta(0)));
  };
  constexpr const char* kContext = "get_max_context_len";
  require(std::string("method ") + kContext, "there", names->contains(kContext) ? "there" : "none");
  const EValue& room = run(kContext, {});
  require("max_tokens", std::to_string(manifest.max_tokens), room.isInt() ? std::to_string(room.toInt()) : "no number");
  check("forward", {1, manifest.prompt_tokens}, 1);
  for (const std::int64_t size : manifest.prefills) check("prefill_" + std::to_string(size), {1, size}, 1);
  for (const int batch : manifest.batches) check("decode_b" + std::to_string(batch), {batch, 1}, batch);
  if (manifest.lanes > 1) check("fork", {manifest.lanes}, 0);
}

// Arenas as large as the largest of any method. Huge pages where available: for a long context, keys and values are as
// large as the weights. Memory for later tokens is not committed until it is used.
void Program::State::allocate() {
  std::vector<std::int64_t> most;
  const auto names = module->method_names();  // checked by check()
  for (const std::string& method : *names) {
    const std::vector<std::int64_t> bytes = planned_bytes(method);
    most.resize(std::max(most.size(), bytes.size()));
    for (std::size_t i = 0; i < bytes.size(); ++i) most[i] = std::max(most[i], bytes[i]);
  }
  for (const std::int64_t bytes : most)
    if (!arenas.emplace_back().allocate(bytes, true)) {
      throw Problem(file, std::to_string(bytes) + " bytes of memory for its methods", "no more memory",
                    "Export the bundle again with a smaller max_tokens, or with kv=\"int8\".");
    }
}

std::vector<std::int64_t> Program::State::planned_bytes(const std::string& method) const {
  std::vector<std::int64_t> bytes;
  const auto about = module->method_meta(method);
  for (std::size_t i = 0; about.ok() && i < about->num_memory_planned_buffers(); ++i)
    bytes.push_back(about->memory_planned_buffer_size(i).get());
  return bytes;
}

Program::Program(const std::filesystem::path& file, const Manifest& manifest, bool dump) : state_(new State) {
  state_->file = file.string();
  state_->vocab = manifest.vocab;
  if (pi2_et_abi() != 1) {
    throw Problem("libpi2_executorch.so", "interface 1", std::to_string(pi2_et_abi()),
                  "Build runner and library together.");
  }
  if (manifest.target.starts_with("qnn:") && executorch::runtime::get_backend_class("QnnBackend") == nullptr) {
    throw Problem(state_->file + ", made for " + manifest.target, "ExecuTorch's QNN backend in this process", "none",
                  "Pass --backend PATH/libexecutorch_backend_qnn.so, with Qualcomm's libraries in LD_LIBRARY_PATH.");
  }
  std::unique_ptr<executorch::runtime::EventTracer> recorder;
  if (dump) {
#ifdef PI2_HAVE_ETDUMP
    recorder = std::make_unique<executorch::etdump::ETDumpGen>();
#else
    throw Problem("--etdump", "a runner built with ExecuTorch's developer tools", "one without",
                  "Build ExecuTorch with EXECUTORCH_BUILD_DEVTOOLS, or leave it out.");
#endif
  }
  state_->dump = recorder.get();
  // Mmap: weights are used from the file's pages instead of being copied.
  state_->module = std::make_unique<Module>(state_->file, Module::LoadMode::Mmap, std::move(recorder));
  clear_errors();
  if (const Error error = state_->module->load(Verification::InternalConsistency); error != Error::Ok) {
    failed(state_->file, "a program of ExecuTorch", error);
  }
  state_->check(manifest);
  state_->allocate();
}

Program::~Program() = default;

void Program::load(const std::string& method) {
  if (state_->loaded.contains(method)) return;
  clear_errors();
  std::vector<executorch::runtime::Span<std::uint8_t>> spans;
  for (const std::int64_t bytes : state_->planned_bytes(method))
    spans.emplace_back(reinterpret_cast<std::uint8_t*>(state_->arenas[spans.size()].data()),
                       static_cast<std::size_t>(bytes));
  State::Planned& planned = state_->loaded.try_emplace(method, std::move(spans)).first->second;
  if (const Error error = state_->module->load_method(method, &planned.allocator); error != Error::Ok) {
    state_->loaded.erase(method);
    failed(state_->file + ", " + method, "a method that ExecuTorch loads", error);
  }
}

const float* Program::read(const std::string& method, const std::int64_t* ids, std::int64_t count, std::int64_t start,
                           std::int64_t last) {
  load(method);
  std::vector<std::int64_t> tokens(ids, ids + count);
  const auto n = static_cast<executorch::aten::SizesType>(count);
  const TensorPtr ids_1T = from_blob(tokens.data(), {1, n}, ScalarType::Long);
  const TensorPtr start_1 = from_blob(&start, {1}, ScalarType::Long), last_1 = from_blob(&last, {1}, ScalarType::Long);
  std::vector<EValue> inputs{ids_1T, start_1};
  if (last >= 0) inputs.emplace_back(last_1);
  return state_->logits(method, inputs, 1);
}

const float* Program::decode(std::vector<std::int64_t>& ids, std::vector<std::int64_t>& positions) {
  const auto n = static_cast<executorch::aten::SizesType>(ids.size());
  const std::string method = "decode_b" + std::to_string(n);
  load(method);
  const TensorPtr ids_N1 = from_blob(ids.data(), {n, 1}, ScalarType::Long);
  const TensorPtr positions_N1 = from_blob(positions.data(), {n, 1}, ScalarType::Long);
  return state_->logits(method, {ids_N1, positions_N1}, n);
}

void Program::fork(std::vector<std::int64_t> lanes) {
  load("fork");
  const TensorPtr lanes_L =
      from_blob(lanes.data(), {static_cast<executorch::aten::SizesType>(lanes.size())}, ScalarType::Long);
  state_->run("fork", {lanes_L});
}

void Program::write_dump(const std::string& file) {
#ifdef PI2_HAVE_ETDUMP
  const executorch::etdump::ETDumpResult result =
      static_cast<executorch::etdump::ETDumpGen*>(state_->dump)->get_etdump_data();
  const std::unique_ptr<void, void (*)(void*)> held(result.buf, std::free);
  write_file(file, std::string_view(static_cast<const char*>(result.buf), result.size));
#else
  write_file(file, "");
#endif
}

}  // namespace pi2::runner
