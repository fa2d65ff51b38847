// Plain types shared by the core, the kernels and the bindings. No framework is included here (design D1).
#pragma once

#include <cstdint>

namespace pi2 {

enum class DType : int32_t { kF32 = 0, kBF16 = 1, kF16 = 2, kI8 = 3 };
constexpr int kDTypes = 4;

constexpr int64_t dtype_bytes(DType dtype) { return dtype == DType::kF32 ? 4 : dtype == DType::kI8 ? 1 : 2; }

// Order of torch_pi2.ops.ACTIVATIONS.
enum class Activation : int32_t { kRelu = 0, kRelu2, kSilu, kGelu, kGeluTanh, kIdentity };

// Runs body(i) for every i in [0, n), on whatever threads the host framework owns; returns when all are done.
// The core never creates compute threads of its own inside PyTorch (design D9).
struct ParallelFor {
  using Body = void (*)(void* context, int64_t index);
  void (*run)(void* host, int64_t n, Body body, void* context) = nullptr;
  void* host = nullptr;
  int threads = 1;
};

// A ParallelFor that runs everything on the calling thread.
ParallelFor serial();

}  // namespace pi2
