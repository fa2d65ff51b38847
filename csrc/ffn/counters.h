#pragma once

#include "pi2/ffn.h"

namespace pi2 {

// Adds to the process-wide counters; called once per chunk, not per neuron.
void count(const Counters& add);

}  // namespace pi2
