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
   unknown key or a value that it does not take (see pi2_et_error). Options of one load (ExecuTorch's
   LoadBackendOptionsMap) win over these, these over the environment, and that over the .pte.
     store_path       the neuron store, or the folder that it is in (environment: PI2_STORE)
     cache_bytes_kib  memory for neurons, KiB (environment: PI2_CACHE_KIB); default: room for all of them
     threads          of layers that are computed while an accelerator works; 0, the default: as ExecuTorch's pool
     io_threads       of pread; depth of io_uring (64)
     engine           auto (the first of io/engines.inc that there is), or one of them
     policy           what leaves the cache: lfu (default), or another of cache/policies/list.inc
     direct           true (default): reads past the page cache where that works
     preload          true (default): fill the cache before the first call
     trace            a file, written when the last user of the store is gone: Chrome trace events */
int pi2_et_set(const char* key, const char* value);

/* The last problem, one line: "what: expected ..., found .... what to do". "" if there was none. Of this thread's last
   call of this function; valid until its next one. */
const char* pi2_et_error(void);
void pi2_et_clear_error(void);

/* XNNPACK's weights in methods loaded from now on: not 0: those that were packed for another method are used again.
   It tells weights by their values alone, without the scales of quantised ones: for floats only. Returns 0, or -1 if
   there is no XNNPACK in this process. */
int pi2_et_share_weights(int share);

/* Writes what all open stores did since the last reset, as JSON and at most `capacity` bytes with the final NUL;
   returns the bytes that all of it needs with NUL, or -1 (see pi2_et_error). Nothing is reset unless all of it was
   written.
     {"stores": [{"path", "calls", "wanted", "hits", "reads", "bytes_read", "wait_ns", "busy_ns", "cache_bytes",
     "resident_bytes", "predictor_bytes", "submit_wait_ns", "engine"}], "opens": n, "closes": n} */
int64_t pi2_et_stats(char* json, int64_t capacity, int reset);

#ifdef __cplusplus
}
#endif

#endif /* PI2_EXECUTORCH_H */
