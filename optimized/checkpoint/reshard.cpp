// SPDX-License-Identifier: Apache-2.0
#include "optimized/checkpoint/reshard.h"

#include <algorithm>
#include <vector>

#include <fmt/format.h>

#include "core/error.h"
#include "optimized/checkpoint/catalogue.h"
#include "optimized/checkpoint/piece_reader.h"
#include "optimized/checkpoint/publish.h"
#include "optimized/checkpoint/shard_writer.h"
#include "optimized/checkpoint/snapshot.h"

namespace tandem {
namespace {

namespace fs = std::filesystem;

constexpr std::int64_t kBlockElements = std::int64_t{1} << 20;

// The tensors by name: of a large model there are too many to look through for each part.
std::map<std::string, const CheckpointTensor*, std::less<>> by_name(const CheckpointManifest& manifest) {
  std::map<std::string, const CheckpointTensor*, std::less<>> tensors;
  for (const CheckpointTensor& tensor : manifest.tensors) tensors.emplace(tensor.name, &tensor);
  return tensors;
}

class Resharder {
 public:
  Resharder(const fs::path& from, const CheckpointManifest& saved, FileOperations& files)
      : saved_(saved), tensors_(by_name(saved)), reader_(from, saved), files_(files) {}

  /// What a rank stores, as the file `path`.
  CheckpointFile write(const fs::path& path, const std::vector<CheckpointPart>& parts) {
    std::vector<TensorHeading> headings;
    headings.reserve(parts.size());
    for (const CheckpointPart& part : parts) headings.push_back({part.name, part.shard.dtype, stored_shape(part.shard)});
    ShardWriter writer(files_, path, headings);
    for (const CheckpointPart& part : parts) write_part(part, writer);
    return writer.finish();
  }

 private:
  void write_part(const CheckpointPart& part, ShardWriter& writer) {
    const auto found = tensors_.find(part.name);
    const CheckpointTensor& tensor = found != tensors_.end() ? *found->second : saved_.tensor(part.name);
    const auto element_bytes = static_cast<std::int64_t>(size_bytes(part.shard.dtype));
    const Interval kept = part.shard.flat_range.value_or(Interval{0, part.shard.num_elements()});
    for (std::int64_t begin = kept.begin; begin < kept.end; begin += kBlockElements) {
      ShardSpec shard = part.shard;
      shard.flat_range = {begin, std::min(begin + kBlockElements, kept.end)};
      const std::int64_t count = shard.flat_range->size();
      block_.resize(static_cast<std::size_t>(std::max(std::ssize(block_), count * element_bytes)));
      reader_.read(tensor, shard, TensorView(block_.data(), shard.dtype, {count}));
      writer.write(std::span(block_).first(static_cast<std::size_t>(count * element_bytes)));
    }
  }

  const CheckpointManifest& saved_;
  std::map<std::string, const CheckpointTensor*, std::less<>> tensors_;
  PieceReader reader_;
  FileOperations& files_;
  std::vector<std::byte> block_;
};

}  // namespace

fs::path reshard_checkpoint(const fs::path& from_step_folder, const fs::path& to_folder, const TrainingPlan& new_plan,
                            const ReshardOptions& options) {
  if (const auto damage = find_damage(from_step_folder, VerifyDepth::contents)) throw InputError(*damage);
  FileOperations& files = options.files != nullptr ? *options.files : system_files();
  const CheckpointManifest saved = read_manifest_of(from_step_folder);
  CheckpointInfo info = saved.info;
  require_legal(new_plan, info.config.model);
  info.config.plan = new_plan;
  const bool has_residuals =
      std::ranges::any_of(saved.files, [](const CheckpointFile& file) { return file.name.starts_with("residuals-"); });
  std::error_code ignored;
  if (has_residuals && fs::equivalent(from_step_folder.parent_path(), to_folder, ignored)) {
    throw InputError(
        fmt::format("{}: what compression had not sent yet would be lost for good in its own folder; give another one",
                    from_step_folder.string()));
  }
  if (has_residuals && options.note) {
    options.note("what compression had not sent yet is left behind: it belongs to the ranks of the old layout");
  }

  const fs::path unfinished = unfinished_folder(to_folder, info.next_step);
  files.remove(unfinished);
  static_cast<void>(make_unfinished_folder(files, to_folder, info.next_step));
  try {
    Resharder resharder(from_step_folder, saved, files);
    std::vector<std::vector<CheckpointFile>> written(static_cast<std::size_t>(new_plan.parallel.world_size()));
    for (int rank = 0; rank < new_plan.parallel.world_size(); ++rank) {
      const auto parts = checkpoint_parts(info.config.model, new_plan, info.config.optimizer.kind, rank);
      if (!parts.empty()) written[static_cast<std::size_t>(rank)] = {resharder.write(unfinished / shard_name(rank), parts)};
    }
    return publish_checkpoint(files, make_manifest(info, written), {.folder = to_folder});
  } catch (const IoError&) {
    files.remove(unfinished);
    throw;
  }
}

}  // namespace tandem
