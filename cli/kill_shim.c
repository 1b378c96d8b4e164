// SPDX-License-Identifier: Apache-2.0
// Preloaded into a program (LD_PRELOAD), it counts the calls that change something below a folder, and does harm at one of them.
//
//   KILL_SHIM_FOLDER   absolute path without links
//   KILL_SHIM_AT       number of the call, from 1
//   KILL_SHIM_MODE     kill    the process ends by SIGKILL instead of the call; a write is half done by then
//                      full    the disk is full from this call on: nothing can be written or made
//                      quota   likewise, and the reason is the user's quota
//                      sync    the fsync of this number (others do not count) fails with EIO
//                      write   the write of this number (likewise) fails with EIO
//                      rename  the rename of this number (likewise) fails with EIO
//                      slow    every write and fsync takes KILL_SHIM_MS milliseconds longer
//                      short   every write does half of what it was asked for, and says so
//                      flip    a fault of a writer, for a test of the test: the write of this number changes a bit
//                      eager   likewise: complete steps go away when the next is begun; then as kill
//
// Says on standard error which call it was, and when a folder step-N has got its name.
//
// Counted: open of a new file or for writing, write, fsync, rename, mkdir, unlink, rmdir, ftruncate, by all their names.
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

static long num_calls;

static int mode_is(const char* mode) {
  const char* wanted = getenv("KILL_SHIM_MODE");
  return wanted != NULL && strcmp(wanted, mode) == 0;
}

// Sets a pointer to a function: the one that would have been called. ISO C has no conversion of what dlsym returns.
static void next(const char* name, void* function) {
  void* const found = dlsym(RTLD_NEXT, name);
  if (found == NULL) abort();
  memcpy(function, &found, sizeof found);
}

static int is_below(const char* path) {
  const char* folder = getenv("KILL_SHIM_FOLDER");
  return folder != NULL && strncmp(path, folder, strlen(folder)) == 0;
}

// The path that `name` means beside the open folder `at`; the file `at` itself where there is no name.
static const char* resolve(int at, const char* name, char* out) {
  if (name != NULL && (name[0] == '/' || at == AT_FDCWD)) return name;
  char link[64];
  snprintf(link, sizeof link, "/proc/self/fd/%d", at);
  const ssize_t length = readlink(link, out, PATH_MAX - 1);
  out[length < 0 ? 0 : length] = 0;
  if (name != NULL) {
    const size_t used = strlen(out);
    snprintf(out + used, PATH_MAX - used, "/%s", name);
  }
  return out;
}

static int fills(void) { return mode_is("full") || mode_is("quota"); }

static void delay(const char* call) {
  const char* const text = getenv("KILL_SHIM_MS");
  const long milliseconds = text != NULL ? atol(text) : 0;
  const struct timespec pause = {milliseconds / 1000, milliseconds % 1000 * 1000000};
  if (strcmp(call, "write") == 0 || strcmp(call, "fsync") == 0) nanosleep(&pause, NULL);
}

// Whether harm is due at this call, whose number it takes.
static int due(const char* call, const char* path) {
  if (!is_below(path)) return 0;
  if (mode_is("slow")) {
    delay(call);
    return 0;
  }
  if (mode_is("sync") && strcmp(call, "fsync") != 0) return 0;
  if (mode_is("rename") && strncmp(call, "rename", 6) != 0) return 0;
  if ((mode_is("flip") || mode_is("write")) && strcmp(call, "write") != 0) return 0;
  const long number = __atomic_add_fetch(&num_calls, 1, __ATOMIC_SEQ_CST);
  const char* at = getenv("KILL_SHIM_AT");
  const long wanted = at != NULL ? atol(at) : 0;
  if (number == wanted) dprintf(2, "kill_shim: call %ld, %s %s\n", number, call, path);
  return fills() ? number >= wanted : number == wanted;
}

static int kills(void) { return mode_is("kill") || mode_is("eager"); }

static void die(void) {
  kill(getpid(), SIGKILL);
  for (;;) pause();
}

