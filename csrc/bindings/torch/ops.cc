// torch.ops.pi2: defines the library, and operators that report on the process. Other files register fragments.
#include "bindings/torch/common.h"
#include "pi2/ffn.h"
#include "pi2/kernels.h"
#include "pi2/timings.h"

namespace pi2::binding {
namespace {

// [calls, tokens, neurons, gate_rows, up_rows, down_rows, dense_rows] since the last reset.
Tensor counters(bool reset) {
  const Counters c = read_counters();
  if (reset) reset_counters();
  Tensor out = torch::stable::empty({7}, ScalarType::Long);
  auto* values = static_cast<int64_t*>(out.mutable_data_ptr());
  const int64_t all[] = {c.calls, c.tokens, c.neurons, c.gate_rows, c.up_rows, c.down_rows, c.dense_rows};
  for (int i = 0; i < 7; ++i) values[i] = all[i];
  return out;
}

// [n, 5]: kind (0 linear, 1 predictor, 2 ffn), rows, columns, calls, nanoseconds; since the last reset.
Tensor timings(bool reset) {
  Timing all[kTimings];
  const int64_t n = read_timings(all);
  if (reset) reset_timings();
  Tensor out = torch::stable::empty({n, 5}, ScalarType::Long);
  auto* values = static_cast<int64_t*>(out.mutable_data_ptr());
  for (int64_t i = 0; i < n; ++i)
    for (const int64_t value : {all[i].kind, all[i].rows, all[i].columns, all[i].calls, all[i].nanoseconds})
      *values++ = value;
  return out;
}

// Names of the kernel tables that this CPU can run, best last, separated by commas; then ':' and the one in use.
std::string kernel_tables() {
  int count = 0;
  const KernelTable* const* tables = available_kernels(&count);
  std::string names;
  for (int i = 0; i < count; ++i) names += std::string(i ? "," : "") + tables[i]->isa;
  return names + ":" + kernels().isa;
}

bool select_kernels(const Text& isa) { return pi2::select_kernels(isa.c_str()); }

}  // namespace
}  // namespace pi2::binding

STABLE_TORCH_LIBRARY(pi2, m) {
  m.def("counters(bool reset) -> Tensor");
  m.def("timings(bool reset) -> Tensor");
  m.def("kernel_tables() -> str");
  m.def("select_kernels(str isa) -> bool");
}

STABLE_TORCH_LIBRARY_IMPL(pi2, CompositeExplicitAutograd, m) {
  m.impl("counters", TORCH_BOX(&pi2::binding::counters));
  m.impl("timings", TORCH_BOX(&pi2::binding::timings));
  m.impl("kernel_tables", TORCH_BOX(&pi2::binding::kernel_tables));
  m.impl("select_kernels", TORCH_BOX(&pi2::binding::select_kernels));
}
