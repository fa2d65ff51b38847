// pi2_parts_test sampler | stops | tokenizer FILE COUNT | stream FILE: tests without ExecuTorch, so that sanitizers can
// run them.
//   sampler              draws from the same tokens as sorting the whole vocabulary
//   stops                text in random pieces ends where it would in one piece
//   tokenizer FILE COUNT random changes of a tokenizer.json: refused by name, or text survives encoding and decoding
//   stream FILE          for every line of standard input, [prompt, answer] in tokens: pieces and text of the answer
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <iostream>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "cpus.h"
#include "sampler.h"
#include "stops.h"
#include "tokenizer/text_stream.h"

namespace pi2::runner {
namespace {

using Random = std::mt19937_64;

int failed(const std::string& what) {
  std::fprintf(stderr, "pi2_parts_test: %s\n", what.c_str());
  return 1;
}

// As in sampler.cc, but over all tokens in order.
std::int64_t chosen(const std::vector<float>& logits, double temperature, double top_p, std::int64_t top_k,
                    double min_p, Random& random) {
  const float best = *std::max_element(logits.begin(), logits.end());
  std::vector<double> shares;
  double sum = 0;
  for (const float logit : logits) {
    shares.push_back(std::exp((static_cast<double>(logit) - best) / temperature));
    sum += shares.back();
  }
  std::vector<std::size_t> order(logits.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](auto a, auto b) { return shares[a] > shares[b]; });
  if (top_k > 0 && static_cast<std::size_t>(top_k) < order.size()) {
    order.resize(static_cast<std::size_t>(top_k));
    sum = 0;
    for (const std::size_t token : order) sum += shares[token];
  }
  std::size_t count = 0;
  double most = 0;
  while (count < order.size() && most < top_p * sum) most += shares[order[count++]];
  if (min_p > 0) {
    while (shares[order[count - 1]] < min_p) --count;
    most = 0;
    for (std::size_t i = 0; i < count; ++i) most += shares[order[i]];
  }
  double draw = static_cast<double>(random() >> 11) * 0x1p-53 * most;
  for (std::size_t i = 0; i < count; ++i) {
    draw -= shares[order[i]];
    if (draw < 0) return static_cast<std::int64_t>(order[i]);
  }
  return static_cast<std::int64_t>(order[count - 1]);
}

int check_sampler() {
  Random random(1);
  for (int round = 0; round < 400; ++round) {
    const std::size_t vocab = round % 4 == 0 ? 1 + random() % 3 : 1 + random() % 3000;
    std::normal_distribution<float> normal;
    std::vector<float> logits(vocab);
    for (float& logit : logits) {
      logit = static_cast<float>(round % 7) * normal(random);  // all are equal, or
      if (round % 3 == 0) logit = std::round(logit);           // some
    }
    const double temperature = std::vector<double>{1e-3, 0.7, 1, 50}[random() % 4];
    const double top_p = std::vector<double>{1e-300, 1e-6, 0.5, 0.9, 0.999, 1 - 1e-12, 1 - 0x1p-53}[random() % 7];
    const std::uint64_t seed = random();
    const std::int64_t top_k = random() % 2 == 0 ? 0 : static_cast<std::int64_t>(1 + random() % (vocab + 2));
    const double min_p = random() % 2 == 0 ? 0 : std::vector<double>{1e-9, 0.05, 0.5, 1}[random() % 4];
    const double penalty = random() % 2 == 0 ? 1 : std::vector<double>{0.5, 1.1, 3}[random() % 3];
    Sampler sampler({temperature, top_p, min_p, penalty, top_k}, seed);
    std::vector<float> penalised = logits;
    for (std::size_t token = 0; token < vocab; token += 3) {
      sampler.add(static_cast<std::int64_t>(token));
      sampler.add(static_cast<std::int64_t>(token));
      float& logit = penalised[token];
      logit = logit < 0 ? logit * static_cast<float>(penalty) : logit / static_cast<float>(penalty);
    }
    Random same(seed);
    for (int i = 0; i < 8; ++i) {
      const std::int64_t expected = chosen(penalised, temperature, top_p, top_k, min_p, same);
      const std::int64_t found = sampler.choose(logits.data(), static_cast<std::int64_t>(vocab));
      if (found != expected) {
        return failed("sampler, round " + std::to_string(round) + ": expected token " + std::to_string(expected) +
                      ", found " + std::to_string(found));
      }
    }
  }
  return 0;
}

int check_stops() {
  Random random(2);
  const auto draw = [&](std::size_t most) {
    std::string text;
    for (std::uint64_t n = 1 + random() % most; n > 0; --n) text += "ab\n"[random() % 3];
    return text;
  };
  for (int round = 0; round < 5000; ++round) {
    std::vector<std::string> strings;
    for (std::uint64_t n = random() % 4; n > 0; --n) strings.push_back(draw(5));
    const std::string text = draw(40);
    std::size_t end = std::string::npos;
    for (std::size_t n = 1; n <= text.size() && end == std::string::npos; ++n) {
      for (const std::string& stop : strings) {
        if (text.substr(0, n).ends_with(stop)) end = std::min(end, n - stop.size());
      }
    }
    Stops stops(strings);
    std::string shown;
    for (std::size_t at = 0; at < text.size();) {
      const std::size_t bytes = 1 + random() % 4;
      const std::string piece = stops.add(text.substr(at, bytes));
      shown += piece;
      at += bytes;
      if (text.substr(0, end).compare(0, shown.size(), shown) != 0) return failed("stops: text too soon");
      // only text that may begin a stop string is held back
      if (!stops.reached() && strings.empty() && shown.size() < std::min(at, text.size())) return failed("stops: held");
    }
    if (stops.reached() != (end != std::string::npos)) return failed("stops: not where one is");
    shown += stops.rest();
    if (shown != text.substr(0, end)) return failed("stops: expected " + text.substr(0, end) + ", found " + shown);
  }
  return 0;
}

// A random value of the file; usually not one of the vocabulary.
Json& somewhere(Json& json, Random& random) {
  Json* at = &json;
  while (at->is_structured() && !at->empty() && random() % 8 != 0) {
    at = &*std::next(at->begin(), static_cast<std::ptrdiff_t>(random() % at->size()));
  }
  return *at;
}

void change(Json& json, Random& random) {
  const Json values[] = {nullptr,        true,           0,        -1,          7,
                         0xffffffffu,    1ull << 63,     1e300,    "",          "a",
                         "\xef\xbf\xbd", "(?:",          "[a-z]+", "ByteLevel", "Metaspace",
                         "Sequence",     "ByteFallback", "Strip",  "Prepend",   "Split",
                         Json::array(),  Json::object()};
  Json& value = somewhere(json, random);
  if (value.is_structured() && !value.empty() && random() % 2 == 0) {
    const auto which = std::next(value.begin(), static_cast<std::ptrdiff_t>(random() % value.size()));
    value.erase(which);
  } else if (random() % 3 == 0) {
    value = somewhere(json, random);  // a value from elsewhere in the file
  } else {
    value = values[random() % std::size(values)];
  }
}

int check_tokenizer(const std::string& file, int count) {
  const Json whole = read_json(file, 1 << 30);
  const std::string changed = file + ".changed";
  const std::string text =
      " The tool's 12 caf\xc3\xa9 \xe6\x97\xa5\xe6\x9c\xac\xf0\x9f\x99\x82 <s>e\xcc\x81\n\tdef f(x):";
  Random random(count);
  int refused = 0;
  for (int round = 0; round < count; ++round) {
    Json json = whole;
    for (std::uint64_t times = random() % 3 + (round > 0); times > 0; --times) change(json, random);
    std::ofstream(changed, std::ios::binary) << json.dump(-1, ' ', false, Json::error_handler_t::replace);
    try {
      const Tokenizer tokenizer(changed);
      std::vector<std::int64_t> ids = tokenizer.encode(text, true);
      for (int i = 0; i < 20; ++i) ids.push_back(static_cast<std::int64_t>(random() % 700) - 2);
      TextStream stream(tokenizer,
                        {ids.begin(), ids.begin() + static_cast<std::ptrdiff_t>(random() % (ids.size() + 1))});
      std::string all;
      for (const std::int64_t id : ids) all += stream.add(id);
      all += stream.rest() + stream.text();
      Json(all).dump();  // throws unless it is UTF-8
    } catch (const Problem&) {
      ++refused;
    } catch (const std::exception& error) {
      return failed("round " + std::to_string(round) + ", " + changed + ": " + error.what());
    }
  }
  std::remove(changed.c_str());
  std::printf("%d of %d refused\n", refused, count);
  return 0;
}

int stream(const std::string& file) {
  const Tokenizer tokenizer(file);
  for (std::string line; std::getline(std::cin, line);) {
    const auto given = Json::parse(line).get<std::vector<std::vector<std::int64_t>>>();
    TextStream text(tokenizer, given.at(0));
    Json pieces = Json::array();
    for (const std::int64_t token : given.at(1)) pieces.push_back(text.add(token));
    pieces.push_back(text.rest());
    std::cout << Json{{"pieces", pieces}, {"text", text.text()}}.dump() << '\n';
  }
  return 0;
}

// The roles of --cpus auto with the system's figures in `root`.
int cpus(const std::string& root, const std::string& allowed) {
  std::cout << report_of(auto_roles(root, parse_cpus("--cpus", allowed))).dump() << '\n';
  return 0;
}

}  // namespace
}  // namespace pi2::runner

int main(int argc, char** argv) {
  const std::string what = argc > 1 ? argv[1] : "";
  if (what == "sampler" && argc == 2) return pi2::runner::check_sampler();
  if (what == "stops" && argc == 2) return pi2::runner::check_stops();
  if (what == "tokenizer" && argc == 4) return pi2::runner::check_tokenizer(argv[2], std::stoi(argv[3]));
  if (what == "stream" && argc == 3) return pi2::runner::stream(argv[2]);
  if (what == "cpus" && argc == 4) return pi2::runner::cpus(argv[2], argv[3]);
  return pi2::runner::failed("expected sampler, stops, tokenizer FILE COUNT, stream FILE, or cpus FOLDER LIST");
}
