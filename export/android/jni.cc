// The native part of Bundle.kt.
#include <jni.h>

#include <memory>
#include <string>

#include "request_line.h"
#include "session.h"

namespace {

using pi2::runner::Json;
using pi2::runner::Options;
using pi2::runner::Problem;
using pi2::runner::Session;

struct Open {
  Options options;
  std::unique_ptr<Session> session;
};

// Java's strings are UTF-16, and JNI converts them to a "modified UTF-8", which differs from UTF-8 beyond U+FFFF. So
// text is passed as bytes, which Kotlin converts.
std::string bytes_of(JNIEnv* env, jbyteArray array) {
  std::string text(static_cast<std::size_t>(env->GetArrayLength(array)), '\0');
  env->GetByteArrayRegion(array, 0, static_cast<jsize>(text.size()), reinterpret_cast<jbyte*>(text.data()));
  return text;
}

// Null: an exception is pending.
jbyteArray array_of(JNIEnv* env, const std::string& text) {
  const jbyteArray array = env->NewByteArray(static_cast<jsize>(text.size()));
  if (array != nullptr) {
    env->SetByteArrayRegion(array, 0, static_cast<jsize>(text.size()), reinterpret_cast<const jbyte*>(text.data()));
  }
  return array;
}

// Calls Bundle's listener. Its exceptions stay pending.
class Listener {
 public:
  Listener(JNIEnv* env, jobject object) : env_(env), object_(object) {
    const jclass its = env->GetObjectClass(object);
    text_ = env->GetMethodID(its, "text", "([B)V");
    if (text_ != nullptr) stops_ = env->GetMethodID(its, "stops", "()Z");
    throw_pending();
  }

  void text(const std::string& piece) const {
    const jbyteArray bytes = array_of(env_, piece);
    if (bytes != nullptr) env_->CallVoidMethod(object_, text_, bytes);
    throw_pending();
    env_->DeleteLocalRef(bytes);
  }

  bool stops() const {
    const bool stops = env_->CallBooleanMethod(object_, stops_) != JNI_FALSE;
    throw_pending();
    return stops;
  }

 private:
  void throw_pending() const {
    if (env_->ExceptionCheck()) throw Problem("an exception of Java's");
  }

  JNIEnv* env_;
  jobject object_;
  jmethodID text_ = nullptr, stops_ = nullptr;
};

// Leaves the exception of Bundle.fail pending, or an earlier one.
void fail(JNIEnv* env, jclass bundle, const char* line, bool no_room = false) {
  if (env->ExceptionCheck()) return;
  const jmethodID method = env->GetStaticMethodID(bundle, "fail", "([BZ)V");
  const jbyteArray bytes = method == nullptr ? nullptr : array_of(env, line);
  if (bytes != nullptr) env->CallStaticVoidMethod(bundle, method, bytes, static_cast<jboolean>(no_room));
}

// Runs `body`; its exceptions become Java exceptions with the same message.
template <class Result, class Body>
Result guarded(JNIEnv* env, jclass bundle, Result otherwise, const Body& body) {
  try {
    return body();
  } catch (const pi2::runner::NoRoom& error) {
    fail(env, bundle, error.what(), true);
  } catch (const std::exception& error) {
    fail(env, bundle, error.what());
  } catch (...) {
    fail(env, bundle, "unknown error");
  }
  return otherwise;
}

}  // namespace

extern "C" {

JNIEXPORT jlong JNICALL Java_org_torchpi2_Bundle_open(JNIEnv* env, jclass bundle, jbyteArray folder, jlong budget,
                                                      jint threads, jboolean verify) {
  return guarded<jlong>(env, bundle, 0, [&] {
    auto open = std::make_unique<Open>();
    open->options.bundle = bytes_of(env, folder);
    open->options.budget = budget;
    open->options.threads = threads;
    if (verify == JNI_FALSE) open->options.verify = pi2::runner::Verify::kSizes;
    open->session = std::make_unique<Session>(open->options);
    return reinterpret_cast<jlong>(open.release());
  });
}

// `request`: a line of --requests. Returns null without an exception if the listener stopped it before the first token.
JNIEXPORT jbyteArray JNICALL Java_org_torchpi2_Bundle_generate(JNIEnv* env, jclass bundle, jlong handle,
                                                               jbyteArray request, jobject object) {
  return guarded<jbyteArray>(env, bundle, nullptr, [&]() -> jbyteArray {
    const auto* open = reinterpret_cast<const Open*>(handle);
    const Listener listener(env, object);
    const Json line = pi2::runner::parse_request(bytes_of(env, request));
    Options options = pi2::runner::request_of(line, open->options);
    bool stopped = false;
    options.request.stopped = [&] { return stopped = listener.stops(); };
    try {
      const auto stream = [&](int, const std::string& piece) { listener.text(piece); };
      const Json report = pi2::runner::report(open->session->generate(options, stream));
      return array_of(env, report.dump(-1, ' ', false, Json::error_handler_t::replace));
    } catch (const Problem&) {
      if (!stopped) throw;
      return nullptr;  // unless an exception of the listener is pending
    }
  });
}

JNIEXPORT void JNICALL Java_org_torchpi2_Bundle_close(JNIEnv* env, jclass bundle, jlong handle) {
  guarded<int>(env, bundle, 0, [&] {
    const std::unique_ptr<Open> open(reinterpret_cast<Open*>(handle));
    open->session->close();
    return 0;
  });
}

}  // extern "C"
