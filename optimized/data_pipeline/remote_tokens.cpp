// SPDX-License-Identifier: Apache-2.0
#include "optimized/data_pipeline/remote_tokens.h"

#include <unistd.h>

#include <utility>

#include <fmt/format.h>

#include "core/error.h"
#include "core/io/atomic_file.h"
#include "core/io/hash.h"

namespace tandem {
namespace {

std::string as_text(const std::vector<std::byte>& bytes) { return {reinterpret_cast<const char*>(bytes.data()), bytes.size()}; }

std::string place(const ObjectStore& store, const std::string& key) { return fmt::format("{} of {}", key, store.describe()); }

/// PREFIX.json as the store has it, else as it was when the store was last reached.
DataManifest fetch_manifest(const ObjectStore& store, const std::string& name, const std::filesystem::path& folder,
                            bool& reached) {
  const std::string key = name + ".json";
  const std::string where = place(store, key);
  const std::filesystem::path copy = folder / fmt::format("{}.json", to_hex(hash128(std::as_bytes(std::span(where)))));
  try {
    const std::string text = as_text(store.get(key));
    DataManifest manifest = parse_data_manifest(text, where);
    write_file_atomically(copy, text);
    return manifest;
  } catch (const StoreError&) {
    if (!std::filesystem::exists(copy)) throw;
    reached = false;
    return parse_data_manifest(read_text_file(copy), copy.string());
  }
}

/// The .idx in the folder, from the store where it is not there or is not what PREFIX.json says.
MappedFile fetch_index(const ObjectStore& store, const std::string& name, const DataManifest& manifest,
                       const std::filesystem::path& folder) {
  const std::string key = name + ".idx";
  const Hash128 wanted = *manifest.idx_hash;
  const std::filesystem::path copy = folder / (to_hex(wanted) + ".idx");
  if (std::filesystem::exists(copy)) {
    MappedFile file(copy);
    if (hash128(file.bytes()) == wanted) return file;
  }
  const std::filesystem::path unfinished = folder / fmt::format("{}-{}.unfinished", to_hex(wanted), ::getpid());
  std::filesystem::remove(unfinished);
  store.get_file(key, unfinished);
  MappedFile file(unfinished);
  if (hash128(file.bytes()) != wanted) {
    std::filesystem::remove(unfinished);
    throw InputError(fmt::format("{} has {} bytes that are not those which {}.json describes; prepare and copy the data again",
                                 place(store, key), file.bytes().size(), name));
  }
  std::filesystem::rename(unfinished, copy);
  return file;
}

void require_bin(const ObjectStore& store, const std::string& key, std::int64_t bytes) {
  const std::optional<ObjectInfo> info = store.find(key);
  if (!info) throw InputError(fmt::format("{} does not exist", place(store, key)));
  if (info->bytes != bytes) {
    throw InputError(fmt::format("{} has {} bytes, by its .json it should have {}; copy the data again", place(store, key),
                                 info->bytes, bytes));
  }
}

double percent(std::int64_t part, std::int64_t whole) {
  return whole == 0 ? 0 : 100 * static_cast<double>(part) / static_cast<double>(whole);
}

double mib(std::int64_t bytes) { return static_cast<double>(bytes) / (1 << 20); }

}  // namespace

std::optional<RemoteData> parse_remote_data(std::string_view url) {
  const bool is_s3 = url.starts_with("s3://");
  if (!is_s3 && !url.starts_with("file://")) return std::nullopt;
  const std::size_t begin = url.find("://") + 3;
  const std::size_t slash = url.rfind('/');
  if (slash < begin || slash + 1 == url.size()) {
    throw InputError(
        fmt::format("{} names no data: {} is needed", url,
                    is_s3 ? "s3://BUCKET/PREFIX, of PREFIX.bin, PREFIX.idx and PREFIX.json" : "file:///FOLDER/PREFIX"));
  }
  return RemoteData{std::string(url.substr(0, slash)), std::string(url.substr(slash + 1))};
}

RemoteTokens::RemoteTokens(std::shared_ptr<const ObjectStore> store, const std::string& name, const RemoteCacheOptions& options)
    : where_(place(*store, name)) {
  const auto disk = std::make_shared<DiskCache>(options.folder, options.disk_bytes);
  manifest_ = fetch_manifest(*store, name, options.folder, reached_);
  if (!manifest_.idx_hash) {
    throw InputError(fmt::format("{}.json has no hash of its index (idx_xxh3_128); prepare the data again", where_));
  }
  const std::string bin = name + ".bin";
  const std::int64_t bytes = manifest_.tokens * static_cast<std::int64_t>(size_bytes(token_dtype(manifest_.vocabulary)));
  if (reached_) require_bin(*store, bin, bytes);
  index_.emplace(fetch_index(*store, name, manifest_, options.folder), place(*store, bin), bytes);
  if (index_->num_documents() != manifest_.documents || index_->num_tokens() != manifest_.tokens) {
    throw InputError(fmt::format("{}.json describes {} documents and {} tokens, its index {} and {}; prepare the data again",
                                 where_, manifest_.documents, manifest_.tokens, index_->num_documents(), index_->num_tokens()));
  }
  cache_ = std::make_unique<BlockCache>(std::move(store), bin, bytes, disk, to_hex(manifest_.bin_hash), options.blocks);
}

void RemoteTokens::read(std::int64_t first, std::span<std::int32_t> out) const {
  const auto count = static_cast<std::int64_t>(out.size());
  TANDEM_CHECK(first >= 0 && first <= num_tokens() - count,
               fmt::format("tokens [{}, {}) of {}", first, first + count, num_tokens()));
  std::vector<std::byte> stored(out.size() * static_cast<std::size_t>(index_->token_bytes()));
  cache_->read(first * index_->token_bytes(), stored);
  decode_tokens(index_->dtype(), stored, first, index_->bin(), out);
}

std::string RemoteTokens::describe() const {
  return fmt::format("{} (tokenizer {}{})", where_, manifest_.tokenizer,
                     reached_ ? "" : "; the store was not reached, what is cached is used");
}

std::string RemoteTokens::identity() const {
  return fmt::format("tokens by {}, {}", manifest_.tokenizer, to_hex(manifest_.bin_hash));
}

std::string describe(const BlockCacheCounts& counts) {
  const std::int64_t asked = counts.memory_hits + counts.memory_misses;
  const DiskCacheCounts& disk = counts.disk;
  std::string text = fmt::format(
      "cache: memory  {} of {} blocks found ({:.1f} %), {:.1f} MiB read, {} evicted, {:.1f} MiB held\n"
      "       disk    {} of {} blocks found ({:.1f} %), {:.1f} MiB read, {} evicted, {:.1f} MiB held\n"
      "       store   {} blocks fetched, {:.1f} MiB, {} of them ahead",
      counts.memory_hits, asked, percent(counts.memory_hits, asked), mib(counts.memory_bytes), counts.memory_evictions,
      mib(counts.held_bytes), disk.hits, disk.hits + disk.misses, percent(disk.hits, disk.hits + disk.misses),
      mib(disk.hit_bytes), disk.evictions, mib(disk.held_bytes), counts.fetches, mib(counts.fetched_bytes), counts.read_ahead);
  if (counts.failures > 0) text += fmt::format(", {} requests failed", counts.failures);
  if (disk.damaged > 0) text += fmt::format("; {} damaged files removed", disk.damaged);
  if (disk.refused > 0) text += fmt::format("; {} blocks could not be written to the disk", disk.refused);
  return text;
}

std::shared_ptr<const TextTokenizer> tokenizer_of(const ObjectStore& store, const std::string& name) {
  const DataManifest manifest = parse_data_manifest(as_text(store.get(name + ".json")), place(store, name + ".json"));
  const std::string key = name + ".model";
  return tokenizer_by(manifest, place(store, name + ".json"), place(store, key), [&] { return as_text(store.get(key)); });
}

}  // namespace tandem
