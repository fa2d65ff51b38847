// Parses the activations that operators take as text.
#pragma once

#include <cmath>
#include <iterator>
#include <locale>
#include <sstream>
#include <string>

#include "pi2/types.h"

namespace pi2::binding {

// Parses a name, or name[in=1.702,out=0.5,limit=7,plus=1,sigmas=1.6,second=1,rms=1e-5] with some of these. Returns
// whether it is valid.
inline bool read_activation(const std::string& text, Activation* activation, Shaping* shaping) {
  const std::size_t open = text.find('[');
  const std::string name = text.substr(0, open);
  std::size_t at = 0;
  while (at < std::size(kActivations) && name != kActivations[at]) ++at;
  if (at == std::size(kActivations)) return false;
  *activation = static_cast<Activation>(at);
  *shaping = Shaping();
  if (open == std::string::npos) return true;
  if (text.back() != ']') return false;
  std::size_t start = open + 1;
  while (start < text.size()) {
    const std::size_t stop = text.find_first_of(",]", start);
    const std::size_t equal = text.find('=', start);
    if (stop == std::string::npos || equal == std::string::npos || equal >= stop) return false;
    const std::string key = text.substr(start, equal - start), number = text.substr(equal + 1, stop - equal - 1);
    std::istringstream in(number);
    in.imbue(std::locale::classic());  // a decimal point in every locale
    float value = 0;
    if (!(in >> value) || in.peek() != std::istringstream::traits_type::eof() || !std::isfinite(value)) return false;
    if (key == "in")
      shaping->in = value;
    else if (key == "out")
      shaping->out = value;
    else if (key == "limit" && value > 0)
      shaping->limit = value;
    else if (key == "plus")
      shaping->plus = value;
    else if (key == "sigmas")
      shaping->sigmas = value;
    else if (key == "second" && value == 1)
      shaping->second = true;
    else if (key == "rms" && value > 0)
      shaping->rms = value;
    else
      return false;
    start = stop + 1;
  }
  shaping->plain = false;
  return shaping->second + shaping->cuts() + shaping->norms() <= 1;
}

}  // namespace pi2::binding
