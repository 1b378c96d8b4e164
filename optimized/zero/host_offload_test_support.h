// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "optimized/zero/host_offload.h"

namespace tandem::offload_test {

using Values = std::vector<float>;

inline std::int64_t current_of(const Arena& arena, MemoryCategory category) {
  return arena.ledger().current()[static_cast<std::size_t>(category)];
}
inline std::int64_t peak_of(const Arena& arena, MemoryCategory category) {
  return arena.ledger().peak()[static_cast<std::size_t>(category)];
}

// Value that differs by tensor and by index, and is exact.
inline float initial(int tensor, std::int64_t element) {
  return static_cast<float>(tensor * 100'000 + element % 65'521) / 1024.0F;
}
inline float gradient(std::int64_t element, int step) {
  return static_cast<float>((element * 31 + step * 17) % 1009 - 500) / 512.0F;
}

inline void fill(const HostOffload& offload, int tensors, std::int64_t elements) {
  for (int tensor = 0; tensor < tensors; ++tensor) {
    const auto values = offload.host(tensor).as<float>();
    for (std::int64_t i = 0; i < elements; ++i) values[static_cast<std::size_t>(i)] = initial(tensor, i);
  }
}

// An update whose every result depends on all tensors, on the place of the element and on its segment.
inline void update_element(float* master, float* m, float* v, std::int64_t element, std::size_t segment, int step) {
  const float g = gradient(element, step);
  *m = 0.9F * *m + 0.1F * g;
  *v = 0.95F * *v + 0.05F * g * g;
  const float decay = segment % 2 == 0 ? 0.999F : 1.0F;
  *master = *master * decay - 0.01F * *m / (std::sqrt(*v) + 1e-3F);
}

inline void update_part(const OffloadedPart& part, int step) {
  const auto master = part.tensors[0].as<float>();
  const auto m = part.tensors[1].as<float>();
  const auto v = part.tensors[2].as<float>();
  for (std::size_t i = 0; i < master.size(); ++i) {
    update_element(&master[i], &m[i], &v[i], part.elements.begin + static_cast<std::int64_t>(i), part.segment, step);
  }
}

// The same without any offload.
inline std::vector<Values> in_place(std::int64_t elements, const std::vector<Interval>& segments, int steps) {
  std::vector<Values> state(3, Values(static_cast<std::size_t>(elements)));
  for (int tensor = 0; tensor < 3; ++tensor) {
    for (std::int64_t i = 0; i < elements; ++i) {
      state[static_cast<std::size_t>(tensor)][static_cast<std::size_t>(i)] = initial(tensor, i);
    }
  }
  for (int step = 0; step < steps; ++step) {
    for (std::size_t segment = 0; segment < segments.size(); ++segment) {
      for (std::int64_t i = segments[segment].begin; i < segments[segment].end; ++i) {
        const auto at = static_cast<std::size_t>(i);
        update_element(&state[0][at], &state[1][at], &state[2][at], i, segment, step);
      }
    }
  }
  return state;
}

inline HostOffloadOptions options_of(std::int64_t elements, std::int64_t chunk_elements, int tensors = 3) {
  HostOffloadOptions options;
  options.tensors = tensors;
  options.elements = elements;
  options.chunk_elements = chunk_elements;
  return options;
}

// `memory`: of the device.
inline std::vector<Values> offloaded(const HostOffloadOptions& options, const std::vector<Interval>& segments, int steps,
                                     Memory& memory = host_memory()) {
  Arena device({.poison = true, .memory = &memory});
  Arena host({.poison = true});
  HostOffload offload(device, host, options);
  fill(offload, options.tensors, options.elements);
  for (int step = 0; step < steps; ++step) {
    offload.for_each_chunk(
        segments, [step](const OffloadedPart& part) { update_part(part, step); }, nullptr);
  }
  std::vector<Values> state;
  for (int tensor = 0; tensor < options.tensors; ++tensor) {
    const auto values = offload.host(tensor).as<float>();
    state.emplace_back(values.begin(), values.end());
  }
  return state;
}

inline bool same_bits(const std::vector<Values>& a, const std::vector<Values>& b) {
  if (a.size() != b.size()) return false;
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (a[i].size() != b[i].size() ||
        (!a[i].empty() && std::memcmp(a[i].data(), b[i].data(), a[i].size() * sizeof(float)) != 0)) {
      return false;
    }
  }
  return true;
}

}  // namespace tandem::offload_test
