// pi2::write_cache.out for ExecuTorch: writes new keys and values into the lanes of a KV cache, a buffer of the
// program. pi2::cached_attention.out: that, then attention over the cache. Their references are in
// torch_pi2/export/attention.py.
#include <algorithm>
#include <string>
#include <vector>

#include "bindings/executorch/operators.h"
#include "bindings/executorch/threads.h"
#include "pi2/attention.h"

namespace pi2::et {
namespace {

DType kv_dtype(const Tensor& cache) {
  if (cache.scalar_type() == ScalarType::Byte) return DType::kI8;
  expect(cache.scalar_type() != ScalarType::BFloat16, "keys", "float32, float16 or bytes", "bfloat16");
  return float_dtype(cache, "keys");
}

// The data of a tensor with exactly these sizes, contiguous.
char* data_of(const Tensor& tensor, const char* what, ScalarType dtype, const std::vector<std::int64_t>& sizes) {
  bool sound = tensor.scalar_type() == dtype && tensor.dim() == static_cast<ssize_t>(sizes.size());
  for (std::size_t d = 0; sound && d < sizes.size(); ++d)
    sound = tensor.size(static_cast<ssize_t>(d)) == sizes[d] && tensor.dim_order()[d] == d;
  if (!sound) {
    std::string wanted;
    for (const std::int64_t size : sizes) wanted += (wanted.empty() ? "[" : ", ") + std::to_string(size);
    throw Refused{what, wanted + "] of its dtype, contiguous", shape_of(tensor)};
  }
  return static_cast<char*>(const_cast<void*>(tensor.const_data_ptr()));
}

// Checks new tokens and their cache, and writes them.
struct Written {
  std::int64_t batch = 0, tokens = 0, key_heads = 0, width = 0, length = 0, numbers = 0;
  DType dtype{};
  char* caches[2]{};
  std::vector<std::int64_t> lane_of, positions;  // of each sequence, and of each of its tokens
};

Written write(const Tensor& key, const Tensor& value, const Tensor& rows, const Tensor& keys, const Tensor& values) {
  expect(key.dim() == 4 && keys.dim() == 4, "key, keys", "4 dimensions", shape_of(key) + ", " + shape_of(keys));
  Written w;
  w.batch = key.size(0);
  w.tokens = key.size(2);
  w.width = key.size(3);
  w.key_heads = keys.size(1);
  w.length = keys.size(2);
  w.dtype = kv_dtype(keys);
  w.numbers = kv_row_bytes(w.dtype, w.width) / kv_unit_bytes(w.dtype);
  const std::int64_t lanes = keys.size(0), row = row_bytes(w.dtype, w.numbers), all = w.batch * w.tokens;
  const std::vector<std::int64_t> new_sizes = {w.batch, w.key_heads, w.tokens, w.width};
  const std::vector<std::int64_t> cache_sizes = {lanes, w.key_heads, w.length, w.numbers};
  w.caches[0] = data_of(keys, "keys", keys.scalar_type(), cache_sizes);
  w.caches[1] = data_of(values, "values", keys.scalar_type(), cache_sizes);
  const char* added[] = {data_of(key, "key", ScalarType::Float, new_sizes),
                         data_of(value, "value", ScalarType::Float, new_sizes)};
  const auto* row_of =
      reinterpret_cast<const std::int64_t*>(data_of(rows, "rows", ScalarType::Long, {w.batch, w.tokens}));
  w.lane_of.resize(static_cast<std::size_t>(w.batch));
  w.positions.resize(static_cast<std::size_t>(all));
  for (std::int64_t i = 0; i < all; ++i) {
    const std::int64_t lane = row_of[i] / w.length, b = i / w.tokens;
    if (i % w.tokens == 0) w.lane_of[static_cast<std::size_t>(b)] = lane;
    if (row_of[i] < 0 || lane >= lanes || lane != w.lane_of[static_cast<std::size_t>(b)])
      throw Refused{
          "rows",
          "rows of one lane of " + std::to_string(lanes) + ", with " + std::to_string(w.length) + " tokens each",
          std::to_string(row_of[i])};
    w.positions[static_cast<std::size_t>(i)] = row_of[i] % w.length;
  }
  for (int kind = 0; kind < 2; ++kind)
    for (std::int64_t i = 0; i < all * w.key_heads; ++i) {
      const std::int64_t token = i / w.key_heads, head = i % w.key_heads, b = token / w.tokens;
      const std::int64_t from = (b * w.key_heads + head) * w.tokens + token % w.tokens;
      const std::int64_t to = (w.lane_of[static_cast<std::size_t>(b)] * w.key_heads + head) * w.length +
                              w.positions[static_cast<std::size_t>(token)];
      const auto* x = reinterpret_cast<const float*>(added[kind]) + from * w.width;
      pack_kv(x, w.dtype, w.width, w.caches[kind] + to * row);
    }
  return w;
}

Tensor& write_cache_out(KernelRuntimeContext& context, const Tensor& key, const Tensor& value, const Tensor& rows,
                        const Tensor& keys, const Tensor& values, Tensor& out) {
  guarded(context, "pi2::write_cache.out", [&] {
    const Written w = write(key, value, rows, keys, values);
    auto* to = reinterpret_cast<std::int64_t*>(data_of(out, "out", ScalarType::Long, {w.batch}));
    for (std::int64_t b = 0; b < w.batch; ++b) to[b] = w.lane_of[static_cast<std::size_t>(b)];
  });
  return out;
}

Tensor& cached_attention_out(KernelRuntimeContext& context, const Tensor& query, const Tensor& key, const Tensor& value,
                             const Tensor& rows, const Tensor& keys, const Tensor& values, double scale,
                             std::int64_t window, double softcap, const MaybeTensor& sinks, Tensor& out) {
  guarded(context, "pi2::cached_attention.out", [&] {
    expect(query.dim() == 4 && keys.dim() == 4, "query, keys", "4 dimensions", shape_of(query) + ", " + shape_of(keys));
    AttentionArgs args;
    args.batch = query.size(0);
    args.heads = query.size(1);
    args.tokens = query.size(2);
    args.width = query.size(3);
    args.key_heads = keys.size(1);
    args.scale = static_cast<float>(scale);
    args.softcap = static_cast<float>(softcap);
    args.window = window;
    if (sinks) args.sinks = reinterpret_cast<float*>(data_of(*sinks, "sinks", ScalarType::Float, {args.heads}));
    expect(window >= 0 && softcap >= 0, "window, softcap", "0 or more",
           std::to_string(window) + ", " + std::to_string(softcap));
    expect(args.key_heads > 0 && args.heads % args.key_heads == 0, "keys", "heads of which query's are a multiple",
           shape_of(keys));
    args.query = data_of(query, "query", ScalarType::Float, {args.batch, args.heads, args.tokens, args.width});
    const auto as_query = {args.batch, args.key_heads, args.tokens, args.width};
    data_of(key, "key", ScalarType::Float, as_query);
    executorch::aten::SizesType sizes[] = {
        static_cast<executorch::aten::SizesType>(args.batch), static_cast<executorch::aten::SizesType>(args.tokens),
        static_cast<executorch::aten::SizesType>(args.heads), static_cast<executorch::aten::SizesType>(args.width)};
    expect(out.scalar_type() == ScalarType::Float && executorch::runtime::resize_tensor(out, {sizes, 4}) == Error::Ok,
           "out", "room for " + std::to_string(args.batch * args.tokens) + " tokens", shape_of(out));
    const Written w = write(key, value, rows, keys, values);
    args.length = w.length;
    args.kv_dtype = w.dtype;
    args.key = w.caches[0];
    args.value = w.caches[1];
    const std::int64_t q_strides[] = {args.heads * args.tokens * args.width, args.tokens * args.width, args.width};
    const std::int64_t kv_strides[] = {args.key_heads * w.length * w.numbers, w.length * w.numbers, w.numbers};
    std::copy_n(q_strides, 3, args.query_strides);
    std::copy_n(kv_strides, 3, args.key_strides);
    std::copy_n(kv_strides, 3, args.value_strides);
    args.lanes = w.lane_of.data();
    args.positions = w.positions.data();
    args.y = out.mutable_data_ptr();
    if (out.numel() > 0) attention(args, executorch_threads());
  });
  return out;
}

constexpr char kWrite[] = "pi2::write_cache.out", kAttention[] = "pi2::cached_attention.out";
[[maybe_unused]] const Error added[] = {add(kWrite, EXECUTORCH_FN(write_cache_out, kWrite)),
                                        add(kAttention, EXECUTORCH_FN(cached_attention_out, kAttention))};

}  // namespace
}  // namespace pi2::et
