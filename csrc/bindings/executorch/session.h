// A layer in two calls, between which an accelerator works: submit begins the cold part, collect waits for it and adds
// it.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "bindings/executorch/engine.h"
#include "bindings/executorch/layer.h"

namespace pi2::et {

// Not for two threads at a time, as a method of ExecuTorch is not.
class Session final : public Job {
 public:
  ~Session() override;

  // What a method loaded: its two calls find each other by these. `loader`: something that only they have in common.
  static std::shared_ptr<Session> of(const void* loader, const std::string& method, const Blob& blob,
                                     const std::shared_ptr<Store>& store, Problem* problem);
  // The submitting call's; the engine has `threads` threads, where the options do not say.
  void attach(std::shared_ptr<Layer> layer, int threads);

  // Begins with x [tokens, hidden], of which it keeps a copy. What was submitted before and never collected (because
  // what came between has failed) is forgotten.
  Problem submit(const void* x, DType dtype, std::int64_t tokens);
  // out = h + the cold part. If asked: what that took since it was submitted, and how long this waited for it.
  Problem collect(const void* h, void* out, DType dtype, std::int64_t tokens, CallStats* stats = nullptr,
                  std::int64_t* submit_wait_ns = nullptr);

  void run(const ParallelFor& parallel) override;

 private:
  void forget();

  Blob blob_;  // of the call that came first
  std::shared_ptr<Store> store_;
  std::shared_ptr<Layer> layer_;  // null until the submitting call is there
  bool has_submit_ = false, has_collect_ = false;
  Engine* engine_ = nullptr;

  bool begun_ = false;
  std::int64_t tokens_ = 0;
  std::vector<float> x_TH_, y_TH_, row_H_;
  Problem problem_;
  CallStats stats_;
};

}  // namespace pi2::et
