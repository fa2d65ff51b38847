// Mixtures of experts: a counting sort of (token, slot) pairs by expert, one call per expert, a sum per token.
#include "pi2/experts.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "base/convert.h"
#include "base/parallel.h"
#include "base/scratch.h"
#include "pi2/kernels.h"

namespace pi2 {
namespace {

constexpr std::int64_t kTinyNumbers = 1 << 18;  // below this, waking a thread costs more than converting or adding

// `count` elements of T from this thread's scratch.
template <class T>
T* take(Scratch slot, std::int64_t count) {
  static_assert(sizeof(T) % sizeof(float) == 0);
  return reinterpret_cast<T*>(scratch(slot, count * static_cast<std::int64_t>(sizeof(T) / sizeof(float))));
}

std::string check_index(const ExpertsArgs& args) {
  for (std::int64_t i = 0; i < args.tokens * args.slots; ++i)
    if (args.index[i] < 0 || args.index[i] > args.experts)
      return "index: expected 0 to " + std::to_string(args.experts - 1) + ", or " + std::to_string(args.experts) +
             " for no expert, found " + std::to_string(args.index[i]) + " for token " + std::to_string(i / args.slots) +
             ", slot " + std::to_string(i % args.slots) + ". The router is of another model.";
  return "";
}

// One slice of tokens.
struct Slice {
  const ExpertsArgs& args;
  std::int64_t start, tokens;
  float* x_TH = nullptr;           // widened; null: x is float32
  const float* y_RH = nullptr;     // one row per (expert, token), experts ascending
  std::int64_t* row_TK = nullptr;  // row of y_RH; -1: no expert

  std::int64_t expert(std::int64_t token, std::int64_t slot) const {
    return args.index[(start + token) * args.slots + slot];
  }

  char* row(const void* matrix, std::int64_t token) const {
    const std::int64_t bytes = row_bytes(args.x_dtype, args.hidden);
    return const_cast<char*>(static_cast<const char*>(matrix)) + (start + token) * bytes;
  }

  void widen_token(std::int64_t t) { widen(row(args.x, t), args.x_dtype, x_TH + t * args.hidden, args.hidden); }

  void add_up(std::int64_t t) {
    // In y itself, or in the place of an input that is no longer needed.
    float* sum_H = x_TH == nullptr ? reinterpret_cast<float*>(row(args.y, t)) : x_TH + t * args.hidden;
    std::memset(sum_H, 0, static_cast<std::size_t>(args.hidden) * sizeof(float));
    for (std::int64_t j = 0; j < args.slots; ++j) {
      const std::int64_t r = row_TK[t * args.slots + j];
      if (r < 0) continue;
      const float weight = load_float(args.routing, args.routing_dtype, (start + t) * args.slots + j);
      const float* part_H = y_RH + r * args.hidden;
      for (std::int64_t k = 0; k < args.hidden; ++k) sum_H[k] += weight * part_H[k];
    }
    if (x_TH != nullptr) narrow(sum_H, row(args.y, t), args.x_dtype, args.hidden);
  }

  template <void (Slice::*step)(std::int64_t)>
  void each_token(const ParallelFor& parallel) {
    const bool tiny = tokens * args.slots * args.hidden < kTinyNumbers;
    Dynamic::run(
        tiny ? serial() : parallel, tokens, [](void* self, std::int64_t t) { (static_cast<Slice*>(self)->*step)(t); },
        this);
  }

