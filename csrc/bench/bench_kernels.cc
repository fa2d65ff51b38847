// Every kernel of every table (kernels/list.inc) at hidden sizes 2048 and 4096 and a predictor's rank, from memory and
// from cache, and the layer itself by share of active neurons. Counters: bytes_per_second counts weights read.
//   make bench-kernels BENCH_ARGS=--benchmark_filter=avx512/dot
#include <benchmark/benchmark.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "pi2/attention.h"
#include "pi2/kernels.h"
#include "pi2/linear.h"
#include "pi2/memory.h"
#include "pi2/predict.h"
#include "pi2/thread_pool.h"

namespace {

using namespace pi2;

constexpr std::int64_t kFromMemory = 256 << 20;  // bytes of rows: several times any last-level cache share
constexpr std::int64_t kFromCache = 256 << 10;

// Memory of rows shared by all benchmarks, in huge pages as weights are. Ordinary numbers whatever the type: bytes
// 0x3c are 0.01 as float or bfloat16 and 1.06 as half.
char* weights(std::int64_t bytes) {
  static char* memory = [] {
    auto* data = static_cast<char*>(std::aligned_alloc(1 << 21, kFromMemory + (1 << 21)));
    advise_huge_pages(data, kFromMemory + (1 << 21));
    std::memset(data, 0x3c, kFromMemory + (1 << 21));
    return data;
  }();
  return bytes <= kFromMemory ? memory : nullptr;
}

// 64-byte aligned ones, room for 300,000.
float* vector_of(std::int64_t floats) {
  static auto* memory = static_cast<float*>(std::aligned_alloc(64, 300032 * sizeof(float)));
  std::fill(memory, memory + floats, 1.0f);
  return memory;
}

float* vector_of_results(std::int64_t floats) {
  static std::vector<float> memory;
  memory.assign(static_cast<std::size_t>(floats), 0.0f);
  return memory.data();
}

// Calls use(row, rows after it) for rows, `step` at a time, over and over.
template <class Use>
void over_rows(benchmark::State& state, std::int64_t total, std::int64_t row_bytes, std::int64_t step, Use use) {
  char* base = weights(total);
  const std::int64_t rows = total / row_bytes / step * step;
  std::int64_t r = 0;
  for (auto _ : state) {
    const std::int64_t after = r + 2 * step <= rows ? r + step : 0;
    use(base + r * row_bytes, base + after * row_bytes);
    r = after;
  }
  state.SetBytesProcessed(static_cast<std::int64_t>(state.iterations()) * step * row_bytes);
}

using Run = void (*)(benchmark::State&, const KernelTable&, int dtype, std::int64_t n, std::int64_t total);

void dot_with(benchmark::State& state, DotFn dot, PrepareFn prepare, int dtype, std::int64_t n, std::int64_t total) {
  float* plain = vector_of(n);
  std::vector<float> memory(static_cast<std::size_t>(padded(n)) + 16);
  auto* x = reinterpret_cast<float*>((reinterpret_cast<std::uintptr_t>(memory.data()) + 63) / 64 * 64);
  if (prepare != nullptr) prepare(plain, n, x);
  const void* x_T[1] = {prepare != nullptr ? x : plain};
  const std::int64_t bytes = row_bytes(static_cast<DType>(dtype), n);
  float out[kDotRows];
  over_rows(state, total, bytes, kDotRows, [&](const char* row, const char* after) {
    const void *rows[kDotRows], *next[kDotRows];
    for (std::int64_t i = 0; i < kDotRows; ++i) {
      rows[i] = row + i * bytes;
      next[i] = after + i * bytes;
    }
    dot(rows, kDotRows, x_T, 1, n, out, next);
    benchmark::DoNotOptimize(out);
  });
}

void run_dot(benchmark::State& state, const KernelTable& table, int dtype, std::int64_t n, std::int64_t total) {
  dot_with(state, table.dot[dtype], table.prepare[dtype], dtype, n, total);
}

void run_dot_a8(benchmark::State& state, const KernelTable& table, int dtype, std::int64_t n, std::int64_t total) {
  dot_with(state, table.dot_a8[dtype], table.prepare_a8[dtype], dtype, n, total);
}

void run_axpy(benchmark::State& state, const KernelTable& table, int dtype, std::int64_t n, std::int64_t total) {
  float* y = vector_of(padded(n));
  const float h[kAxpyRows] = {1e-3f, -1e-3f, 1e-3f, -1e-3f};
  const std::int64_t bytes = row_bytes(static_cast<DType>(dtype), n);
  over_rows(state, total, bytes, kAxpyRows, [&](const char* row, const char* after) {
    const void *rows[kAxpyRows], *next[kAxpyRows];
    for (std::int64_t i = 0; i < kAxpyRows; ++i) {
      rows[i] = row + i * bytes;
      next[i] = after + i * bytes;
    }
    table.axpy[dtype](y, rows, h, kAxpyRows, n, next);
    benchmark::ClobberMemory();
  });
}

// Once per token: from cache alone; the counter is of floats.
void run_prepare_with(benchmark::State& state, PrepareFn prepare, std::int64_t n) {
  float* x = vector_of(2 * padded(n));
  for (auto _ : state) {
    prepare(x, n, x + padded(n));
    benchmark::ClobberMemory();
  }
  state.SetBytesProcessed(static_cast<std::int64_t>(state.iterations()) * n * 4);
}

void run_prepare(benchmark::State& state, const KernelTable& table, int dtype, std::int64_t n, std::int64_t) {
  run_prepare_with(state, table.prepare[dtype], n);
}

void run_prepare_a8(benchmark::State& state, const KernelTable& table, int dtype, std::int64_t n, std::int64_t) {
  run_prepare_with(state, table.prepare_a8[dtype], n);
}

void run_restore(benchmark::State& state, const KernelTable& table, int dtype, std::int64_t n, std::int64_t) {
  float* y = vector_of(2 * padded(n));
  for (auto _ : state) {
    table.restore[dtype](y, n, y + padded(n));
    benchmark::ClobberMemory();
  }
  state.SetBytesProcessed(static_cast<std::int64_t>(state.iterations()) * n * 4);
}

void run_prepare_gemm(benchmark::State& state, const KernelTable& table, int dtype, std::int64_t n, std::int64_t) {
  run_prepare_with(state, table.prepare_gemm[dtype], n);
}

void run_panel(benchmark::State& state, const KernelTable& table, int dtype, std::int64_t n, std::int64_t total) {
  const std::int64_t bytes = row_bytes(static_cast<DType>(dtype), n);
  auto* panel = reinterpret_cast<char*>(vector_of(panel_bytes(n) / 4));
  over_rows(state, total, bytes, kPanelRows, [&](const char* row, const char*) {
    const void* rows[kPanelRows];
    for (std::int64_t i = 0; i < kPanelRows; ++i) rows[i] = row + i * bytes;
    table.panel[dtype](rows, n, panel);
    benchmark::ClobberMemory();
  });
}

// A block at a time, for one token.
void run_dot_blocks(benchmark::State& state, const KernelTable& table, int dtype, std::int64_t n, std::int64_t total) {
  float* plain = vector_of(2 * padded(n));
  void* x = plain + padded(n);
  table.prepare_gemm[dtype](plain, n, x);
  float out[kPanelRows];
  over_rows(state, total, row_bytes(static_cast<DType>(dtype), n), kPanelRows, [&](const char* block, const char*) {
    table.dot_blocks[dtype](block, 1, &x, 1, n, out, kPanelRows);
    benchmark::DoNotOptimize(out);
  });
}

// The same of 16 rows in their own order.
void run_dot_lanes(benchmark::State& state, const KernelTable& table, int dtype, std::int64_t n, std::int64_t total) {
  float* plain = vector_of(2 * padded(n));
  void* x = plain + padded(n);
  table.prepare_gemm[dtype](plain, n, x);
  float out[kPanelRows];
  const std::int64_t bytes = row_bytes(static_cast<DType>(dtype), n);
  over_rows(state, total, bytes, kPanelRows, [&](const char* row, const char*) {
    const void* rows[kPanelRows];
    for (std::int64_t r = 0; r < kPanelRows; ++r) rows[r] = row + r * bytes;
    table.dot_lanes[dtype](rows, nullptr, &x, 1, n, out, kPanelRows);
    benchmark::DoNotOptimize(out);
  });
}

// 64 tokens through two panels; the counter is of multiply-adds.
void run_gemm(benchmark::State& state, const KernelTable& table, int dtype, std::int64_t n, std::int64_t) {
  constexpr std::int64_t kTokens = 64, kRows = kGemmPanels * kPanelRows;
  float* x = vector_of((kTokens + 1) * padded(n));
  float* out = vector_of_results(kTokens * kRows);
  const void *x_T[kTokens], *panels[kGemmPanels], *rows[kPanelRows];
  for (std::int64_t t = 0; t < kTokens; ++t) {
    table.prepare_gemm[dtype](x + kTokens * padded(n), n, x + t * padded(n));
    x_T[t] = x + t * padded(n);
  }
  for (std::int64_t i = 0; i < kPanelRows; ++i) rows[i] = weights(0) + i * row_bytes(static_cast<DType>(dtype), n);
  for (std::int64_t p = 0; p < kGemmPanels; ++p) {
    char* panel = weights(0) + (p + 1) * (1 << 20);
    table.panel[dtype](rows, n, panel);
    panels[p] = panel;
  }
  for (auto _ : state) {
    table.gemm[dtype](panels, kGemmPanels, x_T, kTokens, n, out, kRows);
    benchmark::ClobberMemory();
  }
  state.SetItemsProcessed(static_cast<std::int64_t>(state.iterations()) * kTokens * kRows * n);
}

// 128 tokens, 256 rows of 128 columns; the counter is of multiply-adds.
void run_addmm(benchmark::State& state, const KernelTable& table, int, std::int64_t n, std::int64_t) {
  constexpr std::int64_t kTokens = 128, kCount = 256, kWidth = 128;
  const float* h = vector_of(kTokens * kCount + kCount * n);
  float* y = vector_of_results(kTokens * n);
  const float* h_T[kTokens];
  float* y_T[kTokens];
  for (std::int64_t t = 0; t < kTokens; ++t) {
    h_T[t] = h + t * kCount;
    y_T[t] = y + t * n;
  }
  for (auto _ : state) {
    table.addmm(h_T, h + kTokens * kCount, n, kCount, 0, kWidth, y_T, kTokens);
    benchmark::ClobberMemory();
  }
  state.SetItemsProcessed(static_cast<std::int64_t>(state.iterations()) * kTokens * kCount * kWidth);
}

void run_read(benchmark::State& state, const KernelTable& table, int, std::int64_t n, std::int64_t total) {
  over_rows(state, total, n, 4,
            [&](const char* row, const char*) { benchmark::DoNotOptimize(table.read(row, 4 * n)); });
}

void run_count_signs(benchmark::State& state, const KernelTable& table, int, std::int64_t n, std::int64_t total) {
  constexpr std::int64_t kRows = 64;
  std::int32_t out[kRows];
  const float* x = vector_of(n);
  over_rows(state, total, sign_bytes(n), kRows, [&](const char* row, const char*) {
    table.count_signs(row, kRows, x, sign_bytes(n) / 8, out);
    benchmark::DoNotOptimize(out);
  });
}

// Four query heads of one token over keys and values of n bytes a position together.
void run_attend(benchmark::State& state, const KernelTable& table, int dtype, std::int64_t n, std::int64_t total) {
  constexpr std::int64_t kGroup4 = 4;
  const auto kv = static_cast<DType>(dtype);
  const std::int64_t width =
      kv == DType::kQ4 ? n / 16 / 18 * 32 : n / 16 / row_bytes(kv, 1) - (kv == DType::kI8 ? kKvScaleBytes : 0);
  const std::uint64_t mask[1] = {~std::uint64_t{0}};
  float* memory = vector_of(kGroup4 * (2 * width + kAttendWord + 2) + kAttendWord * (width + kGroup));
  AttendArgs a{memory, 1, kGroup4, width, width, nullptr, nullptr, n / 16, n / 16, mask, 1, 0, 1, 1e-3f};
  a.scores = memory + kGroup4 * width;
  a.y = a.scores + kGroup4 * kAttendWord;
  a.max = a.y + kGroup4 * width;
  a.sum = a.max + kGroup4;
  a.unpacked = a.sum + kGroup4;
  over_rows(state, total, n / 16, 2 * kAttendWord, [&](const char* row, const char*) {
    a.key = row;
    a.value = row + kAttendWord * a.key_stride;
    table.attend[dtype](a);
    benchmark::ClobberMemory();
  });
}

void add(const KernelTable& table, const std::string& name, Run run, int dtype, bool from_memory) {
  for (const std::int64_t n : {512, 2048, 4096}) {  // 512: rank of a predictor
    for (const bool memory : {false, true}) {
      if (memory && !from_memory) continue;
      const std::string full =
          std::string(table.isa) + "/" + name + "/" + std::to_string(n) + (memory ? "/memory" : "/cache");
      const std::int64_t total = memory ? kFromMemory : kFromCache;
      benchmark::RegisterBenchmark(full.c_str(),
                                   [=, &table](benchmark::State& state) { run(state, table, dtype, n, total); });
    }
  }
}

int dtype_of(const char* name) {
  return static_cast<int>(
      std::find_if(kDTypeNames, kDTypeNames + kDTypes, [&](auto k) { return !std::strcmp(k, name); }) - kDTypeNames);
}

// What kernels/list.inc lists under this table's own name; what it has from others is benchmarked there.
void add_kernels(const KernelTable& table) {
#define PI2_ADD(isa_, kernel, dtype, from_memory) \
  if (std::strcmp(table.isa, #isa_) == 0)         \
    add(table, std::string(#kernel) + "/" + #dtype, &run_##kernel, dtype_of(#dtype), from_memory);
#define PI2_DOT(isa_, dtype) PI2_ADD(isa_, dot, dtype, true)
#define PI2_DOT_A8(isa_, dtype) PI2_ADD(isa_, dot_a8, dtype, true)
#define PI2_AXPY(isa_, dtype) PI2_ADD(isa_, axpy, dtype, true)
#define PI2_PREPARE(isa_, dtype) PI2_ADD(isa_, prepare, dtype, false)
#define PI2_PREPARE_A8(isa_, dtype) PI2_ADD(isa_, prepare_a8, dtype, false)
#define PI2_RESTORE(isa_, dtype) PI2_ADD(isa_, restore, dtype, false)
#define PI2_PREPARE_GEMM(isa_, dtype) PI2_ADD(isa_, prepare_gemm, dtype, false)
#define PI2_PANEL(isa_, dtype) PI2_ADD(isa_, panel, dtype, true)
#define PI2_DOT_BLOCKS(isa_, dtype) PI2_ADD(isa_, dot_blocks, dtype, true)
#define PI2_DOT_LANES(isa_, dtype) PI2_ADD(isa_, dot_lanes, dtype, true)
#define PI2_GEMM(isa_, dtype) PI2_ADD(isa_, gemm, dtype, false)
#define PI2_ADDMM(isa_) PI2_ADD(isa_, addmm, f32, false)
#define PI2_READ(isa_) PI2_ADD(isa_, read, i8, true)
#define PI2_SIGNS(isa_) PI2_ADD(isa_, count_signs, i8, true)
#define PI2_ATTEND(isa_, dtype) PI2_ADD(isa_, attend, dtype, true)
#include "kernels/list.inc"
#include "kernels/list_end.inc"
#undef PI2_ADD
}

// Decode of one FFN of the size of Mistral 7B's (hidden 4096), its active neurons spread at random.
void run_layer(benchmark::State& state, DType dtype, bool int8_activations, std::int64_t percent, int threads) {
  constexpr std::int64_t kHidden = 4096;
  const std::int64_t neuron = 3 * row_bytes(dtype, kHidden);
  FfnArgs args;
  args.hidden = kHidden;
  args.neurons = std::min<std::int64_t>(14336, kFromMemory / neuron);
  args.tokens = 1;
  args.neuron_rows = weights(args.neurons * neuron);
  args.w_dtype = dtype;
  args.int8_activations = int8_activations;
  const std::vector<float> x(kHidden, 1.0f);
  std::vector<float> y(kHidden);
  args.x = x.data();
  args.y = y.data();
  args.activation = Activation::kIdentity;  // so that every active neuron is computed to the end
  // Another choice of neurons for each call, so that none stays in cache.
  constexpr std::int64_t kChoices = 16;
  std::mt19937 rng(1);
  std::vector<std::int64_t> order(static_cast<std::size_t>(args.neurons));
  std::iota(order.begin(), order.end(), 0);
  const std::int64_t active = args.neurons * percent / 100;
  std::vector<std::uint8_t> masks(static_cast<std::size_t>(kChoices * args.neurons));
  for (std::int64_t c = 0; c < kChoices; ++c) {
    std::shuffle(order.begin(), order.end(), rng);
    for (std::int64_t i = 0; i < active; ++i)
      masks[static_cast<std::size_t>(c * args.neurons + order[static_cast<std::size_t>(i)])] = 1;
  }
  ThreadPool pool(threads);
  std::int64_t choice = 0;
  for (auto _ : state) {
    args.active = masks.data() + choice * args.neurons;
    choice = (choice + 1) % kChoices;
    sparse_ffn(args, pool.parallel());
  }
  state.SetBytesProcessed(static_cast<std::int64_t>(state.iterations()) * active * neuron);
}

void add_layers() {
  const struct {
    const char* name;
    DType dtype;
    bool int8_activations;
  } kinds[] = {{"bf16", DType::kBF16, false},
               {"q4", DType::kQ4, false},
               {"q4_a8", DType::kQ4, true},
               {"q8", DType::kQ8, false},
               {"q8_a8", DType::kQ8, true}};
  for (const auto& kind : kinds) {
    for (const int threads : {1, 2}) {
      for (const std::int64_t percent : {2, 5, 10, 20, 50, 100}) {
        const std::string name = std::string("layer/") + kind.name + "/threads:" + std::to_string(threads) +
                                 "/active:" + std::to_string(percent) + "%";
        benchmark::RegisterBenchmark(name.c_str(), [=](benchmark::State& state) {
          run_layer(state, kind.dtype, kind.int8_activations, percent, threads);
        })->UseRealTime();
      }
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  int count = 0;
  const KernelTable* const* tables = available_kernels(&count);
  for (int i = 0; i < count; ++i) add_kernels(*tables[i]);
  add_layers();
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
  return 0;
}
