// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <initializer_list>
#include <map>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "harness/evidence.h"
#include "optimized/engine/engine.h"
#include "suites/pair.h"

namespace tandem {

/// Where the ranks of a run put what they hold: tensors together from the first replica of each part, hashes of every replica.
/// Threads share one object; processes have one each, and merge them in order of ranks.
class EvidenceCollector {
 public:
  struct Stage {
    int step = 0;
    std::map<std::string, std::vector<double>> tensors;  ///< whole, by name; NaN where no rank has put anything yet
    std::vector<ReplicaHash> hashes;
  };
  using Stages = std::map<std::string, Stage>;

  /// Borrows both.
  EvidenceCollector(const PairInputs& inputs, Evidence& evidence) : inputs_(inputs), evidence_(evidence) {}

  /// Gradients are taken as those of the loss, not of the scaled loss. Any rank, any thread.
  void collect(const std::string& stage, int step, const Engine& engine, PartView view);

  [[nodiscard]] const Stages& stages() const noexcept { return stages_; }
  void merge(const Stages& others);
  void clear() { stages_.clear(); }

  /// Appends the stages of these names to the evidence, tensors and hashes in the order of the model.
  void finish(std::initializer_list<std::string_view> order);

 private:
  [[nodiscard]] std::size_t place(const std::string& name);

  const PairInputs& inputs_;
  Evidence& evidence_;
  std::mutex mutex_;
  Stages stages_;
  std::map<std::string, std::size_t> places_;
};

template <class Archive>
void serialize(Archive& archive, EvidenceCollector::Stage& stage) {
  archive(stage.step, stage.tensors, stage.hashes);
}

}  // namespace tandem
