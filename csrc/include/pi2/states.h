// Steps of layers with recurrent states, one token of each sequence at a time: linear attention and short convolutions.
#pragma once

#include <cstdint>

#include "pi2/types.h"

namespace pi2 {

// Per sequence and head, S [rows, width]: S <- S diag(decay) + (S a) b' + v k', then y = S r. The order of each sum
// depends on the width (dense rows) or on nothing (dense columns) alone.
struct RecurrenceArgs {
  std::int64_t batch = 0, heads = 0, groups = 0;  // groups: of heads that share k and r
  std::int64_t rows = 0, width = 0;
  float* state = nullptr;  // [batch, heads, rows, width]; transposed: [batch, heads, width, rows]
  bool transposed = false;
  const float* decay = nullptr;  // [batch, heads, width], or [batch, heads] with one_decay
  bool one_decay = false;
  const float *v = nullptr, *k = nullptr, *r = nullptr;  // [batch, heads, rows], [batch, groups, width] twice
  const float *a = nullptr, *b = nullptr;                // [batch, heads, width]; null: none
  float* y = nullptr;                                    // [batch, heads, rows]
};

void recurrence(const RecurrenceArgs& args, const ParallelFor& parallel);

// A causal convolution of each channel: x is appended to the state, whose first number leaves it; y is the sum of the
// last `taps` numbers times the weight, plus the bias, with SiLU if `silu`.
struct ConvStepArgs {
  DType dtype = DType::kF32;                                   // of all
  std::int64_t batch = 0, channels = 0, length = 0, taps = 0;  // length: of the state, at least taps - 1
  bool silu = false;
  const void* x = nullptr;       // [batch, channels]
  void* state = nullptr;         // [batch, channels, length]
  const void* weight = nullptr;  // [channels, taps]
  const void* bias = nullptr;    // [channels]; null: none
  void* y = nullptr;             // [batch, channels]
};

void conv_step(const ConvStepArgs& args, const ParallelFor& parallel);

}  // namespace pi2
