// torch.ops.pi2.device_times: when a described device would finish reads; reads nothing.
#include "bindings/torch/common.h"
#include "io/device_model.h"

namespace pi2::binding {
namespace {

// float64 [n], seconds.
Tensor device_times(std::vector<double> device, int64_t range_bytes, int64_t depth, std::vector<int64_t> offsets,
                    std::vector<int64_t> bytes) {
  DeviceModel model;
  const std::string problem = DeviceModel::parse(device, &model);
  STD_TORCH_CHECK(problem.empty(), "pi2: device: ", problem);
  STD_TORCH_CHECK(depth >= 1 && offsets.size() == bytes.size(),
                  "pi2: reads: expected as many offsets as sizes and a depth of 1 or more, found ", offsets.size(),
                  ", ", bytes.size(), " and ", depth, ". See torch_pi2.machine.device.Device.");
  model.set_range(range_bytes);
  const std::vector<double> ends = closed_loop(model, depth, offsets, bytes);
  Tensor out = torch::stable::empty({static_cast<int64_t>(ends.size())}, ScalarType::Double);
  std::copy(ends.begin(), ends.end(), static_cast<double*>(out.mutable_data_ptr()));
  return out;
}

}  // namespace
}  // namespace pi2::binding

STABLE_TORCH_LIBRARY_FRAGMENT(pi2, m) {
  m.def("device_times(float[] device, int range_bytes, int depth, int[] offsets, int[] bytes) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(pi2, CompositeExplicitAutograd, m) {
  m.impl("device_times", TORCH_BOX(&pi2::binding::device_times));
}
