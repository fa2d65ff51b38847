// torch.ops.pi2.attention, write_kv.
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

// The format of keys and values: quantised rows are int8, or bytes of int4.
DType kv_dtype(const Tensor& rows, DType other) {
  if (rows.scalar_type() == ScalarType::Char) return DType::kI8;
  return rows.scalar_type() == ScalarType::Byte ? DType::kQ4 : other;
}

void check_sizes(const Tensor& query, const Tensor& key, const Tensor& value, DType kv) {
  const bool packed = kv == DType::kI8 || kv == DType::kQ4;
  const int64_t width = packed ? kv_row_bytes(kv, query.size(3)) : query.size(3);
  for (const Tensor* tensor : {&key, &value}) {
    const char* name = tensor == &key ? "key" : "value";
    STD_TORCH_CHECK(tensor->scalar_type() == (packed ? key : query).scalar_type(), "pi2: dtype of ", name,
                    ": expected ", packed ? "key's" : "query's", ", found another. Convert them together.");
    STD_TORCH_CHECK(tensor->size(0) == query.size(0) && tensor->size(3) == width, "pi2: ", name, ": expected [",
                    query.size(0), ", key heads, length, ", width, "] for query ", shape_of(query), ", found ",
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
  args.dtype = float_dtype(query, "query");
  args.kv_dtype = kv_dtype(key, args.dtype);
  args.rotated = args.kv_dtype != args.dtype;
  check_sizes(query, key, value, args.kv_dtype);
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

void write_kv(const Tensor& x, const Tensor& rows, const Tensor& at) {
  WriteKvArgs args;
  const Tensor numbers = heads_of(x, "x", args.x_strides);
  check_plain(rows, "rows");
  args.dtype = float_dtype(x, "x");
  args.kv_dtype = kv_dtype(rows, args.dtype);
  const std::vector<int64_t> wanted = {x.size(0), x.size(1), rows.dim() == 4 ? rows.size(2) : 0,
                                       kv_row_bytes(args.kv_dtype, x.size(3))};
  bool sound = args.kv_dtype != args.dtype && rows.dim() == 4 && rows.stride(3) == 1;
  for (int64_t d = 0; sound && d < 4; ++d) sound = rows.size(d) == wanted[static_cast<size_t>(d)];
  STD_TORCH_CHECK(sound, "pi2: rows: expected int8 or uint8 [", wanted[0], ", ", wanted[1], ", length, ", wanted[3],
                  "] for x ", shape_of(x), ", found ", shape_of(rows), ". Pass the cache of these sequences.");
  check_plain(at, "at");
  STD_TORCH_CHECK(
      at.scalar_type() == ScalarType::Long && at.dim() == 2 && at.size(0) == x.size(0) && at.size(1) == x.size(2),
      "pi2: at: expected int64 [", x.size(0), ", ", x.size(2), "], a position of each token, found ", shape_of(at),
      " of this or another dtype. Say where each goes.");
  const Tensor places = dense(at);
  args.batch = x.size(0);
  args.heads = x.size(1);
  args.tokens = x.size(2);
  args.width = x.size(3);
  args.length = rows.size(2);
  args.x = numbers.const_data_ptr();
  args.rows = static_cast<char*>(rows.mutable_data_ptr());
  for (int64_t d = 0; d < 3; ++d) args.row_strides[d] = rows.stride(d);
  args.at = static_cast<const int64_t*>(places.const_data_ptr());
  if (x.numel() == 0) return;
  STD_TORCH_CHECK(pi2::write_kv(args, torch_threads()), "pi2: at: expected positions of 0 to ", args.length - 1,
                  ", found another. Pass those of new tokens.");
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(pi2, m) {
  m.def(
      "attention(Tensor query, Tensor key, Tensor value, Tensor? mask, float scale, bool causal=False, "
      "Tensor? sinks=None) -> Tensor");
  m.def("write_kv(Tensor x, Tensor(a!) rows, Tensor at) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(pi2, CPU, m) {
  m.impl("attention", TORCH_BOX(&attention));
  m.impl("write_kv", TORCH_BOX(&write_kv));
}

}  // namespace pi2::binding