  // Fills row_TK and `works`, which has room for every expert; y of a work points to its rows of `y`. Returns the
  // number of works.
  std::int64_t group(float* y, std::int64_t* ids, std::int64_t* pairs, std::int64_t* next_E, std::int64_t* last_E,
                     ExpertWork* works) {
    const std::int64_t experts = args.experts;
    std::fill(next_E, next_E + experts, 0);
    std::fill(last_E, last_E + experts, -1);
    for (std::int64_t t = 0; t < tokens; ++t) {
      for (std::int64_t j = 0; j < args.slots; ++j) {
        const std::int64_t e = expert(t, j);
        if (e == experts || last_E[e] == t) continue;
        last_E[e] = t;
        ++next_E[e];
      }
    }
    std::int64_t rows = 0, count = 0;
    for (std::int64_t e = 0; e < experts; ++e) {
      const std::int64_t n = next_E[e];
      next_E[e] = rows;
      last_E[e] = -1;
      if (n == 0) continue;
      const float* x = x_TH != nullptr ? x_TH : reinterpret_cast<const float*>(row(args.x, 0));
      works[count++] = {e, n, ids + rows, x, y + rows * args.hidden, args.hidden, pairs + rows};
      rows += n;
    }
    for (std::int64_t t = 0; t < tokens; ++t) {
      for (std::int64_t j = 0; j < args.slots; ++j) {
        const std::int64_t e = expert(t, j);
        if (e < experts && last_E[e] != t) {
          last_E[e] = t;
          pairs[next_E[e]] = (start + t) * args.slots + j;
          ids[next_E[e]++] = t;
        }
        row_TK[t * args.slots + j] = e < experts ? next_E[e] - 1 : -1;
      }
    }
    return count;
  }
};

class InMemory : public ExpertLayers {
 public:
  explicit InMemory(const ExpertStack& stack) : stack_(stack) {}

  std::string compute(const ExpertWork& work, const ParallelFor& parallel) override {
    FfnArgs layer = layer_of(stack_, work);
    layer.neuron_rows =
        static_cast<const char*>(layer.neuron_rows) + work.expert * layer.neurons * layer.neuron_bytes();
    predicted_ffn(predictor_of(stack_, work), layer, parallel);
    return "";
  }