// What is not a write: 0 where it shall happen, else -1 with errno.
static int refused(const char* call, const char* path, int makes) {
  if (!due(call, path)) return 0;
  if (kills()) die();
  if (fills() && makes) {
    errno = mode_is("quota") ? EDQUOT : ENOSPC;
    return -1;
  }
  if (mode_is("sync") || mode_is("rename")) {
    errno = EIO;
    return -1;
  }
  return 0;
}

// Bytes of a write that shall happen; -1 with errno for none. `flips`: whether its first bit is to be changed.
static ssize_t allowed(int descriptor, size_t bytes, int* flips) {
  char buffer[PATH_MAX];
  *flips = 0;
  if (descriptor <= 2) return (ssize_t)bytes;
  const char* path = resolve(descriptor, NULL, buffer);
  const int harm = due("write", path);
  if (mode_is("short") && is_below(path)) return (ssize_t)(bytes + 1) / 2;
  if (!harm || mode_is("sync") || mode_is("rename")) return (ssize_t)bytes;
  if (fills() || mode_is("write")) {
    errno = mode_is("full") ? ENOSPC : mode_is("quota") ? EDQUOT : EIO;
    return -1;
  }
  *flips = mode_is("flip");
  return *flips ? (ssize_t)bytes : (ssize_t)bytes / 2;
}

static void* flipped(const void* data, size_t bytes) {
  unsigned char* const copy = malloc(bytes + 1);
  if (copy == NULL) abort();
  memcpy(copy, data, bytes);
  copy[bytes / 2] ^= 1;
  return copy;
}

static ssize_t finish_write(ssize_t written, ssize_t allowed_bytes, size_t asked) {
  if (kills() && allowed_bytes != (ssize_t)asked) die();
  return written;
}

static int open_at(int at, const char* file, int flags, mode_t mode) {
  char buffer[PATH_MAX];
  const int changes = (flags & (O_CREAT | O_TRUNC)) != 0 || (flags & O_ACCMODE) != O_RDONLY;
  if (changes && refused("open", resolve(at, file, buffer), (flags & (O_CREAT | O_TMPFILE)) != 0) != 0) return -1;
  int (*real)(int, const char*, int, ...);
  next("openat", &real);
  return real(at, file, flags, mode);
}

#define OPEN_MODE(flags)                                                                                                         \
  mode_t mode = 0;                                                                                                               \
  if ((flags) & (O_CREAT | O_TMPFILE)) {                                                                                         \
    va_list arguments;                                                                                                           \
    va_start(arguments, flags);                                                                                                  \
    mode = va_arg(arguments, mode_t);                                                                                            \
    va_end(arguments);                                                                                                           \
  }

int open(const char* file, int flags, ...) {
  OPEN_MODE(flags)
  return open_at(AT_FDCWD, file, flags, mode);
}
int open64(const char* file, int flags, ...) {
  OPEN_MODE(flags)
  return open_at(AT_FDCWD, file, flags, mode);
}
int openat(int at, const char* file, int flags, ...) {
  OPEN_MODE(flags)
  return open_at(at, file, flags, mode);
}
int openat64(int at, const char* file, int flags, ...) {
  OPEN_MODE(flags)
  return open_at(at, file, flags, mode);
}

ssize_t write(int descriptor, const void* data, size_t bytes) {
  ssize_t (*real)(int, const void*, size_t);
  next("write", &real);
  int flips;
  const ssize_t some = allowed(descriptor, bytes, &flips);
  if (some < 0) return -1;
  void* const changed = flips ? flipped(data, bytes) : NULL;
  const ssize_t written = real(descriptor, changed != NULL ? changed : data, (size_t)some);
  free(changed);
  return finish_write(written, some, bytes);
}
ssize_t writev(int descriptor, const struct iovec* parts, int count) {
  ssize_t (*real)(int, const struct iovec*, int);
  next("writev", &real);
  char buffer[PATH_MAX];
  if (descriptor > 2 && is_below(resolve(descriptor, NULL, buffer))) {
    // Part by part: a caller has to take less than it asked for.
    return count > 0 ? write(descriptor, parts[0].iov_base, parts[0].iov_len) : 0;
  }
  return real(descriptor, parts, count);
}
ssize_t pwrite(int descriptor, const void* data, size_t bytes, off_t offset) {
  ssize_t (*real)(int, const void*, size_t, off_t);
  next("pwrite", &real);
  int flips;
  const ssize_t some = allowed(descriptor, bytes, &flips);
  if (some < 0) return -1;
  return finish_write(real(descriptor, data, (size_t)some, offset), some, bytes);
}
ssize_t pwrite64(int descriptor, const void* data, size_t bytes, off_t offset) { return pwrite(descriptor, data, bytes, offset); }

