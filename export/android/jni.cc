// The native half of kotlin/Bundle.kt.
#include <jni.h>

#include <memory>
#include <string>

#include "session.h"

namespace {

using pi2::runner::Options;
using pi2::runner::Session;

struct Open {
  Options options;
  std::unique_ptr<Session> session;
};

// Java's strings are UTF-16: its own conversion to "modified UTF-8" is none of characters beyond U+FFFF. Text passes as
// bytes, which Kotlin converts.
std::string bytes_of(JNIEnv* env, jbyteArray array) {
  if (array == nullptr) return "";
  std::string text(static_cast<std::size_t>(env->GetArrayLength(array)), '\0');
  env->GetByteArrayRegion(array, 0, static_cast<jsize>(text.size()), reinterpret_cast<jbyte*>(text.data()));
  return text;
}

jbyteArray array_of(JNIEnv* env, const std::string& text) {
  const jbyteArray array = env->NewByteArray(static_cast<jsize>(text.size()));
  if (array != nullptr) {
    env->SetByteArrayRegion(array, 0, static_cast<jsize>(text.size()), reinterpret_cast<const jbyte*>(text.data()));
  }
  return array;
}

// Runs `body`; what it throws becomes an IllegalStateException with the same line.
template <class Result, class Body>
Result guarded(JNIEnv* env, Result otherwise, const Body& body) {
  try {
    return body();
  } catch (const std::exception& error) {
    if (!env->ExceptionCheck()) env->ThrowNew(env->FindClass("java/lang/IllegalStateException"), error.what());
  } catch (...) {
    if (!env->ExceptionCheck()) env->ThrowNew(env->FindClass("java/lang/IllegalStateException"), "unknown error");
  }
  return otherwise;
}

}  // namespace

extern "C" {

JNIEXPORT jlong JNICALL Java_org_torchpi2_Bundle_open(JNIEnv* env, jclass, jbyteArray folder, jlong budget,
                                                      jint threads, jboolean verify) {
  return guarded<jlong>(env, 0, [&] {
    auto open = std::make_unique<Open>();
    open->options.bundle = bytes_of(env, folder);
    open->options.budget = budget;
    open->options.threads = threads;
    if (verify == JNI_FALSE) open->options.verify = pi2::runner::Verify::kSizes;
    open->session = std::make_unique<Session>(open->options);
    return reinterpret_cast<jlong>(open.release());
  });
}

JNIEXPORT jbyteArray JNICALL Java_org_torchpi2_Bundle_generate(JNIEnv* env, jclass, jlong handle, jbyteArray prompt,
                                                               jbyteArray system, jboolean chat, jint max_new_tokens,
                                                               jdouble temperature, jdouble top_p, jlong seed,
                                                               jobject listener) {
  return guarded<jbyteArray>(env, nullptr, [&] {
    const auto* open = reinterpret_cast<const Open*>(handle);
    Options options = open->options;
    options.prompt = bytes_of(env, prompt);
    options.system = bytes_of(env, system);
    options.chat = chat != JNI_FALSE;
    options.request.max_new_tokens = max_new_tokens;
    options.request.sampling.temperature = temperature;
    options.request.sampling.top_p = top_p;
    options.request.seed = static_cast<std::uint64_t>(seed);
    const jmethodID text = env->GetMethodID(env->GetObjectClass(listener), "text", "([B)V");
    if (text == nullptr) throw pi2::runner::Problem("listener", "a method text(ByteArray)", "none", "Use Bundle.kt.");
    const auto stream = [&](int, const std::string& piece) {
      const jbyteArray bytes = array_of(env, piece);
      if (bytes != nullptr) env->CallVoidMethod(listener, text, bytes);
      if (env->ExceptionCheck()) throw pi2::runner::Problem("listener stopped");
      env->DeleteLocalRef(bytes);
    };
    const pi2::runner::Json report = pi2::runner::report(open->session->generate(options, stream));
    return array_of(env, report.dump(-1, ' ', false, pi2::runner::Json::error_handler_t::replace));
  });
}

JNIEXPORT void JNICALL Java_org_torchpi2_Bundle_close(JNIEnv* env, jclass, jlong handle) {
  guarded<int>(env, 0, [&] {
    const std::unique_ptr<Open> open(reinterpret_cast<Open*>(handle));
    open->session->close();
    return 0;
  });
}

}  // extern "C"
