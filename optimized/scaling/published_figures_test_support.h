// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <map>
#include <string>
#include <utility>
#include <vector>

namespace tandem {

/// A published measurement of something else than a training step (results/published/figures.json), as its source prints it.
struct PublishedFigure {
  std::string id, source;
  std::string device;                     ///< name as in cluster files, or what the source says
  std::map<std::string, double> numbers;  ///< by the name in the file, which has the unit
  std::map<std::string, std::string> words;
  std::vector<std::pair<double, double>> points;  ///< of a collective: bytes, and GB/s as nccl-tests count them (busbw)
  bool suspect = false, from_memory = false;

  [[nodiscard]] double number_or(const std::string& name, double otherwise) const {
    const auto found = numbers.find(name);
    return found == numbers.end() ? otherwise : found->second;
  }
};
/// `kind`: collectives, matmuls, checkpoints, reliability. Throws InputError for any other.
[[nodiscard]] std::vector<PublishedFigure> published_figures(const std::string& kind);

}  // namespace tandem
