// Names that operators take, in the order of the enums that they stand for.
#pragma once

#include <iterator>

#include "pi2/types.h"

namespace pi2::binding {

// torch_pi2.ops.ACTIVATIONS.
constexpr const char* kActivations[] = {"relu", "relu2", "silu", "gelu", "gelu_tanh", "identity"};
static_assert(std::size(kActivations) == kActivationCount);

}  // namespace pi2::binding