static int sync_by(const char* name, int descriptor) {
  char path[PATH_MAX];
  if (refused("fsync", resolve(descriptor, NULL, path), 0) != 0) return -1;
  int (*real)(int);
  next(name, &real);
  return real(descriptor);
}
int fsync(int descriptor) { return sync_by("fsync", descriptor); }
int fdatasync(int descriptor) { return sync_by("fdatasync", descriptor); }
int ftruncate(int descriptor, off_t bytes) {
  char path[PATH_MAX];
  if (refused("ftruncate", resolve(descriptor, NULL, path), 1) != 0) return -1;
  int (*real)(int, off_t);
  next("ftruncate", &real);
  return real(descriptor, bytes);
}

static int named(int result, const char* to) {
  const char* const slash = strrchr(to, '/');
  if (result == 0 && is_below(to) && slash != NULL && strncmp(slash, "/step-", 6) == 0 && strchr(slash, '.') == NULL) {
    dprintf(2, "kill_shim: named %s\n", slash + 1);
  }
  return result;
}
int rename(const char* from, const char* to) {
  if (refused("rename", from, 0) != 0) return -1;
  int (*real)(const char*, const char*);
  next("rename", &real);
  return named(real(from, to), to);
}
int renameat2(int at, const char* from, int to_at, const char* to, unsigned flags) {
  char buffer[PATH_MAX];
  if (refused("renameat2", resolve(at, from, buffer), 0) != 0) return -1;
  int (*real)(int, const char*, int, const char*, unsigned);
  next("renameat2", &real);
  return named(real(at, from, to_at, to, flags), to);
}
static int by_path(const char* call, const char* path) {
  if (refused(call, path, 0) != 0) return -1;
  int (*real)(const char*);
  next(call, &real);
  return real(path);
}
int unlink(const char* path) { return by_path("unlink", path); }
int rmdir(const char* path) { return by_path("rmdir", path); }
int remove(const char* path) { return by_path("remove", path); }
int unlinkat(int at, const char* name, int flags) {
  char buffer[PATH_MAX];
  if (refused("unlinkat", resolve(at, name, buffer), 0) != 0) return -1;
  int (*real)(int, const char*, int);
  next("unlinkat", &real);
  return real(at, name, flags);
}

// Complete steps beside the one that is begun lose their names.
static void lose_complete_steps(const char* begun) {
  char folder[PATH_MAX];
  snprintf(folder, sizeof folder, "%s", begun);
  char* const slash = strrchr(folder, '/');
  if (slash == NULL) return;
  *slash = 0;
  DIR* const entries = opendir(folder);
  if (entries == NULL) return;
  int (*real)(const char*, const char*);
  next("rename", &real);
  for (struct dirent* entry; (entry = readdir(entries)) != NULL;) {
    if (strncmp(entry->d_name, "step-", 5) != 0 || strchr(entry->d_name, '.') != NULL) continue;
    char from[2 * PATH_MAX], to[2 * PATH_MAX];
    snprintf(from, sizeof from, "%s/%s", folder, entry->d_name);
    snprintf(to, sizeof to, "%s/lost-%s", folder, entry->d_name);
    real(from, to);
  }
  closedir(entries);
}

int mkdir(const char* path, mode_t mode) {
  if (mode_is("eager") && is_below(path) && strstr(path, ".unfinished") != NULL) lose_complete_steps(path);
  if (refused("mkdir", path, 1) != 0) return -1;
  int (*real)(const char*, mode_t);
  next("mkdir", &real);
  return real(path, mode);
}
