// LD_PRELOAD: the k-th call of a kind fails, for tests of what then happens. Calls on files count that lie below
// watched folders; allocations and threads those that libraries of ours ask for (and the program itself, if told so).
// Not armed, it passes everything on. Python arms it by ctypes, programs by PI2_FAULT="kind first count errno folder
// [program]".
#include <dlfcn.h>
#include <fcntl.h>
#include <link.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>
#include <unwind.h>

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <new>

extern "C" {
void* __libc_malloc(size_t);
void* __libc_calloc(size_t, size_t);
void* __libc_realloc(void*, size_t);
void* __libc_memalign(size_t, size_t);
}

namespace {

// Change: writes, fsync, names and sizes.
enum Kind { kNone, kOpen, kRead, kMap, kMemory, kThread, kWrite, kSync, kName, kSize, kChange, kKinds };
const char* const kNames[kKinds] = {"",      "open",  "read", "map",  "memory", "thread",
                                    "write", "fsync", "name", "size", "change"};

std::atomic<int> armed{kNone};
std::atomic<long> first{0}, count{0}, seen{0}, hit{0};
std::atomic<int> error{EIO};
char folder[4096];  // watched
bool program_too = false;

bool counts(Kind kind) {
  const int now = armed.load(std::memory_order_relaxed);
  return now == kind || (now == kChange && kind >= kWrite);
}

// Whether this call of a kind fails; it counts. Errno 0: the process is killed instead.
bool fails(Kind kind) {
  if (!counts(kind)) return false;
  const long number = seen.fetch_add(1) + 1, from = first.load();
  const bool now = number >= from && number - from < count.load();
  hit += now;
  if (now && error == 0) kill(getpid(), SIGKILL);
  if (now) errno = error;
  return now;
}

bool watched(const char* path) {
  const size_t n = strlen(folder);
  return n > 0 && strncmp(path, folder, n) == 0 && (path[n] == 0 || path[n] == '/');
}

bool watched_at(int at, const char* path) {
  if (path[0] == '/') return watched(path);
  char link[64], whole[4096];
  if (at == AT_FDCWD)
    snprintf(link, sizeof link, "/proc/self/cwd");
  else
    snprintf(link, sizeof link, "/proc/self/fd/%d", at);
  const ssize_t n = readlink(link, whole, sizeof whole - 1);
  if (n <= 0) return false;
  whole[n] = 0;
  strncat(whole, "/", sizeof whole - strlen(whole) - 1);
  strncat(whole, path, sizeof whole - strlen(whole) - 1);
  return watched(whole);
}

bool watched(int descriptor) {
  char link[64], whole[4096];
  snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
  const ssize_t n = readlink(link, whole, sizeof whole - 1);
  if (n <= 0) return false;
  whole[n] = 0;
  return watched(whole);
}

bool fails(Kind kind, int descriptor) { return counts(kind) && watched(descriptor) && fails(kind); }
bool fails(Kind kind, int at, const char* path) { return counts(kind) && watched_at(at, path) && fails(kind); }

// --- who asks for memory ---

struct Range {
  uintptr_t begin, end;
  bool ours;  // else the C++ library's, or this one's: whoever called it counts
};
Range ranges[32];
int n_ranges = 0;

int look_at(dl_phdr_info* about, size_t, void*) {
  const char* name = about->dlpi_name;
  const bool ours = strstr(name, "libpi2") != nullptr || (program_too && name[0] == 0);
  const bool passes_on = strstr(name, "libstdc++") != nullptr || strstr(name, "pi2-fault-shim") != nullptr;
  if (!ours && !passes_on) return 0;
  for (int i = 0; i < about->dlpi_phnum && n_ranges < 32; ++i) {
    const ElfW(Phdr) & part = about->dlpi_phdr[i];
    if (part.p_type != PT_LOAD || (part.p_flags & PF_X) == 0) continue;
    const uintptr_t begin = about->dlpi_addr + part.p_vaddr;
    ranges[n_ranges++] = {begin, begin + part.p_memsz, ours};
  }
  return 0;
}

const Range* range_of(uintptr_t at) {
  for (int i = 0; i < n_ranges; ++i)
    if (at >= ranges[i].begin && at < ranges[i].end) return &ranges[i];
  return nullptr;
}

// The first caller that does not pass calls on.
_Unwind_Reason_Code step(_Unwind_Context* context, void* found) {
  const Range* const range = range_of(_Unwind_GetIP(context));
  if (range != nullptr && !range->ours) return _URC_NO_REASON;
  *static_cast<bool*>(found) = range != nullptr;
  return _URC_END_OF_STACK;
}

thread_local bool looking __attribute__((tls_model("initial-exec"))) = false;

bool asked_by_us(void* caller) {
  const Range* const range = range_of(reinterpret_cast<uintptr_t>(caller));
  if (range == nullptr || range->ours) return range != nullptr;
  if (looking) return false;
  looking = true;
  bool found = false;
  _Unwind_Backtrace(step, &found);
  looking = false;
  return found;
}

bool no_memory(void* caller) {
  if (!counts(kMemory) || !asked_by_us(caller) || !fails(kMemory)) return false;
  errno = ENOMEM;
  return true;
}

template <class Function>
Function* real(Function*, const char* name) {
  return reinterpret_cast<Function*>(dlsym(RTLD_NEXT, name));
}
#define REAL(name) static const auto next = real(&name, #name)
#define CALLER __builtin_return_address(0)

}  // namespace

