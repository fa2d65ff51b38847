#include <algorithm>
#include <cstring>

#include "base/parallel.h"
#include "pi2/attention.h"
#include "pi2/kernels.h"
#include "pi2/linear.h"
#include "pi2/step_program.h"
#include "step/elementwise.h"

namespace pi2 {
namespace {

using Operand = StepProgram::Operand;
using Instruction = StepProgram::Instruction;

constexpr std::int64_t kMostBytes = std::int64_t{1} << 46;

double number(std::int64_t bits) {
  double value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

bool is_float(const Operand& operand) { return operand.element <= Element::kF16; }

bool same_sizes(const Operand& a, const Operand& b) {
  return a.rank == b.rank && std::equal(a.sizes, a.sizes + a.rank, b.sizes);
}

// A reader that cannot leave the code.
struct Words {
  const std::int64_t* at;
  std::int64_t left;
  bool sound = true;

  std::int64_t next(std::int64_t least, std::int64_t most) {
    if (left == 0 || *at < least || *at > most) {
      sound = false;
      return least;
    }
    --left;
    return *at++;
  }
};

Operand read_operand(Words& words, const std::vector<std::int64_t>& slot_bytes) {
  Operand operand;
  operand.slot = words.next(0, static_cast<std::int64_t>(slot_bytes.size()) - 1);
  operand.offset = words.next(0, kMostBytes);
  operand.element = static_cast<Element>(words.next(0, kElements - 1));
  operand.rank = static_cast<int>(words.next(0, StepProgram::kMostRank));
  for (int d = 0; d < operand.rank; ++d) operand.sizes[d] = words.next(1, kMostBytes);
  for (int d = 0; d < operand.rank; ++d) operand.strides[d] = words.next(0, kMostBytes);
  if (!words.sound) return operand;
  // Sizes may be large, so that products must not overflow.
  const std::int64_t bytes = element_bytes(operand.element);
  std::int64_t left = slot_bytes[static_cast<std::size_t>(operand.slot)] - operand.offset - bytes;
  for (int d = 0; d < operand.rank && left >= 0; ++d) {
    const std::int64_t most = operand.strides[d] == 0 ? kMostBytes : left / (operand.strides[d] * bytes) + 1;
    if (operand.strides[d] > kMostBytes / bytes || operand.sizes[d] > most)
      left = -1;
    else
      left -= (operand.sizes[d] - 1) * operand.strides[d] * bytes;
  }
  words.sound = left >= 0 && operand.offset % bytes == 0;
  return operand;
}

// Of the elements, whether `op` computes `y` from `a` and perhaps `b`.
bool known_elements(StepOp op, const Operand& y, const Operand& a, const Operand* b) {
  const auto all = [&](Element element) { return a.element == element && (b == nullptr || b->element == element); };
  switch (op) {
    case StepOp::kCopy:
      return is_float(y) ? is_float(a) || (y.element == Element::kF32 && a.element == Element::kI64) : all(y.element);
    case StepOp::kLess:
    case StepOp::kLessEqual: return y.element == Element::kByte && all(Element::kI64);
    case StepOp::kAnd: return y.element == Element::kByte && all(Element::kByte);
    case StepOp::kIsFinite: return y.element == Element::kByte && is_float(a);
    case StepOp::kWhere:
      return y.element == Element::kI64 && a.element == Element::kI64 && b != nullptr && b->element == Element::kByte;
    default: break;
  }
  if (is_float(y)) return is_float(a) && (b == nullptr || is_float(*b));
  return op <= StepOp::kMul && y.element == Element::kI64 && all(Element::kI64);
}

bool sound_elementwise(const Instruction& it) {
  const Operand* y = it.operand;
  const bool binary = (it.op >= StepOp::kAdd && it.op <= StepOp::kDiv) || it.op == StepOp::kLess ||
                      it.op == StepOp::kLessEqual || it.op == StepOp::kAnd;
  const int parameters = it.op == StepOp::kWhere || (binary && it.operands == 2) ? 1 : 0;
  if (it.operands != (it.op == StepOp::kWhere || (binary && parameters == 0) ? 3 : 2)) return false;
  if (it.parameters != parameters || (it.op == StepOp::kAnd && parameters != 0)) return false;
  for (int i = 1; i < it.operands; ++i)
    if (!same_sizes(y[0], y[i])) return false;
  return known_elements(it.op, y[0], y[1], it.operands == 3 ? &y[2] : nullptr);
}

// kMean and kArgmax.
bool sound_reduction(const Instruction& it) {
  const Operand &y = it.operand[0], &x = it.operand[1];
  const Element made = it.op == StepOp::kMean ? Element::kF32 : Element::kI64;
  return it.operands == 2 && it.parameters == 0 && y.element == made && x.element == Element::kF32 && x.rank >= 1 &&
         y.rank == x.rank && y.sizes[y.rank - 1] == 1 && x.strides[x.rank - 1] == 1 &&
         std::equal(x.sizes, x.sizes + x.rank - 1, y.sizes);
}

bool sound_gather(const Instruction& it) {
  const Operand &y = it.operand[0], &x = it.operand[1], &index = it.operand[2];
  return it.operands == 3 && it.parameters == 0 && y.element == x.element && index.element == Element::kI64 &&
         x.rank >= 1 && y.rank == x.rank && same_sizes(y, index) && y.sizes[y.rank - 1] == 1 &&
         std::equal(x.sizes, x.sizes + x.rank - 1, y.sizes);
}

bool sound_take_rows(const Instruction& it) {
  const Operand &y = it.operand[0], &x = it.operand[1], &index = it.operand[2];
  return it.operands == 3 && it.parameters == 0 && y.element == x.element && index.element == Element::kI64 &&
         y.rank == 2 && x.rank == 2 && index.rank == 1 && y.sizes[0] == index.sizes[0] && y.sizes[1] == x.sizes[1] &&
         y.strides[1] == 1 && x.strides[1] == 1;
}

// Contiguous rows of `columns` numbers in a format of few bits, whose DType is the first parameter.
bool sound_rows(const Instruction& it, const Operand& rows, std::int64_t columns) {
  if (it.parameter[0] < static_cast<std::int64_t>(DType::kQ4) || it.parameter[0] >= kDTypes) return false;
  const auto dtype = static_cast<DType>(it.parameter[0]);
  if (is_ggml(dtype) && columns % ggml_block(dtype).numbers != 0) return false;
  return rows.rank == 2 && rows.element == Element::kByte && rows.contiguous() &&
         rows.sizes[1] == row_bytes(dtype, columns);
}

bool sound_dequantize(const Instruction& it) {
  const Operand &y = it.operand[0], &rows = it.operand[1];
  return it.operands == 2 && it.parameters == 1 && y.rank == 2 && is_float(y) && y.contiguous() &&
         sound_rows(it, rows, y.sizes[1]) && y.sizes[0] == rows.sizes[0];
}

bool sound_index_copy(const Instruction& it) {
  const Operand &y = it.operand[0], &x = it.operand[1], &index = it.operand[2];
  if (it.operands != 3 || it.parameters != 1 || it.parameter[0] < 0 || it.parameter[0] >= y.rank) return false;
  if (y.rank != x.rank || y.element != x.element || index.element != Element::kI64 || index.rank != 1) return false;
  for (int d = 0; d < y.rank; ++d)
    if (x.sizes[d] != (d == it.parameter[0] ? index.sizes[0] : y.sizes[d])) return false;
  return true;
}

bool sound_linear(const Instruction& it) {
  const Operand &y = it.operand[0], &x = it.operand[1], &rows = it.operand[2], &bias = it.operand[3];
  if (it.operands < 3 || it.operands > 4 || it.parameters != 3 || x.rank < 1 || y.rank != x.rank) return false;
  const std::int64_t columns = x.sizes[x.rank - 1];
  if (!is_float(x) || x.element != y.element || !x.contiguous() || !y.contiguous()) return false;
  if (!sound_rows(it, rows, columns)) return false;
  if (y.sizes[y.rank - 1] != rows.sizes[0] || !std::equal(x.sizes, x.sizes + x.rank - 1, y.sizes)) return false;
  const bool biased = it.operands == 4;
  if (biased &&
      (bias.rank != 1 || bias.element != Element::kF32 || bias.sizes[0] != rows.sizes[0] || !bias.contiguous()))
    return false;
  return it.parameter[2] == 0 || (it.parameter[1] != 0 && in_blocks(rows.sizes[0], columns) &&
                                  takes_blocks(static_cast<DType>(it.parameter[0])));
}

// Keys or values of `width` numbers, of this DType.
bool sound_kv(const Operand& rows, std::int64_t code, std::int64_t width) {
  const bool packed = code == static_cast<std::int64_t>(DType::kI8) || code == static_cast<std::int64_t>(DType::kQ4);
  if (rows.rank != 4 || rows.strides[3] != 1) return false;
  if (!packed) return is_float(rows) && code == static_cast<std::int64_t>(rows.element) && rows.sizes[3] == width;
  return rows.element == Element::kByte && rows.sizes[3] == kv_row_bytes(static_cast<DType>(code), width);
}

bool sound_write_kv(const Instruction& it) {
  const Operand &rows = it.operand[0], &x = it.operand[1], &at = it.operand[2];
  return it.operands == 3 && it.parameters == 1 && x.rank == 4 && is_float(x) && x.strides[3] == 1 &&
         sound_kv(rows, it.parameter[0], x.sizes[3]) && rows.element == Element::kByte && rows.sizes[0] == x.sizes[0] &&
         rows.sizes[1] == x.sizes[1] && at.rank == 2 && at.element == Element::kI64 && at.contiguous() &&
         at.sizes[0] == x.sizes[0] && at.sizes[1] == x.sizes[2];
}

bool sound_attention(const Instruction& it) {
  const Operand &y = it.operand[0], &q = it.operand[1], &k = it.operand[2], &v = it.operand[3];
  if (it.parameters != 5 || it.operands != 4 + (it.parameter[2] != 0) + (it.parameter[3] != 0)) return false;
  for (const Operand* each : {&y, &q})
    if (each->rank != 4 || !is_float(*each) || each->element != q.element || each->strides[3] != 1) return false;
  if (!sound_kv(k, it.parameter[4], q.sizes[3]) || (is_float(k) && k.element != q.element)) return false;
  if (k.element != v.element || !same_sizes(k, v) || v.strides[3] != 1) return false;
  if (k.sizes[0] != q.sizes[0] || q.sizes[1] % k.sizes[1] != 0) return false;
  if (!y.contiguous() || y.sizes[0] != q.sizes[0] || y.sizes[1] != q.sizes[2] || y.sizes[2] != q.sizes[1] ||
      y.sizes[3] != q.sizes[3])
    return false;
  int at = 4;
  if (it.parameter[2] != 0) {
    const Operand& mask = it.operand[at++];
    if (mask.rank != 4 || mask.element != Element::kByte || mask.sizes[0] != q.sizes[0] || mask.sizes[1] != 1 ||
        mask.sizes[2] != q.sizes[2] || mask.sizes[3] != k.sizes[2] || mask.strides[3] != 1)
      return false;
  }
  if (it.parameter[3] == 0) return true;
  const Operand& sinks = it.operand[at];
  return sinks.rank == 1 && sinks.element == Element::kF32 && sinks.contiguous() && sinks.sizes[0] == q.sizes[1];
}

bool sound_call(const Instruction& it) {
  const Operand &y = it.operand[0], &x = it.operand[1];
  return it.operands == 2 && it.parameters == 1 && it.parameter[0] >= 0 && is_float(y) && x.element == y.element &&
         same_sizes(x, y) && x.contiguous() && y.contiguous();
}

bool sound(const Instruction& it) {
  switch (it.op) {
    case StepOp::kMean:
    case StepOp::kArgmax: return sound_reduction(it);
    case StepOp::kGather: return sound_gather(it);
    case StepOp::kTakeRows: return sound_take_rows(it);
    case StepOp::kDequantize: return sound_dequantize(it);
    case StepOp::kIndexCopy: return sound_index_copy(it);
    case StepOp::kLinear: return sound_linear(it);
    case StepOp::kAttention: return sound_attention(it);
    case StepOp::kCall: return sound_call(it);
    case StepOp::kWriteKv: return sound_write_kv(it);
    default: return sound_elementwise(it);
  }
}

// Merges dimensions over which all operands are even, and drops those of size 1: long rows are fast.
void flatten(Instruction& it) {
  int rank = 0;
  for (int d = 0; d < it.operand[0].rank; ++d) {
    const std::int64_t size = it.operand[0].sizes[d];
    if (size == 1) continue;
    bool merges = rank > 0;
    for (int i = 0; i < it.operands && merges; ++i)
      merges = it.operand[i].strides[rank - 1] == it.operand[i].strides[d] * size;
    rank += !merges;
    for (int i = 0; i < it.operands; ++i) {
      Operand& each = it.operand[i];
      each.sizes[rank - 1] = merges ? each.sizes[rank - 1] * size : size;
      each.strides[rank - 1] = each.strides[d];
    }
  }
  for (int i = 0; i < it.operands; ++i) it.operand[i].rank = rank;
}

bool in_blocks_of_few_tokens(const Instruction& it) {
  const Operand& x = it.operand[1];
  return it.op == StepOp::kLinear && it.parameter[2] != 0 && x.numel() / x.sizes[x.rank - 1] < kGemmTokens;
}

bool same_input(const Instruction& a, const Instruction& b) {
  if (!in_blocks_of_few_tokens(a) || !in_blocks_of_few_tokens(b)) return false;
  const Operand &x = a.operand[1], &z = b.operand[1];
  return x.slot == z.slot && x.offset == z.offset && x.element == z.element && same_sizes(x, z);
}

// Whether `later` may come before `earlier`: neither uses what the other writes.
bool may_pass(const Instruction& later, const Instruction& earlier) {
  for (int i = 0; i < later.operands; ++i)
    if (later.operand[i].slot == earlier.operand[0].slot) return false;
  for (int i = 0; i < earlier.operands; ++i)
    if (earlier.operand[i].slot == later.operand[0].slot) return false;
  return true;
}

struct Runner {
  const std::vector<char*>& bases;
  const ParallelFor& parallel;
  StepProgram::Call call;
  void* host;

  char* data(const Operand& operand) const { return bases[static_cast<std::size_t>(operand.slot)] + operand.offset; }
  Strided strided(const Operand& operand) const {
    Strided all{data(operand), operand.element, {}, {}};
    std::copy_n(operand.sizes, operand.rank, all.sizes);
    std::copy_n(operand.strides, operand.rank, all.strides);
    return all;
  }

  void compute(const Instruction& it) const {
    const Strided y = strided(it.operand[0]), a = strided(it.operand[1]);
    const bool two = it.operands == 3;
    const Strided b = two ? strided(it.operand[2]) : Strided{};
    elementwise(it.op, it.operand[0].rank, y, a, two ? &b : nullptr, it.parameters > 0 ? number(it.parameter[0]) : 0);
  }

  // use(y, x, i) of each row of x.
  template <class Use>
  void over_rows(const Instruction& it, Use use) const {
    const Operand &y = it.operand[0], &x = it.operand[1];
    const int outer = x.rank - 1;
    std::int64_t count = 1, index[StepProgram::kMostRank] = {};
    for (int d = 0; d < outer; ++d) count *= x.sizes[d];
    for (std::int64_t i = 0; i < count; ++i) {
      char* to = data(y);
      const char* from = data(x);
      for (int d = 0; d < outer; ++d) {
        to += index[d] * y.strides[d] * element_bytes(y.element);
        from += index[d] * x.strides[d] * element_bytes(x.element);
      }
      use(to, from, index);
      for (int d = outer - 1; d >= 0 && ++index[d] == x.sizes[d]; --d) index[d] = 0;
    }
  }

  void reduce(const Instruction& it) const {
    const std::int64_t n = it.operand[1].sizes[it.operand[1].rank - 1];
    over_rows(it, [&](char* y, const char* x, const std::int64_t*) {
      const auto* row = reinterpret_cast<const float*>(x);
      if (it.op == StepOp::kMean) {
        *reinterpret_cast<float*>(y) = mean_of(row, n);
      } else {
        const std::int64_t best = argmax_of(row, n);
        std::memcpy(y, &best, sizeof(best));
      }
    });
  }

  bool gather(const Instruction& it) const {
    const Operand &x = it.operand[1], &indices = it.operand[2];
    const std::int64_t bytes = element_bytes(x.element), n = x.sizes[x.rank - 1];
    bool within = true;
    over_rows(it, [&](char* y, const char* row, const std::int64_t* outer) {
      const char* at = data(indices);
      for (int d = 0; d + 1 < x.rank; ++d) at += outer[d] * indices.strides[d] * 8;
      std::int64_t index;
      std::memcpy(&index, at, sizeof(index));
      within = within && index >= 0 && index < n;
      if (within) std::memcpy(y, row + index * x.strides[x.rank - 1] * bytes, static_cast<std::size_t>(bytes));
    });
    return within;
  }

  bool take_rows(const Instruction& it) const {
    const Operand &y = it.operand[0], &x = it.operand[1], &indices = it.operand[2];
    const std::int64_t bytes = element_bytes(x.element);
    for (std::int64_t i = 0; i < y.sizes[0]; ++i) {
      std::int64_t index;
      std::memcpy(&index, data(indices) + i * indices.strides[0] * 8, sizeof(index));
      if (index < 0 || index >= x.sizes[0]) return false;
      std::memcpy(data(y) + i * y.strides[0] * bytes, data(x) + index * x.strides[0] * bytes,
                  static_cast<std::size_t>(x.sizes[1] * bytes));
    }
    return true;
  }

  void dequantize(const Instruction& it) const {
    const Operand &y = it.operand[0], &rows = it.operand[1];
    const auto dtype = static_cast<DType>(it.parameter[0]);
    pi2::dequantize(data(rows), dtype, y.sizes[0], y.sizes[1], rows.sizes[1], data(y), static_cast<DType>(y.element),
                    serial());
  }

  bool index_copy(const Instruction& it) const {
    Operand y = it.operand[0], x = it.operand[1];
    const auto dim = static_cast<int>(it.parameter[0]);
    const std::int64_t length = y.sizes[dim], bytes = element_bytes(y.element);
    const char* index = data(it.operand[2]);
    for (std::int64_t i = 0; i < it.operand[2].sizes[0]; ++i) {
      std::int64_t at;
      std::memcpy(&at, index + i * it.operand[2].strides[0] * 8, sizeof(at));
      if (at < 0) at += length;
      if (at < 0 || at >= length) return false;
      Instruction one;
      one.operands = 2;
      one.operand[0] = y;
      one.operand[1] = x;
      for (int k = 0; k < 2; ++k) one.operand[k].sizes[dim] = 1;
      one.operand[0].offset += at * y.strides[dim] * bytes;
      one.operand[1].offset += i * x.strides[dim] * bytes;
      flatten(one);
      compute(one);
    }
    return true;
  }

  LinearArgs linear_args(const Instruction& it) const {
    const Operand &x = it.operand[1], &rows = it.operand[2];
    LinearArgs args;
    args.y = data(it.operand[0]);
    args.x = data(x);
    args.x_dtype = static_cast<DType>(x.element);
    args.columns = x.sizes[x.rank - 1];
    args.tokens = x.numel() / args.columns;
    args.weights = data(rows);
    args.w_dtype = static_cast<DType>(it.parameter[0]);
    args.rows = rows.sizes[0];
    if (it.operands == 4) args.bias = reinterpret_cast<const float*>(data(it.operand[3]));
    args.int8_activations = it.parameter[1] != 0;
    args.blocks = it.parameter[2] != 0;
    return args;
  }

  void linear(const Instruction* it) const {
    if (it->together == 1) return pi2::linear(linear_args(*it), parallel);
    LinearArgs all[kMostTogether];
    for (int i = 0; i < it->together; ++i) all[i] = linear_args(it[i]);
    linear_together(all, it->together, parallel);
  }

  void attention(const Instruction& it) const {
    const Operand &q = it.operand[1], &k = it.operand[2], &v = it.operand[3];
    AttentionArgs args;
    args.dtype = static_cast<DType>(q.element);
    args.kv_dtype = static_cast<DType>(it.parameter[4]);
    args.rotated = args.kv_dtype != args.dtype;
    args.batch = q.sizes[0];
    args.heads = q.sizes[1];
    args.key_heads = k.sizes[1];
    args.tokens = q.sizes[2];
    args.length = k.sizes[2];
    args.width = q.sizes[3];
    args.query = data(q);
    args.key = data(k);
    args.value = data(v);
    std::copy_n(q.strides, 3, args.query_strides);
    std::copy_n(k.strides, 3, args.key_strides);
    std::copy_n(v.strides, 3, args.value_strides);
    args.scale = static_cast<float>(number(it.parameter[0]));
    args.causal = it.parameter[1] != 0;
    int at = 4;
    if (it.parameter[2] != 0) {
      const Operand& mask = it.operand[at++];
      args.mask = reinterpret_cast<const std::uint8_t*>(data(mask));
      args.mask_strides[0] = mask.strides[0];
      args.mask_strides[1] = mask.strides[2];
    }
    if (it.parameter[3] != 0) args.sinks = reinterpret_cast<const float*>(data(it.operand[at]));
    args.y = data(it.operand[0]);
    pi2::attention(args, parallel);
  }

  bool write_kv(const Instruction& it) const {
    const Operand &rows = it.operand[0], &x = it.operand[1];
    WriteKvArgs args;
    args.dtype = static_cast<DType>(x.element);
    args.kv_dtype = static_cast<DType>(it.parameter[0]);
    args.batch = x.sizes[0];
    args.heads = x.sizes[1];
    args.tokens = x.sizes[2];
    args.width = x.sizes[3];
    args.length = rows.sizes[2];
    args.x = data(x);
    args.rows = data(rows);
    std::copy_n(x.strides, 3, args.x_strides);
    std::copy_n(rows.strides, 3, args.row_strides);
    args.at = reinterpret_cast<const std::int64_t*>(data(it.operand[2]));
    return pi2::write_kv(args, parallel);
  }

  bool run(const Instruction* at) const {
    const Instruction& it = *at;
    switch (it.op) {
      case StepOp::kMean:
      case StepOp::kArgmax: reduce(it); return true;
      case StepOp::kGather: return gather(it);
      case StepOp::kTakeRows: return take_rows(it);
      case StepOp::kDequantize: dequantize(it); return true;
      case StepOp::kIndexCopy: return index_copy(it);
      case StepOp::kLinear: linear(at); return true;
      case StepOp::kAttention: attention(it); return true;
      case StepOp::kWriteKv: return write_kv(it);
      case StepOp::kCall:
        call(host, it.parameter[0], it.operand[0].element, data(it.operand[1]), data(it.operand[0]),
             it.operand[0].numel());
        return true;
      default: compute(it); return true;
    }
  }
};

}  // namespace

std::int64_t StepProgram::Operand::numel() const {
  std::int64_t count = 1;
  for (int d = 0; d < rank; ++d) count *= sizes[d];
  return count;
}

bool StepProgram::Operand::contiguous() const {
  std::int64_t stride = 1;
  for (int d = rank - 1; d >= 0; --d) {
    if (sizes[d] != 1 && strides[d] != stride) return false;
    stride *= sizes[d];
  }
  return true;
}

std::unique_ptr<StepProgram> StepProgram::make(const std::int64_t* code, std::int64_t words,
                                               const std::vector<std::int64_t>& slot_bytes, std::int64_t given,
                                               std::int64_t calls, std::string* reason) {
  auto made = std::make_unique<StepProgram>();
  Words from{code, words};
  while (from.left > 0) {
    Instruction it;
    it.op = static_cast<StepOp>(from.next(0, kStepOps - 1));
    it.operands = static_cast<int>(from.next(2, kMostOperands));
    it.parameters = static_cast<int>(from.next(0, kMostParameters));
    for (int i = 0; i < it.operands && from.sound; ++i) it.operand[i] = read_operand(from, slot_bytes);
    for (int i = 0; i < it.parameters && from.sound; ++i) it.parameter[i] = from.next(INT64_MIN, INT64_MAX);
    if (!from.sound || !sound(it) || (it.op == StepOp::kCall && it.parameter[0] >= calls)) {
      *reason = "instruction " + std::to_string(made->instructions_.size());
      return nullptr;
    }
    if (it.op < StepOp::kMean) flatten(it);
    made->instructions_.push_back(it);
  }
  made->bring_together();
  if (!made->place(slot_bytes, given)) {
    *reason = "sizes of slots";
    return nullptr;
  }
  return made;
}

// Linear layers of one x, such as gate and up, which an activation separates, follow each other.
void StepProgram::bring_together() {
  constexpr std::size_t kNear = 8;
  for (std::size_t i = 1; i < instructions_.size(); ++i) {
    std::size_t j = i;
    while (j-- > 0 && i - j <= kNear && may_pass(instructions_[i], instructions_[j])) {
      if (!same_input(instructions_[i], instructions_[j])) continue;
      std::rotate(instructions_.begin() + static_cast<std::ptrdiff_t>(j) + 1,
                  instructions_.begin() + static_cast<std::ptrdiff_t>(i),
                  instructions_.begin() + static_cast<std::ptrdiff_t>(i) + 1);
      break;
    }
  }
  for (std::size_t i = 0; i < instructions_.size(); i += static_cast<std::size_t>(instructions_[i].together)) {
    Instruction& first = instructions_[i];
    while (first.together < kMostTogether && i + static_cast<std::size_t>(first.together) < instructions_.size()) {
      const std::size_t next = i + static_cast<std::size_t>(first.together);
      bool passes = same_input(instructions_[next], first);
      for (std::size_t k = i; k < next && passes; ++k) passes = may_pass(instructions_[next], instructions_[k]);
      if (!passes) break;
      ++first.together;
    }
  }
}

// Gives the program's own slots offsets; slots that are not in use at the same time share memory.
bool StepProgram::place(const std::vector<std::int64_t>& slot_bytes, std::int64_t given) {
  constexpr std::int64_t kAlign = 64;
  struct Use {
    std::int64_t first = -1, last = -1, begin = 0, end = 0;
  };
  std::vector<Use> uses(slot_bytes.size());
  for (std::size_t i = 0; i < instructions_.size(); ++i)
    for (int k = 0; k < instructions_[i].operands; ++k) {
      Use& use = uses[static_cast<std::size_t>(instructions_[i].operand[k].slot)];
      if (use.first < 0) use.first = static_cast<std::int64_t>(i);
      use.last = static_cast<std::int64_t>(i);
    }
  std::vector<std::size_t> placed;  // by begin
  std::int64_t size = 0;
  for (auto s = static_cast<std::size_t>(given); s < uses.size(); ++s) {
    Use& use = uses[s];
    if (slot_bytes[s] < 0 || slot_bytes[s] > kMostBytes) return false;
    const std::int64_t bytes = (slot_bytes[s] + kAlign - 1) / kAlign * kAlign;
    for (const std::size_t other : placed)
      if (uses[other].last >= use.first && uses[other].first <= use.last && uses[other].begin < use.begin + bytes)
        use.begin = std::max(use.begin, uses[other].end);
    use.end = use.begin + bytes;
    size = std::max(size, use.end);
    placed.insert(std::upper_bound(placed.begin(), placed.end(), s,
                                   [&](std::size_t a, std::size_t b) { return uses[a].begin < uses[b].begin; }),
                  s);
    own_.push_back(use.begin);
  }
  memory_.resize(static_cast<std::size_t>(size + kAlign));
  bases_.resize(slot_bytes.size());
  auto* aligned = memory_.data() + (kAlign - reinterpret_cast<std::uintptr_t>(memory_.data()) % kAlign) % kAlign;
  for (std::size_t i = 0; i < own_.size(); ++i) bases_[static_cast<std::size_t>(given) + i] = aligned + own_[i];
  return true;
}

bool StepProgram::run(const std::vector<char*>& given, const ParallelFor& parallel, Call call, void* host) {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::copy(given.begin(), given.end(), bases_.begin());
  const Runner runner{bases_, parallel, call, host};
  for (std::size_t i = 0; i < instructions_.size(); i += static_cast<std::size_t>(instructions_[i].together))
    if (!runner.run(&instructions_[i])) return false;
  return true;
}

}  // namespace pi2
