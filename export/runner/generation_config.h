// The sampling settings of a model's generation_config.json.
#pragma once

#include <string>
#include <vector>

#include "fields.h"
#include "sampler.h"

namespace pi2::runner {

struct GenerationConfig {
  Sampling sampling;  // without the temperature: answers are greedy unless the request sets one
  std::vector<std::string> stop;
};

// Reads the settings in `fields`, except the temperature. Throws Problem for wrong types.
void read_sampling(const Fields& fields, Sampling& s);

// `where` begins error messages. Throws Problem for invalid settings.
GenerationConfig generation_config(const Json& json, const std::string& where);

}  // namespace pi2::runner
