// A layer in two calls around the accelerator's work: submit starts the cold part, collect waits for it and adds it.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "bindings/executorch/engine.h"
#include "bindings/executorch/layer.h"

namespace pi2::et {

// Not thread-safe, like a method of ExecuTorch.
class Session final : public Job {
 public:
  ~Session() override;

  // The session of a loaded method: its two calls find each other by these. `loader`: a pointer that only they share.
  static std::shared_ptr<Session> of(const void* loader, const std::string& method, const Blob& blob,
                                     const std::shared_ptr<Store>& store, Problem* problem);
  // Called by the submitting call. The engine has `threads` threads unless the options say otherwise.
  void attach(std::shared_ptr<Layer> layer, int threads);

  // Starts with x [tokens, hidden], which is copied. An earlier submit that was never collected (because the work in
  // between failed) is dropped.
  Problem submit(const void* x, DType dtype, std::int64_t tokens);
  // out = h + the cold part. Optional: figures since submit, and the time that this waited.
  Problem collect(const void* h, void* out, DType dtype, std::int64_t tokens, CallStats* stats = nullptr,
                  std::int64_t* submit_wait_ns = nullptr);

  void run(const ParallelFor& parallel) override;

 private:
  void forget();

  Blob blob_;  // of the first call
  std::shared_ptr<Store> store_;
  std::shared_ptr<Layer> layer_;  // null until the submitting call is loaded
  bool has_submit_ = false, has_collect_ = false;
  Engine* engine_ = nullptr;

  bool begun_ = false;
  std::int64_t tokens_ = 0;
  std::vector<float> x_TH_, y_TH_, row_H_;
  Problem problem_;
  CallStats stats_;
};

}  // namespace pi2::et
