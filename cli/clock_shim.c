// SPDX-License-Identifier: Apache-2.0
// Preloaded into a program (LD_PRELOAD), it sets the clock of the day: other than a step of a real clock, without asking for
// rights.
//
//   CLOCK_SHIM_JUMPS   "2:3600,4:-315360000": so many seconds after the process began the clock is so many seconds off
//   CLOCK_SHIM_STEADY  set: a fault for a test of the test: the steady clock jumps too, which no machine's does
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>
#include <sys/time.h>
#include <time.h>

static int (*real_clock)(clockid_t, struct timespec*);
static struct timespec began;

__attribute__((constructor)) static void begin(void) {
  void* const found = dlsym(RTLD_NEXT, "clock_gettime");
  if (found == NULL) abort();
  memcpy(&real_clock, &found, sizeof found);
  real_clock(CLOCK_MONOTONIC, &began);
}

static long offset(void) {
  struct timespec now;
  real_clock(CLOCK_MONOTONIC, &now);
  const double age = (double)(now.tv_sec - began.tv_sec) + 1e-9 * (double)(now.tv_nsec - began.tv_nsec);
  long seconds = 0;
  const char* jump = getenv("CLOCK_SHIM_JUMPS");
  while (jump != NULL && *jump != 0) {
    char* rest;
    const double at = strtod(jump, &rest);
    if (*rest != ':') abort();
    const long wanted = strtol(rest + 1, &rest, 10);
    if (age >= at) seconds = wanted;
    jump = *rest == ',' ? rest + 1 : NULL;
  }
  return seconds;
}

int clock_gettime(clockid_t clock, struct timespec* time) {
  if (real_clock == NULL) begin();
  const int result = real_clock(clock, time);
  const int is_day = clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE;
  const int is_steady = clock == CLOCK_MONOTONIC && getenv("CLOCK_SHIM_STEADY") != NULL;
  if (result == 0 && (is_day || is_steady)) time->tv_sec += offset();
  return result;
}
int gettimeofday(struct timeval* restrict time, void* restrict zone) {
  (void)zone;
  struct timespec now;
  const int result = clock_gettime(CLOCK_REALTIME, &now);
  time->tv_sec = now.tv_sec;
  time->tv_usec = now.tv_nsec / 1000;
  return result;
}
time_t time(time_t* where) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (where != NULL) *where = now.tv_sec;
  return now.tv_sec;
}
