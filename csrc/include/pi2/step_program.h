// A decoding step's calls as one program. Sizes and strides never change between steps, so views cost nothing, and
// PyTorch's 1 to 4 us for each small operator become the time that its numbers take.
//
// Every instruction rounds as PyTorch's operator does, so that results have the same bits; torch_pi2/decode/
// step_program.py writes programs, and compares the first run of each with PyTorch's results.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "pi2/types.h"

namespace pi2 {

// Of an operand's numbers. The floats are DTypes.
enum class Element : std::int64_t { kF32, kBF16, kF16, kI64, kByte };
constexpr std::int64_t kElements = 5;

// The first operand is the result. `step_program.py` has the same list.
enum class StepOp : std::int64_t {
  kCopy,  // converts
  kAdd,   // these four: of two operands, or of one and a constant (the bits of a double)
  kSub,
  kMul,
  kDiv,
  kNeg,  // these three: of one operand
  kSquare,
  kRsqrt,
  kLess,  // a byte, of two int64 operands or one and a constant
  kLessEqual,
  kAnd,         // of bytes that are 0 or 1
  kIsFinite,    // a byte, of a float
  kWhere,       // y = b ? a : the constant; int64, b a byte
  kMean,        // over the last dimension
  kArgmax,      // of the last dimension, as int64: the first of the largest, or the first NaN
  kGather,      // y[.., 0] = x[.., index[.., 0]]
  kTakeRows,    // y[i, :] = x[index[i], :]
  kDequantize,  // y, rows; parameter: the rows' DType
  kIndexCopy,   // y[.., index[i], ..] = x[.., i, ..]; operands y, x, index; parameter: the dimension
  kLinear,      // y, x, rows, perhaps a bias; parameters: weights' DType, int8 activations, blocks
  kAttention,   // y, query, key, value, perhaps a mask and sinks; parameters: scale (a double), causal, mask, sinks,
                // and the DType of keys and values: query's, or kI8 or kQ4 (rotated)
  kCall,        // y, x, contiguous and of one size: an operator of the host; parameter: its number
  kWriteKv,     // rows, x, positions; parameter: the rows' DType
};
constexpr std::int64_t kStepOps = 23;

class StepProgram {
 public:
  static constexpr int kMostOperands = 6, kMostRank = 6, kMostParameters = 5;

  struct Operand {
    std::int64_t slot = 0, offset = 0;  // bytes
    Element element = Element::kF32;
    int rank = 0;
    std::int64_t sizes[kMostRank] = {}, strides[kMostRank] = {};  // in numbers

    std::int64_t numel() const;
    bool contiguous() const;
  };
  struct Instruction {
    StepOp op = StepOp::kCopy;
    int operands = 0, parameters = 0;
    Operand operand[kMostOperands];
    std::int64_t parameter[kMostParameters] = {};
    int together = 1;  // of linear layers: how many from here on are computed in one pass
  };
  // The host's operator `number` on contiguous x and y of `count` numbers.
  using Call = void (*)(void* host, std::int64_t number, Element element, const void* x, void* y, std::int64_t count);

  // `calls`: how many operators the host has. `code`: of each instruction its op, the numbers of operands and
  // parameters, the operands (slot, offset, element, rank, sizes, strides), and the parameters. `slot_bytes`: of all
  // slots; the first `given` are the host's, which passes their addresses to run(), the others are the program's own.
  // Returns null and a reason if the code is not sound: whatever it says, run() stays within the slots.
  static std::unique_ptr<StepProgram> make(const std::int64_t* code, std::int64_t words,
                                           const std::vector<std::int64_t>& slot_bytes, std::int64_t given,
                                           std::int64_t calls, std::string* reason);

  // `given`: the addresses of the host's slots. One run at a time. False: an index was out of range, and what is
  // written is incomplete.
  bool run(const std::vector<char*>& given, const ParallelFor& parallel, Call call, void* host);

 private:
  void bring_together();
  bool place(const std::vector<std::int64_t>& slot_bytes, std::int64_t given);

  std::vector<Instruction> instructions_;
  std::vector<std::int64_t> own_;  // offsets of the program's own slots in memory_
  std::vector<char> memory_;
  std::vector<char*> bases_;
  std::mutex mutex_;
};

}  // namespace pi2
