// torch.ops.pi2.constants: constants and names of the core, so that Python has no copies of them
// (torch_pi2.ops.constants).
#include "bindings/torch/common.h"
#include "cache/neuron_cache.h"
#include "pi2/attention.h"
#include "pi2/experts.h"
#include "pi2/ffn.h"
#include "pi2/firing.h"
#include "pi2/linear.h"
#include "pi2/offload.h"
#include "pi2/predict.h"
#include "pi2/read_engine.h"
#include "pi2/trace.h"

namespace pi2::binding {
namespace {

// name=value, separated by spaces.
std::string constants() {
  int64_t blocks = 0;
  for (int dtype = 0; dtype < kDTypes; ++dtype)
    blocks |= static_cast<int64_t>(takes_blocks(static_cast<DType>(dtype))) << dtype;
  const std::pair<const char*, int64_t> numbers[] = {
      {"chunks", kChunks},
      {"pass_tokens", kPassTokens},
      {"prompt_tokens", kPromptTokens},
      {"prompt_neurons", kPromptNeurons},
      {"stream_from", kStreamFrom},
      {"gemm_tokens", kGemmTokens},
      {"blocks", blocks},
      {"mask_bytes", kMaskBytes},
      {"expert_bytes", kExpertBytes},
      {"gate_buffers", kGateBuffers},
      {"attention_split", kAttentionSplit},
      {"attention_rows", kAttentionRows},
      {"most_group", kMostGroup},
      {"most_sizes", kMostSizes},
      {"most_traced", kMostTraced},
      {"stages", static_cast<int64_t>(Stage::kRead) + 1},
      {"trace_counters", static_cast<int64_t>(TraceCounter::kColdNeurons) + 1},
  };
  std::string all;
  for (const auto& [name, value] : numbers) all += std::string(name) + "=" + std::to_string(value) + " ";
  all += "policies=";
  for (const CachePolicy policy : kCachePolicies) all += (all.back() == '=' ? "" : ",") + name_of(policy);
  return all;
}

// "activations", "engines" and "policies", separated by spaces, each with its names, separated by commas; a policy's
// name comes with the bytes that it keeps for each neuron.
std::string lists() {
  std::string all = "activations=";
  for (const char* name : kActivations) all += (all.back() == '=' ? "" : ",") + std::string(name);
  all += " engines=";
  for (const std::string& name : read_engines()) all += (all.back() == '=' ? "" : ",") + name;
  all += " policies=";
  for (const CachePolicy policy : kCachePolicies)
    all += (all.back() == '=' ? "" : ",") + name_of(policy) + ":" + std::to_string(bytes_of(policy));
  return all;
}

int64_t chunk_neurons(int64_t neurons) { return pi2::chunk_neurons(neurons); }

}  // namespace
}  // namespace pi2::binding

STABLE_TORCH_LIBRARY_FRAGMENT(pi2, m) {
  m.def("constants() -> str");
  m.def("lists() -> str");
  m.def("chunk_neurons(int neurons) -> int");
}

STABLE_TORCH_LIBRARY_IMPL(pi2, CompositeExplicitAutograd, m) {
  m.impl("constants", TORCH_BOX(&pi2::binding::constants));
  m.impl("lists", TORCH_BOX(&pi2::binding::lists));
  m.impl("chunk_neurons", TORCH_BOX(&pi2::binding::chunk_neurons));
}
