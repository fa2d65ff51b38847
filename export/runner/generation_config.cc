#include "generation_config.h"

namespace pi2::runner {

void read_sampling(const Fields& fields, Sampling& s) {
  if (fields.has("top_p")) s.top_p = fields.real("top_p");
  if (fields.has("min_p")) s.min_p = fields.real("min_p");
  if (fields.has("repetition_penalty")) s.repetition_penalty = fields.real("repetition_penalty");
  if (fields.has("top_k")) s.top_k = fields.number("top_k");
}

GenerationConfig generation_config(const Json& json, const std::string& where) {
  const Fields fields(json, where);
  GenerationConfig found;
  read_sampling(fields, found.sampling);
  if (fields.has("stop_strings")) found.stop = fields.texts("stop_strings");
  check(found.sampling, where + ", ");
  return found;
}

}  // namespace pi2::runner
