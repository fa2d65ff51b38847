// torch.ops.pi2.attention.
#include "pi2/attention.h"

#include "bindings/torch/common.h"

namespace pi2::binding {
namespace {

// Checks a tensor [batch, heads, positions, width] whose last dimension is contiguous.
Tensor heads_of(const Tensor& tensor, const char* name, int64_t (&strides)[3]) {
  check_plain(tensor, name);
  STD_TORCH_CHECK(tensor.dim() == 4, "pi2: ", name, ": expected [batch, heads, tokens, width], found ",
                  shape_of(tensor), ". Pass it as attention has it.");
  const Tensor rows = tensor.stride(3) == 1 || tensor.size(3) < 2 ? tensor : dense(tensor);
  for (int64_t d = 0; d < 3; ++d) strides[d] = rows.stride(d);
  return rows;
}

void check_sizes(const Tensor& query, const Tensor& key, const Tensor& value) {
  for (const Tensor* tensor : {&key, &value}) {
    const char* name = tensor == &key ? "key" : "value";
    STD_TORCH_CHECK(tensor->scalar_type() == query.scalar_type(), "pi2: dtype of ", name,
                    ": expected query's, found another. Convert them together.");
    STD_TORCH_CHECK(tensor->size(0) == query.size(0) && tensor->size(3) == query.size(3), "pi2: ", name, ": expected [",
                    query.size(0), ", key heads, length, ", query.size(3), "] for query ", shape_of(query), ", found ",
                    shape_of(*tensor), ". Pass the cache of these sequences.");
  }
  STD_TORCH_CHECK(key.size(1) == value.size(1) && key.size(2) == value.size(2), "pi2: value: expected ", shape_of(key),
                  ", as key is, found ", shape_of(value), ". Pass keys and values of one layer.");
  STD_TORCH_CHECK(key.size(1) > 0 && query.size(1) % key.size(1) == 0, "pi2: key: expected heads of which query's ",
                  query.size(1), " are a multiple, found ", key.size(1),
                  ". Pass keys that groups of query heads share.");
}

void with_mask(AttentionArgs& args, const Tensor& mask) {
  check_plain(mask, "mask");
  STD_TORCH_CHECK(mask.scalar_type() == ScalarType::Bool, "pi2: dtype of mask: expected bool, found another. Pass ",
                  "which positions each token sees; what is to be added to scores has no place here.");
  STD_TORCH_CHECK(mask.dim() == 4 && (mask.size(0) == args.batch || mask.size(0) == 1) && mask.size(1) == 1 &&
                      mask.size(2) == args.tokens && mask.size(3) == args.length,
                  "pi2: mask: expected [", args.batch, " or 1, 1, ", args.tokens, ", ", args.length, "], found ",
                  shape_of(mask), ". All heads of a token see the same.");
  args.mask_strides[0] = mask.size(0) == 1 ? 0 : mask.stride(0);
  args.mask_strides[1] = mask.stride(2);
  args.mask = static_cast<const std::uint8_t*>(mask.const_data_ptr());
}

Tensor attention(const Tensor& query, const Tensor& key, const Tensor& value, const MaybeTensor& mask, double scale,
                 bool causal, const MaybeTensor& sinks) {
  AttentionArgs args;
  const Tensor q = heads_of(query, "query", args.query_strides), k = heads_of(key, "key", args.key_strides),
               v = heads_of(value, "value", args.value_strides);
  args.dtype = args.kv_dtype = float_dtype(query, "query");
  check_sizes(query, key, value);
  args.batch = query.size(0);
  args.heads = query.size(1);
  args.key_heads = key.size(1);
  args.tokens = query.size(2);
  args.length = key.size(2);
  args.width = query.size(3);
  args.query = q.const_data_ptr();
  args.key = k.const_data_ptr();
  args.value = v.const_data_ptr();
  args.scale = static_cast<float>(scale);
  args.causal = causal;
  MaybeTensor scores;
  if (sinks) {
    check_plain(*sinks, "sinks");
    STD_TORCH_CHECK(sinks->scalar_type() == ScalarType::Float && sinks->dim() == 1 && sinks->size(0) == args.heads,
                    "pi2: sinks: expected float32 [", args.heads, "], one of each head, found ", shape_of(*sinks),
                    " of this or another dtype. Convert them.");
    scores = dense(*sinks);
    args.sinks = static_cast<const float*>(scores->const_data_ptr());
  }
  STD_TORCH_CHECK(!(mask && causal), "pi2: mask, causal: expected one of them, found both. Say what tokens see once.");
  const MaybeTensor seen =
      mask && mask->dim() == 4 && mask->stride(3) != 1 && mask->size(3) > 1 ? MaybeTensor(dense(*mask)) : mask;
  if (seen) with_mask(args, *seen);
  Tensor y = torch::stable::new_empty(query, {args.batch, args.tokens, args.heads, args.width});
  args.y = y.mutable_data_ptr();
  if (y.numel() > 0) pi2::attention(args, torch_threads());
  return y;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(pi2, m) {
  m.def(
      "attention(Tensor query, Tensor key, Tensor value, Tensor? mask, float scale, bool causal=False, "
      "Tensor? sinks=None) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(pi2, CPU, m) { m.impl("attention", TORCH_BOX(&attention)); }

}  // namespace pi2::binding
