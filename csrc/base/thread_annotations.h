// Annotations for Clang's thread safety analysis (make lint: -Wthread-safety). Empty for other compilers.
#pragma once

#if defined(__clang__)
#define PI2_THREAD_ATTRIBUTE(x) __attribute__((x))
#else
#define PI2_THREAD_ATTRIBUTE(x)
#endif

#define PI2_CAPABILITY(kind) PI2_THREAD_ATTRIBUTE(capability(kind))
#define PI2_SCOPED_CAPABILITY PI2_THREAD_ATTRIBUTE(scoped_lockable)
#define PI2_GUARDED_BY(lock) PI2_THREAD_ATTRIBUTE(guarded_by(lock))
#define PI2_PT_GUARDED_BY(lock) PI2_THREAD_ATTRIBUTE(pt_guarded_by(lock))
#define PI2_REQUIRES(lock) PI2_THREAD_ATTRIBUTE(requires_capability(lock))
#define PI2_EXCLUDES(lock) PI2_THREAD_ATTRIBUTE(locks_excluded(lock))
#define PI2_ACQUIRE(...) PI2_THREAD_ATTRIBUTE(acquire_capability(__VA_ARGS__))
#define PI2_RELEASE(...) PI2_THREAD_ATTRIBUTE(release_capability(__VA_ARGS__))
#define PI2_NOT_ANALYSED PI2_THREAD_ATTRIBUTE(no_thread_safety_analysis)
