// What a model's generation_config.json says of choosing tokens.
#pragma once

#include <string>
#include <vector>

#include "fields.h"
#include "sampler.h"

namespace pi2::runner {

struct GenerationConfig {
  Sampling sampling;  // without the temperature: answers are greedy unless one is asked for
  std::vector<std::string> stop;
};

// What `fields` has of these, but for the temperature. Throws Problem: one is of another type.
void read_sampling(const Fields& fields, Sampling& s);

// `where` begins messages. Throws Problem: a setting makes no sense.
GenerationConfig generation_config(const Json& json, const std::string& where);

}  // namespace pi2::runner
