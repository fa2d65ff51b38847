/* libpi2_executorch.so for programs that run a .pte of torch_pi2 with ExecuTorch. Loading the library (after
   ExecuTorch's) registers the backend "Pi2Backend" and the operators pi2::linear.out, pi2::sparse_ffn.out and
   pi2::predicted_ffn.out. C, for ctypes; every function may be called by any thread. */
#ifndef PI2_EXECUTORCH_H
#define PI2_EXECUTORCH_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Of this header: 1. */
int pi2_et_abi(void);

/* An option of the backend, as text, for programs loaded from now on; "": back to its default. Returns 0, or -1 for an
   unknown key or an invalid value (see pi2_et_error). Options of one load (ExecuTorch's LoadBackendOptionsMap) override
   these; these override the environment, which overrides the .pte.
     store_path       the neuron store, or the folder that it is in (environment: PI2_STORE)
     cache_bytes_kib  memory for neurons, KiB (environment: PI2_CACHE_KIB); default: room for all of them
     threads          for layers computed while an accelerator works; 0, the default: those of ExecuTorch's pool
     io_threads       threads of pread; queue depth of io_uring (64)
     engine           auto (the first available one of io/engines.inc), or one of them
     policy           cache policy: lfu (default), or another of cache/policies/list.inc
     direct           true (default): reads bypass the page cache where that works
     preload          true (default): fill the cache before the first call
     trace            a file for Chrome trace events, written when the last user of the store closes it */
int pi2_et_set(const char* key, const char* value);

/* The last problem, one line: "what: expected ..., found .... what to do". "" if there was none. Valid until this
   thread's next call of this function. */
const char* pi2_et_error(void);
void pi2_et_clear_error(void);

/* For methods loaded from now on: nonzero makes XNNPACK reuse weights that it packed for another method. It identifies
   weights by their values without the scales of quantised ones, so use it for floats only. Returns 0, or -1 if there is
   no XNNPACK in this process. */
int pi2_et_share_weights(int share);

/* Writes the figures of all open stores since the last reset as JSON, at most `capacity` bytes including NUL. Returns
   the bytes needed including NUL, or -1 (see pi2_et_error). Resets only if everything was written.
     {"stores": [{"path", "calls", "wanted", "hits", "reads", "bytes_read", "wait_ns", "busy_ns", "cache_bytes",
     "resident_bytes", "predictor_bytes", "submit_wait_ns", "engine"}], "opens": n, "closes": n} */
int64_t pi2_et_stats(char* json, int64_t capacity, int reset);

#ifdef __cplusplus
}
#endif

#endif /* PI2_EXECUTORCH_H */
