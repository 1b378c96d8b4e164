// SPDX-License-Identifier: Apache-2.0
#include "mutation.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include <unistd.h>

namespace tandem_mutation {

int active = 0;
unsigned char reached[kMostMutants] = {};

namespace {

constexpr int kKilled = 9;

// Before every other initialiser: what those compute may be mutated.
[[gnu::constructor(101)]] void read_environment() {
  if (const char* number = std::getenv("TANDEM_MUTANT")) active = std::atoi(number);
}

std::FILE* log_file() {
  const char* path = std::getenv("TANDEM_MUTANT_LOG");
  return path == nullptr ? nullptr : std::fopen(path, "a");
}

}  // namespace

void begin_case(const char* name) {
  std::memset(reached, 0, sizeof reached);
  if (std::FILE* log = log_file()) {
    std::fprintf(log, "{\"begin\": \"%s\"}\n", name);
    std::fclose(log);
  }
}

void end_case(const char* name, const char* status, const char* check, double seconds) {
  if (std::FILE* log = log_file()) {
    std::fprintf(log, "{\"end\": \"%s\", \"status\": \"%s\", \"check\": \"%s\", \"seconds\": %.3f, \"reached\": [", name, status,
                 check, seconds);
    bool first = true;
    for (int i = 0; i < kMostMutants; ++i) {
      if (reached[i] == 0) continue;
      std::fprintf(log, first ? "%d" : ", %d", i);
      first = false;
    }
    std::fprintf(log, "]}\n");
    std::fclose(log);
  }
  const bool good = std::strcmp(status, "pass") == 0 || std::strcmp(status, "skip") == 0;
  if (active != 0 && !good) _exit(kKilled);
}

}  // namespace tandem_mutation