extern "C" {

void pi2_fault_arm(const char* kind, long from, long how_many, int number, const char* where) {
  armed = kNone;
  snprintf(folder, sizeof folder, "%s", where);
  n_ranges = 0;
  dl_iterate_phdr(look_at, nullptr);
  bool found = false;
  _Unwind_Backtrace(step, &found);  // what it asks for once, it asks for now
  first = from;
  count = how_many;
  error = number;
  seen = hit = 0;
  for (int k = 1; k < kKinds; ++k)
    if (strcmp(kind, kNames[k]) == 0) armed = k;
}

void pi2_fault_disarm(void) { armed = kNone; }
long pi2_fault_seen(void) { return seen; }
long pi2_fault_hit(void) { return hit; }

__attribute__((constructor)) static void from_environment(void) {
  const char* text = getenv("PI2_FAULT");
  char kind[16] = "", where[4096] = "", program[16] = "";
  long from = 0, how_many = 0;
  int number = 0;
  if (text == nullptr ||
      sscanf(text, "%15s %ld %ld %d %4095s %15s", kind, &from, &how_many, &number, where, program) < 5)
    return;
  program_too = program[0] != 0;
  pi2_fault_arm(kind, from, how_many, number, where);
}

// How many there were, for whoever started the program.
__attribute__((destructor)) static void to_environment(void) {
  const char* path = getenv("PI2_FAULT_SEEN");
  armed = kNone;
  FILE* out = path == nullptr ? nullptr : fopen(path, "w");
  if (out == nullptr) return;
  fprintf(out, "%ld %ld\n", seen.load(), hit.load());
  fclose(out);
}

// --- files ---

static mode_t mode_of(int flags, va_list more) {
  return (flags & (O_CREAT | O_TMPFILE)) != 0 ? va_arg(more, mode_t) : 0;
}

#define OPEN(name)                               \
  int name(const char* path, int flags, ...) {   \
    va_list more;                                \
    va_start(more, flags);                       \
    const mode_t mode = mode_of(flags, more);    \
    va_end(more);                                \
    if (fails(kOpen, AT_FDCWD, path)) return -1; \
    REAL(name);                                  \
    return next(path, flags, mode);              \
  }
OPEN(open)
OPEN(open64)

#define OPEN_AT(name)                                  \
  int name(int at, const char* path, int flags, ...) { \
    va_list more;                                      \
    va_start(more, flags);                             \
    const mode_t mode = mode_of(flags, more);          \
    va_end(more);                                      \
    if (fails(kOpen, at, path)) return -1;             \
    REAL(name);                                        \
    return next(at, path, flags, mode);                \
  }
OPEN_AT(openat)
OPEN_AT(openat64)

#define FOPEN(name)                                   \
  FILE* name(const char* path, const char* mode) {    \
    if (fails(kOpen, AT_FDCWD, path)) return nullptr; \
    REAL(name);                                       \
    return next(path, mode);                          \
  }
FOPEN(fopen)
FOPEN(fopen64)

#define ON_FILE(kind, result, name, arguments, passed) \
  result name arguments {                              \
    if (fails(kind, file)) return -1;                  \
    REAL(name);                                        \
    return next passed;                                \
  }
ON_FILE(kRead, ssize_t, read, (int file, void* to, size_t n), (file, to, n))
ON_FILE(kRead, ssize_t, pread, (int file, void* to, size_t n, off_t at), (file, to, n, at))
ON_FILE(kRead, ssize_t, pread64, (int file, void* to, size_t n, off64_t at), (file, to, n, at))
ON_FILE(kRead, ssize_t, readv, (int file, const iovec* parts, int n), (file, parts, n))
ON_FILE(kRead, ssize_t, preadv, (int file, const iovec* parts, int n, off_t at), (file, parts, n, at))
ON_FILE(kRead, ssize_t, preadv64, (int file, const iovec* parts, int n, off64_t at), (file, parts, n, at))
ON_FILE(kWrite, ssize_t, write, (int file, const void* from, size_t n), (file, from, n))
ON_FILE(kWrite, ssize_t, pwrite, (int file, const void* from, size_t n, off_t at), (file, from, n, at))
ON_FILE(kWrite, ssize_t, pwrite64, (int file, const void* from, size_t n, off64_t at), (file, from, n, at))
ON_FILE(kWrite, ssize_t, writev, (int file, const iovec* parts, int n), (file, parts, n))
ON_FILE(kWrite, ssize_t, pwritev, (int file, const iovec* parts, int n, off_t at), (file, parts, n, at))
ON_FILE(kWrite, ssize_t, pwritev64, (int file, const iovec* parts, int n, off64_t at), (file, parts, n, at))
ON_FILE(kWrite, ssize_t, sendfile, (int file, int from, off_t* at, size_t n), (file, from, at, n))
ON_FILE(kWrite, ssize_t, sendfile64, (int file, int from, off64_t* at, size_t n), (file, from, at, n))
ON_FILE(kSync, int, fsync, (int file), (file))
ON_FILE(kSync, int, fdatasync, (int file), (file))
ON_FILE(kSize, int, ftruncate, (int file, off_t n), (file, n))
ON_FILE(kSize, int, ftruncate64, (int file, off64_t n), (file, n))
ON_FILE(kSize, int, fallocate, (int file, int how, off_t at, off_t n), (file, how, at, n))
ON_FILE(kSize, int, fallocate64, (int file, int how, off64_t at, off64_t n), (file, how, at, n))

ssize_t copy_file_range(int from, off64_t* from_at, int file, off64_t* at, size_t n, unsigned flags) {
  if (fails(kWrite, file)) return -1;
  REAL(copy_file_range);
  return next(from, from_at, file, at, n, flags);
}

int posix_fallocate(int file, off_t at, off_t n) {
  if (fails(kSize, file)) return error;
  REAL(posix_fallocate);
  return next(file, at, n);
}

size_t fread(void* to, size_t size, size_t n, FILE* file) {
  if (fails(kRead, fileno(file))) return 0;
  REAL(fread);
  return next(to, size, n, file);
}

size_t fwrite(const void* from, size_t size, size_t n, FILE* file) {
  if (fails(kWrite, fileno(file))) return 0;
  REAL(fwrite);
  return next(from, size, n, file);
}

int rename(const char* from, const char* to) {
  if (fails(kName, AT_FDCWD, to)) return -1;
  REAL(rename);
  return next(from, to);
}

int renameat(int from_at, const char* from, int at, const char* to) {
  if (fails(kName, at, to)) return -1;
  REAL(renameat);
  return next(from_at, from, at, to);
}

int mkdir(const char* path, mode_t mode) {
  if (fails(kName, AT_FDCWD, path)) return -1;
  REAL(mkdir);
  return next(path, mode);
}

int mkdirat(int at, const char* path, mode_t mode) {
  if (fails(kName, at, path)) return -1;
  REAL(mkdirat);
  return next(at, path, mode);
}

// Of a watched file, or memory of ours.
#define MAP(name, offset)                                                   \
  void* name(void* at, size_t n, int may, int how, int file, offset from) { \
    if (file >= 0 && fails(kMap, file)) return MAP_FAILED;                  \
    if (file < 0 && no_memory(CALLER)) return MAP_FAILED;                   \
    REAL(name);                                                             \
    return next(at, n, may, how, file, from);                               \
  }
MAP(mmap, off_t)
MAP(mmap64, off64_t)

// --- memory and threads ---

void* malloc(size_t n) { return no_memory(CALLER) ? nullptr : __libc_malloc(n); }
void* calloc(size_t n, size_t size) { return no_memory(CALLER) ? nullptr : __libc_calloc(n, size); }
void* realloc(void* at, size_t n) { return no_memory(CALLER) ? nullptr : __libc_realloc(at, n); }
void* memalign(size_t to, size_t n) { return no_memory(CALLER) ? nullptr : __libc_memalign(to, n); }
void* aligned_alloc(size_t to, size_t n) { return no_memory(CALLER) ? nullptr : __libc_memalign(to, n); }
int posix_memalign(void** at, size_t to, size_t n) {
  if (no_memory(CALLER)) return ENOMEM;
  void* const made = __libc_memalign(to, n);
  if (made == nullptr) return ENOMEM;
  *at = made;
  return 0;
}

int pthread_create(pthread_t* thread, const pthread_attr_t* about, void* (*run)(void*), void* argument) {
  if (counts(kThread) && asked_by_us(CALLER) && fails(kThread)) return EAGAIN;
  REAL(pthread_create);
  return next(thread, about, run, argument);
}

}  // extern "C"

namespace {
void* made(void* caller, size_t n, size_t alignment) {
  void* const at = no_memory(caller) ? nullptr
                   : alignment > 0   ? __libc_memalign(alignment, n)
                                     : __libc_malloc(n > 0 ? n : 1);
  if (at == nullptr) throw std::bad_alloc();
  return at;
}
}  // namespace

void* operator new(size_t n) { return made(CALLER, n, 0); }
void* operator new[](size_t n) { return made(CALLER, n, 0); }
void* operator new(size_t n, std::align_val_t to) { return made(CALLER, n, static_cast<size_t>(to)); }
void* operator new[](size_t n, std::align_val_t to) { return made(CALLER, n, static_cast<size_t>(to)); }
void* operator new(size_t n, const std::nothrow_t&) noexcept { return no_memory(CALLER) ? nullptr : __libc_malloc(n); }
void* operator new[](size_t n, const std::nothrow_t&) noexcept {
  return no_memory(CALLER) ? nullptr : __libc_malloc(n);
}
