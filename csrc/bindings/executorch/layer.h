// A feed-forward layer or a mixture of experts over a store, as a blob says it.
#pragma once

#include <cstdint>
#include <memory>

#include "bindings/executorch/store.h"
#include "pi2/experts.h"

namespace pi2::et {

class Layer {
 public:
  // Reads what the layer has beside its neurons.
  static std::shared_ptr<Layer> load(std::shared_ptr<Store> store, const Blob& blob, Problem* problem);
  ~Layer();
  Layer(const Layer&) = delete;
  Layer& operator=(const Layer&) = delete;

  // y = the layer's part for x, both [tokens, hidden]. To `stats`, if any, is added what that took.
  Problem compute(const void* x, void* y, DType dtype, std::int64_t tokens, const ParallelFor& parallel,
                  CallStats* stats = nullptr);
  // The same of a mixture.
  Problem mix(const ExpertsArgs& args, const ParallelFor& parallel, CallStats* stats = nullptr);

  const Blob& blob() const { return blob_; }
  Store& store() { return *store_; }

 private:
  Layer(std::shared_ptr<Store> store, const Blob& blob);
  Problem unread(const std::string& wrong) const;

  std::shared_ptr<Store> store_;
  Blob blob_;
  std::shared_ptr<const Bytes> tensors_[kTensorNames];
  ExpertStack stack_;  // of a layer that is no mixture: what one expert would have
};

}  // namespace pi2::et
