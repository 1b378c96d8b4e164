// SPDX-License-Identifier: Apache-2.0
#include "core/io/trace_file_reader.h"

#include <algorithm>

#include <fmt/format.h>

#include "core/error.h"
#include "core/io/atomic_file.h"
#include "core/io/trace_file_index.h"
#include "core/io/trace_file_writer.h"

namespace tandem {
namespace {

std::filesystem::path inside(const std::filesystem::path& folder, const std::string& file, const std::string& index) {
  const std::filesystem::path relative = file;
  const bool leaves = relative.is_absolute() || std::find(relative.begin(), relative.end(), "..") != relative.end();
  if (leaves) throw InputError(fmt::format("{}: file \"{}\" does not lie in the folder of the trace", index, file));
  return folder / relative;
}

void require_same(const TraceHeader& a, const TraceHeader& b, const std::string& where) {
  const auto refuse = [&](std::string_view what) {
    throw InputError(fmt::format("{}: {} differs from that of the other folders; ranks of one step share it", where, what));
  };
  if (!(a.model == b.model)) refuse("the model");
  if (a.precision != b.precision || a.accumulate != b.accumulate || a.gradient_accumulate != b.gradient_accumulate ||
      a.loss_scale != b.loss_scale)
    refuse("the precision or loss scale");
  if (a.step != b.step) refuse("the step");
  if (a.dropout != b.dropout || a.dropout_seed != b.dropout_seed || a.dropout_step != b.dropout_step) refuse("dropout");
}

bool same_row(const Batch& a, const Batch& b) {
  return a.ids == b.ids && a.targets == b.targets && a.positions == b.positions && a.document_starts == b.document_starts;
}

Batch joined(const std::map<std::int64_t, Batch>& rows, const std::string& where) {
  Batch batch;
  batch.sequence = rows.begin()->second.sequence;
  for (const auto& [row_id, row] : rows) {
    if (row_id != batch.rows) {
      throw InputError(
          fmt::format("{}: the batch has row {} but no row {}; give the folders of all ranks", where, row_id, batch.rows));
    }
    if (row.sequence != batch.sequence) {
      throw InputError(fmt::format("{}: row {} has {} tokens, row 0 has {}", where, row_id, row.sequence, batch.sequence));
    }
    ++batch.rows;
    const auto append = [](auto& to, const auto& from) { to.insert(to.end(), from.begin(), from.end()); };
    append(batch.ids, row.ids);
    append(batch.targets, row.targets);
    append(batch.positions, row.positions);
    append(batch.document_starts, row.document_starts);
    batch.row_ids.push_back(row_id);
  }
  return batch;
}

}  // namespace

TraceReader::TraceReader(const std::vector<std::filesystem::path>& folders) {
  TANDEM_CHECK(!folders.empty());
  where_ = folders.front().string();
  if (folders.size() > 1) where_ += fmt::format(" and {} more", folders.size() - 1);
  for (const std::filesystem::path& folder : folders) read_folder(folder);
  if (entries_.empty()) throw InputError(fmt::format("{}: the trace has no entries", where_));
  if (!rows_.empty()) batch_ = joined(rows_, where_);
  rows_.clear();
}

void TraceReader::read_folder(const std::filesystem::path& folder) {
  const std::filesystem::path file = folder / "trace.json";
  if (!std::filesystem::exists(file)) throw InputError(fmt::format("{}: no trace.json in it; is this a trace?", folder.string()));
  TraceIndex index = parse_trace_index(read_text_file(file), file.string());
  if (files_.empty() && rows_.empty()) {
    header_ = index.header;
  } else {
    require_same(header_, index.header, file.string());
    header_.ranks = std::max(header_.ranks, index.header.ranks);
    if (!header_.loss) header_.loss = index.header.loss;
  }
  for (std::size_t i = 0; i < index.entries.size(); ++i) {
    TraceEntry& entry = index.entries[i];
    const std::filesystem::path values = inside(folder, entry.file, file.string());
    auto found = open_.find(values);
    if (found == open_.end()) found = open_.emplace(values, SafetensorsFile(values)).first;
    const SafetensorsEntry& stored = found->second.entry(entry.key);
    const std::string where = fmt::format("{}: entries[{}] \"{}\"", file.string(), i, entry.name);
    if (num_elements(stored.shape) != num_elements(entry)) {
      throw InputError(fmt::format("{}: tensor \"{}\" of {} has {} values, shape and slices of the entry ask for {}", where,
                                   entry.key, values.string(), num_elements(stored.shape), num_elements(entry)));
    }
    const bool floating =
        stored.dtype == DType::f64 || stored.dtype == DType::f32 || stored.dtype == DType::f16 || stored.dtype == DType::bf16;
    if (!floating) throw InputError(fmt::format("{}: values of type {}, they must be floating", where, name(stored.dtype)));
    entry.shard.dtype = stored.dtype;
    files_.push_back(&found->second);
    entries_.push_back(std::move(entry));
  }
  if (!index.batch_file.empty()) add_batch(inside(folder, index.batch_file, file.string()));
}

void TraceReader::add_batch(const std::filesystem::path& path) {
  const Batch batch = read_batch_file(path, header_.model.vocabulary, header_.model.sequence);
  for (std::int64_t row = 0; row < batch.rows; ++row) {
    const Batch part = slice_rows(batch, row, 1);
    const auto [place, is_new] = rows_.emplace(part.row_ids.front(), part);
    if (!is_new && !same_row(place->second, part)) {
      throw InputError(fmt::format("{}: row {} differs from the same row of another rank", path.string(), part.row_ids.front()));
    }
  }
}

std::vector<double> TraceReader::values(std::size_t index) const {
  return files_.at(index)->read_as<double>(entries_.at(index).key);
}

TraceReader open_trace(const std::filesystem::path& path) {
  if (!std::filesystem::is_directory(path))
    throw InputError(fmt::format("{}: no such folder; a trace is a folder", path.string()));
  if (std::filesystem::exists(path / "trace.json")) return TraceReader({path});
  std::vector<std::filesystem::path> folders;
  for (const auto& child : std::filesystem::directory_iterator(path)) {
    if (std::filesystem::exists(child.path() / "trace.json")) folders.push_back(child.path());
  }
  if (folders.empty()) {
    throw InputError(fmt::format("{}: no trace.json in it, nor in a folder in it; is this a trace?", path.string()));
  }
  std::sort(folders.begin(), folders.end());
  return TraceReader(folders);
}

}  // namespace tandem
