// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "core/io/dataset_index.h"
#include "optimized/data_pipeline/block_cache.h"
#include "optimized/data_pipeline/manifest.h"
#include "optimized/data_pipeline/token_store.h"
#include "optimized/data_pipeline/tokenizer.h"
#include "optimized/storage/object_store.h"

namespace tandem {

/// Where prepared data is that is not on this machine: objects NAME.bin, NAME.idx and NAME.json of a store.
struct RemoteData {
  std::string store;  ///< for open_store()
  std::string name;
};

/// "s3://BUCKET[/FOLDER]/NAME" and "file:///FOLDER/NAME"; nothing for other texts. Throws InputError where NAME is missing.
[[nodiscard]] std::optional<RemoteData> parse_remote_data(std::string_view url);

struct RemoteCacheOptions {
  std::filesystem::path folder;                      ///< of copies and blocks
  std::int64_t disk_bytes = std::int64_t{16} << 30;  ///< of all blocks in the folder; the .idx are besides
  BlockCacheOptions blocks;
};

/// Prepared data in a store. PREFIX.json and PREFIX.idx are copied whole into the folder, and checked against size and hash; the
/// .bin comes in blocks as it is read, and stays in memory and in the folder (BlockCache). Copies are named by the hash of the
/// data: other data of the same name is never taken for it.
///
/// Where the store cannot be reached and PREFIX.json was copied before, that copy is taken, and what is in the caches can be
/// read.
class RemoteTokens final : public TokenStore {
 public:
  /// Shares the store. Throws InputError where the data is damaged, incomplete, or was prepared before PREFIX.json had a hash of
  /// the index; IoError where the folder cannot be written; StoreError.
  RemoteTokens(std::shared_ptr<const ObjectStore> store, const std::string& name, const RemoteCacheOptions& options);

  [[nodiscard]] std::int64_t num_tokens() const noexcept override { return index_->num_tokens(); }
  [[nodiscard]] std::int64_t num_documents() const noexcept override { return index_->num_documents(); }
  [[nodiscard]] std::int64_t document_begin(std::int64_t index) const override { return index_->document_begin(index); }
  /// Also throws StoreError, for tokens that are in neither cache.
  void read(std::int64_t first, std::span<std::int32_t> out) const override;
  [[nodiscard]] std::int64_t vocabulary() const noexcept override { return manifest_.vocabulary; }
  [[nodiscard]] std::string describe() const override;
  /// That of the same data on this machine.
  [[nodiscard]] std::string identity() const override;

  [[nodiscard]] BlockCacheCounts cache_counts() const { return cache_->counts(); }

 private:
  std::string where_;
  bool reached_ = true;  ///< the store, when this was opened
  DataManifest manifest_;
  std::optional<DatasetIndex> index_;
  std::unique_ptr<BlockCache> cache_;
};

/// Three lines: what memory, disk and store have given.
[[nodiscard]] std::string describe(const BlockCacheCounts& counts);

/// The tokenizer of prepared data in a store (tokenizer_of()).
[[nodiscard]] std::shared_ptr<const TextTokenizer> tokenizer_of(const ObjectStore& store, const std::string& name);

}  // namespace tandem
