// Pi2Backend through ExecuTorch's own interface, with blobs and tensors made here: options of a load and of the
// process, codes of errors, tensors that do not fit, memory that there is none of. The rest is tested from Python, over
// .pte files.
#include <executorch/runtime/backend/interface.h>
#include <executorch/runtime/core/exec_aten/util/tensor_util.h>
#include <executorch/runtime/platform/runtime.h>

#include <cmath>
#include <cstdlib>
#include <new>

#include "base/convert.h"
#include "pi2/executorch.h"
#include "pi2/ffn.h"
#include "tests/executorch/blob_fixture.h"

namespace {

// Allocations of this thread until one fails; below 0: none does.
thread_local long allocations_left = -1;

}  // namespace

// Also of the library's: a program's own take their place.
void* operator new(std::size_t bytes) {
  if (allocations_left == 0) throw std::bad_alloc();
  if (allocations_left > 0) --allocations_left;
  if (void* found = std::malloc(bytes == 0 ? 1 : bytes)) return found;
  throw std::bad_alloc();
}
void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept { return std::malloc(bytes); }
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }

namespace {

using namespace executorch::runtime;
using executorch::aten::ScalarType;
using executorch::aten::SizesType;
using executorch::aten::Tensor;
using executorch::aten::TensorImpl;
using executorch::aten::TensorShapeDynamism;
using pi2::DType;
using pi2_test::failures;

constexpr SizesType kHidden = 64, kNeurons = 200;

// A tensor with room for `most` rows.
struct Given {
  std::vector<char> data;
  SizesType sizes[2];
  executorch::aten::DimOrderType order[2] = {0, 1};
  executorch::aten::StridesType strides[2];
  TensorImpl impl;
  EValue value;

