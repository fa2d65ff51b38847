// Prompts: many tokens at once, so that unpacking weights pays. int8 activations. Sums are taken in another order than
// for few tokens (kernels.h: gemm), the same for any number of threads and whatever the other tokens.
#pragma once

#include "pi2/ffn.h"
#include "pi2/kernels.h"
#include "pi2/linear.h"

namespace pi2 {

// Whether a call of this many tokens uses the panels of this table.
bool takes_panels(const KernelTable& table, DType w_dtype, bool int8_activations, std::int64_t tokens);

void linear_prompt(const LinearArgs& args, const KernelTable& table, const ParallelFor& parallel);

// Computes gate and up of every neuron, and down rows of those that fire. args.active must be null.
void ffn_prompt(const FfnArgs& args, const KernelTable& table, const ParallelFor& parallel);

}  // namespace pi2
