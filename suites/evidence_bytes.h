// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "core/io/binary.h"
#include "core/timeline.h"
#include "harness/evidence.h"
#include "optimized/engine/engine.h"

// What processes tell each other of evidence (core/io/binary.h).
namespace tandem {

template <class Archive>
void serialize(Archive& archive, StepResult& result) {
  archive(result.loss, result.gradient_norm, result.clip_coefficient, result.learning_rate, result.valid_tokens,
          result.loss_scale, result.skipped, result.auxiliary_loss, result.kept_assignments, result.dropped_assignments);
}

template <class Archive>
void serialize(Archive& archive, LossScalerState& state) {
  archive(state.scale, state.growth_tracker, state.skipped_steps);
}

template <class Archive>
void serialize(Archive& archive, Fp8ScalingState& state) {
  archive(state.histories, state.position);
}

template <class Archive>
void serialize(Archive& archive, EvidenceTensor& tensor) {
  archive(tensor.name, tensor.values, tensor.reduction_length, tensor.true_value_is_zero);
}

template <class Archive>
void serialize(Archive& archive, StageEvidence& stage) {
  archive(stage.stage, stage.step, stage.tensors);
}

template <class Archive>
void serialize(Archive& archive, ReplicaHash& replica) {
  archive(replica.tensor, replica.part, replica.stage, replica.rank, replica.hash);
}

}  // namespace tandem
