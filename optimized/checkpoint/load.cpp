// SPDX-License-Identifier: Apache-2.0
#include "optimized/checkpoint/load.h"

#include <algorithm>
#include <map>
#include <set>
#include <string_view>

#include <fmt/format.h>

#include "core/error.h"
#include "optimized/checkpoint/piece_reader.h"
#include "optimized/checkpoint/residuals.h"
#include "optimized/engine/optimizer.h"

namespace tandem {
namespace {

namespace fs = std::filesystem;

MissingHash missing_hash_of(const PitfallSet& pitfalls) {
  return pitfalls.on(Pitfall::missing_hash_accepted) ? MissingHash::accept : MissingHash::refuse;
}

// Planted: parts of the fused query-key-value tensors one behind the other in the order of ranks, as if each rank had one run of
// columns. Parts of the same number of ranks come back as they were; all others have their columns permuted.
ShardSpec in_rank_order(ShardSpec shard, const PitfallSet& pitfalls) {
  const bool fused = shard.global_name.find("attn.c_attn.") != std::string::npos;
  if (!fused || !pitfalls.on(Pitfall::fused_shards_in_rank_order) || shard.slices.back().size() != 3) return shard;
  std::vector<Interval>& columns = shard.slices.back();
  columns = {{3 * columns.front().begin, 3 * columns.front().end}};
  return shard;
}

// The tensors of a checkpoint by name, as the engine's model needs them.
class Tensors {
 public:
  Tensors(const fs::path& step_folder, const CheckpointManifest& manifest, const Engine& engine)
      : file_((step_folder / kManifestName).string()),
        pitfalls_(engine.context().pitfalls),
        memory_(engine.store().memory()),
        reader_(step_folder, manifest) {
    for (const CheckpointTensor& tensor : manifest.tensors) {
      CheckpointTensor& known = tensors_[tensor.name] = tensor;
      for (CheckpointPiece& piece : known.pieces) piece.shard = in_rank_order(std::move(piece.shard), pitfalls_);
    }
    if (!pitfalls_.on(Pitfall::missing_tensor_keeps_initial)) check_names(engine.options());
  }

  /// Nothing is done for a target that is not there.
  void read(const std::string& name, const ShardSpec& shard, TensorView target) {
    const auto found = tensors_.find(name);
    if (found == tensors_.end() || !target) return;
    if (found->second.shape != shard.global_shape) {
      throw InputError(fmt::format("{}: {} is {}, the model needs {}", file_, name, to_string(found->second.shape),
                                   to_string(shard.global_shape)));
    }
    HostView host(memory_, target, Access::write);
    reader_.read(found->second, in_rank_order(shard, pitfalls_), host.view());
    host.finish();
  }

 private:
  // A model that starts with a part of it as it was initialised trains, and nobody sees why it is worse.
  void check_names(const EngineOptions& options) const {
    std::set<std::string, std::less<>> known;
    const bool moments = options.optimizer.kind == OptimizerKind::adamw;
    for (const ParameterSpec& parameter : gpt_parameters(options.model)) {
      for (const char* prefix : {"", "m.", "v."}) {
        const std::string name = prefix + parameter.name;
        if (!tensors_.contains(name) && (moments || *prefix == '\0')) {
          throw InputError(fmt::format("{}: has no tensor '{}', which the model and its optimizer need", file_, name));
        }
        known.insert(name);
      }
    }
    for (const auto& [name, unused] : tensors_) {
      if (!known.contains(name)) throw InputError(fmt::format("{}: tensor '{}' is none of the model's", file_, name));
    }
  }

  std::string file_;
  const PitfallSet& pitfalls_;
  Memory& memory_;
  std::map<std::string, CheckpointTensor, std::less<>> tensors_;
  PieceReader reader_;
};

void load_parameters(Tensors& tensors, Engine& engine) {
  ParameterStore& store = engine.store();
  const PitfallSet& pitfalls = engine.context().pitfalls;
  for (std::size_t i = 0; i < store.size(); ++i) {
    if (store.keeps_whole(i)) tensors.read(store.spec(i).name, store.shard(i), store.parameter(i));
  }
  const bool forgets_moments = pitfalls.on(Pitfall::resume_forgets_moments);
  for (const OwnedPart& part : store.parts()) {
    const std::string& name = store.spec(part.parameter).name;
    if (!store.keeps_whole(part.parameter)) tensors.read(name, part.shard, store.stored(part));
    // The optimizer goes on from the master copy: one that was left as it was brings the old weights back at the first update.
    const bool refreshes = store.has_master_copy() && !pitfalls.on(Pitfall::master_not_refreshed_on_load);
    if (refreshes) tensors.read(name, part.shard, store.master(part));
    // Parameters alone continue the loss curve for a while; moments that start again from zero bend it.
    if (forgets_moments) continue;
    tensors.read("m." + name, part.shard, store.first_moment(part));
    tensors.read("v." + name, part.shard, store.second_moment(part));
  }
  if (forgets_moments) store.zero_moments();
}

void load_scales(const CheckpointInfo& info, Engine& engine) {
  const PitfallSet& pitfalls = engine.context().pitfalls;
  LossScalerState scaler = info.loss_scaler;
  // A run without a dynamic scale has none to hand on: this one begins with its plan's.
  if (!scales_loss_dynamically(info.config.plan)) scaler.scale = engine.loss_scaler().scale();
  // A counter that starts again lets the scale grow at other steps than the uninterrupted run.
  if (pitfalls.on(Pitfall::scaler_count_not_saved)) scaler.growth_tracker = 0;
  engine.loss_scaler().set_state(scaler);
  // Of a run in another precision there is no history: scales begin at 1.
  const bool forgets_scales = pitfalls.on(Pitfall::fp8_history_not_saved);
  if (engine.fp8_scaling() != nullptr && !info.fp8.histories.empty() && !forgets_scales) {
    engine.fp8_scaling()->set_state(info.fp8);
  }
}

// The saved configuration must give the saved rate; which schedule goes on from here is the caller's choice.
void check_learning_rate(const fs::path& step_folder, const CheckpointInfo& info) {
  const RunConfig& config = info.config;
  const std::int64_t position = info.next_step - info.loss_scaler.skipped_steps;
  const double rate = scheduled_learning_rate(config.optimizer, config.schedule, position, config.steps);
  if (rate == info.learning_rate) return;
  throw InputError(fmt::format("{}: field 'learning_rate' is {}, the saved schedule gives {} at step {}",
                               (step_folder / kManifestName).string(), info.learning_rate, rate, info.next_step));
}

}  // namespace

CheckpointInfo read_checkpoint_info(const fs::path& step_folder, const PitfallSet& pitfalls) {
  return read_manifest_of(step_folder, missing_hash_of(pitfalls)).info;
}

void load_checkpoint(const fs::path& step_folder, const CheckpointInfo& info, Engine& engine) {
  const CheckpointManifest manifest = read_manifest_of(step_folder, missing_hash_of(engine.context().pitfalls));
  check_learning_rate(step_folder, info);
  Tensors tensors(step_folder, manifest, engine);
  load_parameters(tensors, engine);
  engine.set_updates(info.updates);
  load_scales(info, engine);
  // Of a checkpoint that was put into another layout, or imported, there are none.
  const bool has_residuals =
      std::ranges::any_of(manifest.files, [](const CheckpointFile& file) { return file.name.starts_with("residuals-"); });
  if (has_residuals) load_residuals(step_folder, info, engine);
}

}  // namespace tandem