 private:
  const ExpertStack& stack_;
};

}  // namespace

FfnArgs of_expert(FfnArgs layer, const ExpertWork& work) {
  const std::int64_t n = work.tokens, hidden = work.hidden;
  const float* x = work.x + work.ids[0] * hidden;
  if (work.ids[n - 1] - work.ids[0] != n - 1) {  // ids ascend, so equality means consecutive tokens
    float* gathered = take<float>(Scratch::kGathered, n * hidden);
    for (std::int64_t i = 0; i < n; ++i)
      std::memcpy(gathered + i * hidden, work.x + work.ids[i] * hidden,
                  static_cast<std::size_t>(hidden) * sizeof(float));
    x = gathered;
  }
  layer.x = x;
  layer.y = work.y;
  layer.x_dtype = DType::kF32;
  layer.tokens = n;
  return layer;
}

std::string mix_experts(const ExpertsArgs& args, ExpertLayers& layers, const ParallelFor& parallel) {
  const std::string problem = check_index(args);
  if (!problem.empty()) return problem;
  const std::int64_t slice = std::min(args.tokens, expert_slice(args.slots, args.hidden)), pairs = slice * args.slots;
  auto* ids = take<std::int64_t>(Scratch::kExpertIds, 3 * pairs + 2 * args.experts);
  auto* works = take<ExpertWork>(Scratch::kExpertWorks, args.experts);
  float* y_RH = take<float>(Scratch::kExpertResults, pairs * args.hidden);
  float* x_TH = args.x_dtype == DType::kF32 ? nullptr : take<float>(Scratch::kExpertInputs, slice * args.hidden);
  for (std::int64_t start = 0; start < args.tokens; start += slice) {
    Slice part{args, start, std::min(slice, args.tokens - start), x_TH, y_RH, ids};
    if (x_TH != nullptr) part.each_token<&Slice::widen_token>(parallel);
    std::int64_t* next_E = ids + 3 * pairs;
    const std::int64_t count = part.group(y_RH, ids + pairs, ids + 2 * pairs, next_E, next_E + args.experts, works);
    layers.announce(works, count, parallel);
    for (std::int64_t i = 0; i < count; ++i) {
      const std::string wrong = layers.compute(works[i], parallel);
      if (!wrong.empty()) return wrong;
    }
    part.each_token<&Slice::add_up>(parallel);
  }
  return "";
}

FfnArgs layer_of(const ExpertStack& stack, const ExpertWork& work) {
  FfnArgs layer = of_expert(stack.layer, work);
  if (stack.thresholds != nullptr) layer.threshold = static_cast<float>(stack.thresholds[work.expert]);
  const auto skip = [&](const void** bias, std::int64_t numbers) {
    if (*bias != nullptr)
      *bias = static_cast<const char*>(*bias) + work.expert * row_bytes(layer.bias_dtype(), numbers);
  };
  skip(&layer.bias_gate, layer.neurons);
  skip(&layer.bias_up, layer.neurons);
  skip(&layer.bias_down, layer.hidden);
  return layer;
}

Predictor predictor_of(const ExpertStack& stack, const ExpertWork& work) {
  Predictor p = stack.predictor;
  const std::int64_t hot = stack.layer.n_hot, expert = work.expert;
  if (p.kind == Predictor::Kind::kLowrank) {
    LowrankArgs& l = p.lowrank;
    const auto skip = [](const auto** data, std::int64_t count) {
      if (*data != nullptr) *data += count;
    };
    const std::int64_t cold = expert * l.cold + hot;
    l.a = static_cast<const char*>(l.a) + expert * l.rank * row_bytes(l.dtype, l.hidden);
    l.b = static_cast<const char*>(l.b) + cold * row_bytes(l.dtype, l.rank);
    skip(&l.a_scale, expert * l.rank);
    skip(&l.b_scale, cold);
    skip(&l.b_bias, cold);
    l.threshold = static_cast<float>(stack.cuts[expert]);
  } else if (p.kind == Predictor::Kind::kSignbit) {
    SignbitArgs& s = p.signbit;
    s.signs = static_cast<const char*>(s.signs) + (expert * s.cold + hot) * sign_bytes(s.columns);
    s.margin = stack.cuts[expert];
  } else if (p.kind == Predictor::Kind::kMask) {
    p.mask.rows = work.pairs;
  } else if (p.kind == Predictor::Kind::kGate) {
    const std::int64_t at = stack.gates[expert];
    if (at < 0) return Predictor();
    p.gate_rows = static_cast<const char*>(p.gate_rows) + at * stack.layer.neurons * stack.layer.row_bytes();
  }
  return p;
}

void route(const Router& router, const float* x_TH, std::int64_t tokens, std::int64_t* chosen_TK) {
  const DotFn dot = kernels().dot[static_cast<int>(router.dtype)];
  const std::int64_t bytes = row_bytes(router.dtype, router.hidden);
  std::vector<float> score_E(static_cast<std::size_t>(router.experts));
  for (std::int64_t t = 0; t < tokens; ++t) {
    const void* x_H = x_TH + t * router.hidden;
    for (std::int64_t e = 0; e < router.experts; e += kDotRows) {
      const std::int64_t count = std::min(kDotRows, router.experts - e);
      const void* rows[kDotRows];
      for (std::int64_t k = 0; k < count; ++k) rows[k] = static_cast<const char*>(router.weights) + (e + k) * bytes;
      dot(rows, count, &x_H, 1, router.hidden, &score_E[static_cast<std::size_t>(e)], nullptr);
    }
    for (std::int64_t e = 0; e < router.experts; ++e) {
      float& score = score_E[static_cast<std::size_t>(e)];
      if (router.bias != nullptr) score += router.bias[e];
      if (router.correction != nullptr) score = 1.0f / (1.0f + std::exp(-score)) + router.correction[e];
    }
    std::int64_t* chosen_K = chosen_TK + t * router.chosen;
    for (std::int64_t j = 0; j < router.chosen; ++j) {
      const auto best = std::max_element(score_E.begin(), score_E.end());
      chosen_K[j] = best - score_E.begin();
      *best = -std::numeric_limits<float>::infinity();
    }
  }
}

std::string experts_ffn(const ExpertsArgs& args, const ExpertStack& stack, const ParallelFor& parallel) {
  InMemory layers(stack);
  return mix_experts(args, layers, parallel);
}

}  // namespace pi2
