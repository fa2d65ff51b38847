// Prompts: many tokens at once, so that unpacking a weight is worth its while. int8 activations; sums have another
// order than those of a few tokens (kernels.h: gemm), the same for any number of threads and any company.
#pragma once

#include "pi2/ffn.h"
#include "pi2/kernels.h"
#include "pi2/linear.h"

namespace pi2 {

// Whether so many tokens go through the panels of this table.
bool takes_panels(const KernelTable& table, DType w_dtype, bool int8_activations, std::int64_t tokens);

void linear_prompt(const LinearArgs& args, const KernelTable& table, const ParallelFor& parallel);

// Every neuron's gate and up; down rows of those that fire. args.active is null.
void ffn_prompt(const FfnArgs& args, const KernelTable& table, const ParallelFor& parallel);

}  // namespace pi2