  Given(SizesType rows, SizesType columns, ScalarType dtype = ScalarType::Float, SizesType most = 0)
      : data(static_cast<std::size_t>(std::max(rows, most) * columns) * 8),
        sizes{std::max(rows, most), columns},
        strides{columns, 1},
        impl(dtype, 2, sizes, data.data(), order, strides, TensorShapeDynamism::DYNAMIC_BOUND),
        value(Tensor(&impl)) {
    const SizesType now[2] = {rows, columns};
    PI2_CHECK(resize_tensor(value.toTensor(), {now, 2}) == Error::Ok, "sizes");
  }
};

Error run(const BackendInterface& backend, DelegateHandle* handle, std::vector<EValue*> values) {
  BackendExecutionContext context;
  return backend.execute(context, handle, {values.data(), values.size()});
}

Result<DelegateHandle*> load(const BackendInterface& backend, const pi2_test::Bytes512& blob,
                             std::vector<BackendOption> options) {
  BackendInitContext context(nullptr, nullptr, "forward", nullptr, {options.data(), options.size()});
  FreeableBuffer buffer(blob.data(), blob.size(), nullptr);
  return backend.init(context, &buffer, {});
}

BackendOption option(const char* key, const std::string& value) {
  BackendOption made;
  std::snprintf(made.key, sizeof(made.key), "%s", key);
  std::array<char, kMaxOptionValueLength> text{};
  std::snprintf(text.data(), text.size(), "%s", value.c_str());
  made.value = text;
  return made;
}

template <class Value>
BackendOption option_of(const char* key, Value value) {
  BackendOption made = option(key, "");
  made.value = value;
  return made;
}

void expect(Error found, Error wanted, const char* message) {
  const std::string words = pi2_et_error();
  PI2_CHECK(found == wanted && words.find(message) != std::string::npos, "code %d: '%s' has no '%s'",
            static_cast<int>(found), words.c_str(), message);
}

long check(std::mt19937& rng) {
  const pi2_test::StoreFixture store(rng, 1, kNeurons, 3, kHidden, DType::kQ4);
  const pi2::et::Blob blob = pi2_test::blob_of(store, 0);
  const pi2_test::Bytes512 bytes = pi2_test::written(blob);
  BackendInterface* const found = get_backend_class("Pi2Backend");
  PI2_CHECK(found != nullptr && found->is_available(), "not registered");
  if (found == nullptr) return 1;
  BackendInterface& backend = *found;

  // Options: of the load, of the process, of the environment.
  const auto refused = [&](std::vector<BackendOption> options, Error code, const char* message) {
    pi2_et_clear_error();
    const Result<DelegateHandle*> handle = load(backend, bytes, std::move(options));
    expect(handle.error(), code, message);
  };
  refused({}, Error::AccessFailed, "expected a file, found No such file");
  PI2_CHECK(setenv("PI2_STORE", "/nowhere/environment", 1) == 0, "environment");
  refused({}, Error::AccessFailed, "neuron store /nowhere/environment");
  BackendOption process[] = {option("store_path", "/nowhere/process")};
  PI2_CHECK(set_option("Pi2Backend", {process, 1}) == Error::Ok, "%s", pi2_et_error());
  refused({}, Error::AccessFailed, "neuron store /nowhere/process");
  refused({option("store_path", "/nowhere/load")}, Error::AccessFailed, "neuron store /nowhere/load");
  refused({option_of("io_threads", 0)}, Error::InvalidArgument, "option io_threads of Pi2Backend: expected 1 to 1024");
  refused({option_of("direct", 7)}, Error::InvalidArgument, "expected true or false, found '7'");
  refused({option("no_such", "1")}, Error::InvalidArgument, "found 'no_such'");
  BackendOption bad[] = {option_of("threads", -1)};
  expect(set_option("Pi2Backend", {bad, 1}), Error::InvalidArgument, "option threads of Pi2Backend");

  const auto made = load(
      backend, bytes, {option("store_path", store.path), option_of("cache_bytes_kib", 8), option_of("direct", false)});
  PI2_CHECK(made.ok(), "%s", pi2_et_error());
  if (!made.ok()) return 9;
  DelegateHandle* const handle = *made;

  // Every float type, and results that are resized.
  for (const ScalarType type : {ScalarType::Float, ScalarType::BFloat16, ScalarType::Half}) {
    const DType dtype = type == ScalarType::Float ? DType::kF32 : type == ScalarType::Half ? DType::kF16 : DType::kBF16;
    Given x(3, kHidden, type), y(1, kHidden, type, 9);
    const std::vector<char> numbers = pi2_test::stored(rng, dtype, 3 * kHidden);
    std::memcpy(x.data.data(), numbers.data(), numbers.size());
    const Error code = run(backend, handle, {&x.value, &y.value});
    PI2_CHECK(code == Error::Ok && y.impl.size(0) == 3, "%s", pi2_et_error());
    std::vector<char> wanted(numbers.size());
    pi2::FfnArgs args;
    args.x = numbers.data();
    args.y = wanted.data();
    args.x_dtype = dtype;
    args.tokens = 3;
    args.hidden = kHidden;
    args.neurons = kNeurons;
    args.w_dtype = DType::kQ4;
    args.neuron_rows = store.neuron_rows[0].data();
    pi2::sparse_ffn(args, pi2::serial());
    PI2_CHECK(std::memcmp(wanted.data(), y.data.data(), wanted.size()) == 0, "bits of dtype %d",
              static_cast<int>(type));
  }
  Given none(0, kHidden), nothing(0, kHidden);
  PI2_CHECK(run(backend, handle, {&none.value, &nothing.value}) == Error::Ok, "no tokens: %s", pi2_et_error());

  // Tensors that do not fit.
  Given x(3, kHidden), y(3, kHidden), narrow(3, kHidden - 1), ints(3, kHidden, ScalarType::Int), small(2, kHidden),
      half(3, kHidden, ScalarType::Half);
  EValue number(std::int64_t{3});
  const auto fails = [&](std::vector<EValue*> values, const char* message) {
    pi2_et_clear_error();
    expect(run(backend, handle, std::move(values)), Error::InvalidArgument, message);
  };
  fails({&narrow.value, &y.value}, "pi2_ffn.0, input: expected [..., 64], found a last size of 63");
  fails({&ints.value, &y.value}, "pi2_ffn.0, input: expected float32, bfloat16 or float16, found dtype 3");
  fails({&x.value, &small.value}, "pi2_ffn.0, result: expected room for 192 numbers, found less");
  fails({&x.value, &half.value}, "pi2_ffn.0, result: expected the dtype of its input, found another");
  fails({&x.value, &number}, "pi2_ffn.0: expected a tensor and its result");
  fails({&x.value}, "found 1 values");
  x.order[0] = 1;
  x.order[1] = 0;
  fails({&x.value, &y.value}, "pi2_ffn.0, input: expected a contiguous tensor, found another order");
  backend.destroy(handle);
  char text[4096];
  PI2_CHECK(pi2_et_stats(text, sizeof(text), 0) < 4096 && std::string(text).find("{\"stores\": []") == 0, "%s", text);
  return 20;
}

// Two experts: the sum of what they compute, and what a router may not give.
long check_mixture(std::mt19937& rng) {
  const BackendInterface& backend = *get_backend_class("Pi2Backend");
  const pi2_test::StoreFixture store(rng, 2, kNeurons, 3, kHidden, DType::kQ4);
  pi2::et::Blob blob = pi2_test::blob_of(store, 0);
  blob.experts = 3;
  const auto with = [&] {
    return load(backend, pi2_test::written(blob), {option("store_path", store.path), option_of("direct", false)});
  };
  pi2_et_clear_error();
  expect(with().error(), Error::DelegateInvalidCompatibility, "expected layer 2, found 2 layers");
  blob.experts = 2;
  const auto made = with();
  PI2_CHECK(made.ok(), "%s", pi2_et_error());
  if (!made.ok()) return 2;
  DelegateHandle* const handle = *made;
  Given x(2, kHidden), y(2, kHidden), index(2, 1, ScalarType::Long), weights(2, 1), wide(2, 2),
      ints(2, 1, ScalarType::Int), short_index(1, 1, ScalarType::Long);
  const std::vector<char> numbers = pi2_test::stored(rng, DType::kF32, 2 * kHidden);
  std::memcpy(x.data.data(), numbers.data(), numbers.size());
  auto* const chosen = reinterpret_cast<std::int64_t*>(index.data.data());
  auto* const weight = reinterpret_cast<float*>(weights.data.data());
  chosen[0] = 1, chosen[1] = 0;
  weight[0] = 1, weight[1] = 0.5f;
  const auto call = [&](Given& router, Given& shares) {
    pi2_et_clear_error();
    return run(backend, handle, {&x.value, &router.value, &shares.value, &y.value});
  };
  PI2_CHECK(call(index, weights) == Error::Ok, "%s", pi2_et_error());
  for (const std::size_t token : {0, 1}) {
    std::vector<float> wanted(kHidden);
    pi2::FfnArgs args;
    args.x = x.data.data() + token * kHidden * sizeof(float);
    args.y = wanted.data();
    args.tokens = 1;
    args.hidden = kHidden;
    args.neurons = kNeurons;
    args.w_dtype = DType::kQ4;
    args.neuron_rows = store.neuron_rows[1 - token].data();
    pi2::sparse_ffn(args, pi2::serial());
    for (float& value : wanted) value *= weight[token];
    const char* const found = y.data.data() + token * kHidden * sizeof(float);
    PI2_CHECK(std::memcmp(wanted.data(), found, kHidden * sizeof(float)) == 0, "token %zu", token);
  }
  expect(run(backend, handle, {&x.value, &y.value}), Error::InvalidArgument,
         "pi2_experts.0: expected three tensors and the result, found 2 values");
  expect(call(ints, weights), Error::InvalidArgument, "pi2_experts.0, index: expected 2 x slots of int64, found 2 x 1");
  expect(call(short_index, weights), Error::InvalidArgument, "index: expected 2 x slots of int64, found 1 x 1");
  expect(call(index, wide), Error::InvalidArgument, "pi2_experts.0, routing: expected 2 x 1, found 2 x 2");
  expect(call(index, ints), Error::InvalidArgument, "routing: expected float32, bfloat16 or float16, found dtype 3");
  weights.order[0] = 1, weights.order[1] = 0;
  expect(call(index, weights), Error::InvalidArgument, "expected contiguous tensors of a router, found another order");
  weights.order[0] = 0, weights.order[1] = 1;
  chosen[1] = 3;
  expect(call(index, weights), Error::InvalidArgument, "experts from layer 0: expected a router of this model, found ");
  backend.destroy(handle);
  return 10;
}

// Calls it with the first, the second ... of its allocations failing, until none does; how often. Nothing is thrown.
template <class Call>
long each_allocation_fails(const Call& call) {
  for (long k = 0;; ++k) {
    allocations_left = k;
    call();
    const bool all = allocations_left > 0;
    allocations_left = -1;
    if (all) return k;
  }
}

// Once an allocation has failed all others do, those of the message, too.
long check_memory(std::mt19937& rng) {
  const BackendInterface& backend = *get_backend_class("Pi2Backend");
  const pi2_test::StoreFixture store(rng, 1, kNeurons, 2, kHidden, DType::kQ4);
  const pi2_test::Bytes512 bytes = pi2_test::written(pi2_test::blob_of(store, 0));
  const std::string path(200, 'x');
  long cases = each_allocation_fails([&] { (void)pi2_et_set("store_path", path.c_str()); });
  PI2_CHECK(cases > 2, "%ld", cases);
  cases += each_allocation_fails([&] { (void)pi2_et_set(path.c_str(), path.c_str()); });
  cases += each_allocation_fails([] { PI2_CHECK(pi2_et_error()[0] != 0, "no error"); });
  char text[4096];
  cases += each_allocation_fails([&] {
    const std::int64_t found = pi2_et_stats(text, sizeof(text), 1);
    PI2_CHECK(found > 0 || (found == -1 && pi2_et_error()[0] != 0), "%lld", static_cast<long long>(found));
  });
  BackendOption options[] = {option("store_path", store.path), option_of("cache_bytes_kib", 8),
                             option_of("io_threads", 1)};
  cases += each_allocation_fails([&] { (void)set_option("Pi2Backend", {options, 3}); });
  PI2_CHECK(set_option("Pi2Backend", {options, 3}) == Error::Ok, "%s", pi2_et_error());
  Given x(3, kHidden), y(3, kHidden);
  EValue* values[] = {&x.value, &y.value};
  BackendInitContext context(nullptr, nullptr, "forward", nullptr, {});
  const long loads = each_allocation_fails([&] {
    FreeableBuffer buffer(bytes.data(), bytes.size(), nullptr);
    const Result<DelegateHandle*> made = backend.init(context, &buffer, {});
    const bool enough = allocations_left > 0;
    allocations_left = -1;
    PI2_CHECK(made.ok() || !enough, "%s", pi2_et_error());
    if (made.ok()) {
      BackendExecutionContext execution;
      const Error code = backend.execute(execution, *made, {values, 2});
      PI2_CHECK(code == Error::Ok, "%s", pi2_et_error());
      backend.destroy(*made);
    }
    if (enough) allocations_left = 1;
  });
  PI2_CHECK(loads > 20, "%ld", loads);
  for (const char* key : {"store_path", "cache_bytes_kib", "io_threads"})
    PI2_CHECK(pi2_et_set(key, "") == 0, "%s", key);
  return cases + loads;
}

}  // namespace

int main() {
  runtime_init();
  std::mt19937 rng(3);
  const long cases = check(rng);
  return pi2_test::finish("backend", cases + check_mixture(rng) + check_memory(rng));
}
