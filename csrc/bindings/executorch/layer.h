// A feed-forward layer or a mixture of experts over a store, described by a blob.
#pragma once

#include <cstdint>
#include <memory>

#include "bindings/executorch/store.h"
#include "pi2/experts.h"

namespace pi2::et {

class Layer {
 public:
  // Loads the layer's tensors other than its neurons.
  static std::shared_ptr<Layer> load(std::shared_ptr<Store> store, const Blob& blob, Problem* problem);
  ~Layer();
  Layer(const Layer&) = delete;
  Layer& operator=(const Layer&) = delete;

  // y = the layer's part for x, both [tokens, hidden]. Figures are added to `stats`, if set.
  Problem compute(const void* x, void* y, DType dtype, std::int64_t tokens, const ParallelFor& parallel,
                  CallStats* stats = nullptr);
  // The same for a mixture.
  Problem mix(const ExpertsArgs& args, const ParallelFor& parallel, CallStats* stats = nullptr);

  const Blob& blob() const { return blob_; }
  Store& store() { return *store_; }

 private:
  Layer(std::shared_ptr<Store> store, const Blob& blob);
  Problem unread(const std::string& wrong) const;

  std::shared_ptr<Store> store_;
  Blob blob_;
  std::shared_ptr<const Bytes> tensors_[kTensorNames];
  ExpertStack stack_;  // a single layer is stored as one expert
};

}  // namespace pi2::et
