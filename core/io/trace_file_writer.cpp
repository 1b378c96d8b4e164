// SPDX-License-Identifier: Apache-2.0
#include "core/io/trace_file_writer.h"

#include <unistd.h>
#include <array>
#include <cerrno>
#include <cstring>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "core/error.h"
#include "core/io/atomic_file.h"
#include "core/io/safetensors.h"
#include "core/io/trace_file_index.h"

namespace tandem {
namespace {

constexpr std::string_view kIndexFile = "trace.json";
constexpr std::string_view kValuesFile = "values.safetensors";
constexpr std::string_view kBatchFile = "batch.safetensors";

std::string_view safetensors_name(DType dtype) {
  switch (dtype) {
    case DType::f64: return "F64";
    case DType::f32: return "F32";
    case DType::f16: return "F16";
    case DType::bf16: return "BF16";
    default: break;
  }
  TANDEM_CHECK(false, fmt::format("values of a trace are floating numbers, not {}", name(dtype)));
}

std::string with_length_and_padding(std::string header) {
  header.resize((header.size() + 7) / 8 * 8, ' ');  // data then starts aligned
  std::string text;
  for (int byte = 0; byte < 8; ++byte) text += static_cast<char>(header.size() >> (8 * byte) & 0xff);
  return text + header;
}

void make_folder(const std::filesystem::path& folder) {
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  if (error) throw IoError(fmt::format("{}: cannot make the folder: {}", folder.string(), error.message()));
}

}  // namespace

TraceWriter::TraceWriter(std::filesystem::path folder, TraceHeader header)
    : folder_(std::move(folder)),
      spool_path_(folder_ / fmt::format("values.{}.partial", ::getpid())),
      header_(std::move(header)) {
  make_folder(folder_);
  spool_.open(spool_path_, std::ios::binary | std::ios::trunc);
  if (!spool_) throw IoError(fmt::format("{}: cannot be written: {}", spool_path_.string(), std::strerror(errno)));
}

TraceWriter::~TraceWriter() {
  spool_.close();
  std::error_code ignored;
  std::filesystem::remove(spool_path_, ignored);
}

void TraceWriter::append(const TraceEntry& entry, TensorView values) {
  require_possible(entry, header_.model.head_size(), fmt::format("trace entry {}", entry.name));
  TANDEM_CHECK(values.num_elements() == num_elements(entry),
               fmt::format("{}: {} values for a shard of {}", entry.name, values.num_elements(), num_elements(entry)));
  static_cast<void>(safetensors_name(values.dtype()));
  const std::lock_guard lock(mutex_);
  TraceEntry kept = entry;
  kept.shard.dtype = values.dtype();
  kept.file = kValuesFile;
  kept.key = fmt::format("{:06}.{}", entries_.size(), entry.name);
  spool_.write(static_cast<const char*>(values.data()), values.size_bytes());
  if (!spool_) throw IoError(fmt::format("{}: cannot be written: {}", spool_path_.string(), std::strerror(errno)));
  entries_.push_back(std::move(kept));
}

void TraceWriter::write_values() {
  nlohmann::ordered_json header;
  std::int64_t begin = 0;
  for (const TraceEntry& entry : entries_) {
    const std::int64_t count = num_elements(entry);
    const std::int64_t end = begin + count * static_cast<std::int64_t>(size_bytes(entry.shard.dtype));
    Shape shape = entry.transposed || entry.shard.flat_range ? Shape{count} : entry.shard.local_shape();
    header[entry.key] = {{"dtype", safetensors_name(entry.shard.dtype)}, {"shape", shape}, {"data_offsets", {begin, end}}};
    begin = end;
  }
  AtomicFile file(folder_ / kValuesFile);
  file.write(with_length_and_padding(entries_.empty() ? "{}" : header.dump()));
  std::ifstream spool(spool_path_, std::ios::binary);
  std::vector<char> chunk(1 << 20);
  for (std::int64_t left = begin; left > 0;) {
    const auto count = std::min<std::int64_t>(left, static_cast<std::int64_t>(chunk.size()));
    if (!spool.read(chunk.data(), count)) throw IoError(fmt::format("{}: cannot be read back", spool_path_.string()));
    file.write(std::as_bytes(std::span(chunk.data(), static_cast<std::size_t>(count))));
    left -= count;
  }
  // The old index names keys of the old values: without it the folder is no trace rather than a wrong one.
  file.finish();
  std::error_code ignored;
  std::filesystem::remove(folder_ / kIndexFile, ignored);
  file.commit();
}

void TraceWriter::close() {
  spool_.close();
  if (!spool_) throw IoError(fmt::format("{}: cannot be written: {}", spool_path_.string(), std::strerror(errno)));
  write_values();
  if (batch_) write_batch_file(folder_ / kBatchFile, *batch_);
  const TraceIndex index{header_, batch_ ? std::string(kBatchFile) : "", entries_};
  write_file_atomically(folder_ / kIndexFile, to_json(index));
}

void write_batch_file(const std::filesystem::path& path, const Batch& batch) {
  Batch copy = batch;
  const Shape shape = {batch.rows, batch.sequence};
  const std::array<NamedTensor, 5> tensors = {NamedTensor{"ids", view_of(copy.ids, shape)},
                                              NamedTensor{"targets", view_of(copy.targets, shape)},
                                              NamedTensor{"positions", view_of(copy.positions, shape)},
                                              NamedTensor{"document_starts", view_of(copy.document_starts, shape)},
                                              NamedTensor{"row_ids", view_of(copy.row_ids, {batch.rows})}};
  write_safetensors(path, tensors);
}

Batch read_batch_file(const std::filesystem::path& path, std::int64_t vocabulary, std::int64_t positions) {
  const SafetensorsFile file(path);
  const Shape shape = file.entry("ids").shape;
  if (shape.size() != 2) {
    throw InputError(
        fmt::format("{}: tensor \"ids\" has shape {}, it must be [rows, sequence]", path.string(), to_string(shape)));
  }
  if (shape[1] > positions) {
    throw InputError(fmt::format("{}: rows of {} tokens, the model's n_positions is {}", path.string(), shape[1], positions));
  }
  Batch batch = make_batch(shape[0], shape[1]);
  const auto require = [&](std::string_view key, const Shape& expected) {
    if (file.entry(key).shape == expected) return;
    throw InputError(fmt::format(R"({}: tensor "{}" has shape {}, "ids" asks for {})", path.string(), key,
                                 to_string(file.entry(key).shape), to_string(expected)));
  };
  require("targets", shape);
  batch.ids = file.read_as<std::int32_t>("ids");
  batch.targets = file.read_as<std::int32_t>("targets");
  if (file.contains("positions")) {
    require("positions", shape);
    batch.positions = file.read_as<std::int32_t>("positions");
  }
  if (file.contains("document_starts")) {
    require("document_starts", shape);
    batch.document_starts = file.read_as<std::int32_t>("document_starts");
  }
  if (file.contains("row_ids")) {
    require("row_ids", {shape[0]});
    batch.row_ids = file.read_as<std::int64_t>("row_ids");
  }
  try {
    validate_tokens(batch, vocabulary);
  } catch (const InputError& error) {
    throw InputError(fmt::format("{}: {}", path.string(), error.what()));
  }
  for (std::size_t i = 0; i < batch.positions.size(); ++i) {
    const auto token = static_cast<std::int32_t>(static_cast<std::int64_t>(i) % batch.sequence);
    if (batch.positions[i] < 0 || batch.positions[i] >= positions) {
      throw InputError(
          fmt::format("{}: position {} of token {}, n_positions is {}", path.string(), batch.positions[i], i, positions));
    }
    if (batch.document_starts[i] < 0 || batch.document_starts[i] > token) {
      throw InputError(
          fmt::format("{}: document_starts is {} at token {} of its row", path.string(), batch.document_starts[i], token));
    }
  }
  return batch;
}

}  // namespace tandem
