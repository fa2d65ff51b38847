// One number of the result from one number of each operand, with PyTorch's rounding: floats in float32, then to the
// result's type.
#pragma once

#include "pi2/step_program.h"

namespace pi2 {

struct Strided {
  char* data;
  Element element;
  std::int64_t sizes[StepProgram::kMostRank], strides[StepProgram::kMostRank];
};

std::int64_t element_bytes(Element element);

// y = op(a, b); b may be null: then `constant` for the binary ones. All have `rank` dimensions of y's sizes.
void elementwise(StepOp op, int rank, const Strided& y, const Strided& a, const Strided* b, double constant);

// The index of the first NaN, or of the first largest of n contiguous numbers.
std::int64_t argmax_of(const float* x, std::int64_t n);

// The sum of n contiguous numbers divided by n, with the bits of PyTorch's torch.mean.
float mean_of(const float* x, std::int64_t n);

}  // namespace pi2
