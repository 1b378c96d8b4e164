// SPDX-License-Identifier: Apache-2.0
#include "core/error.h"
#include "optimized/data_pipeline/tokenizer.h"

namespace tandem {
namespace {

constexpr const char* kMissing =
    "this program was built without SentencePiece, which bpe:N and FILE.model need: install libsentencepiece-dev and build "
    "again, "
    "or use --tokenizer bytes";

}  // namespace

std::shared_ptr<const TextTokenizer> sentencepiece_tokenizer(std::string /*name*/, std::string /*model*/,
                                                             std::string_view /*source*/) {
  throw InputError(kMissing);
}

std::string train_bpe(std::int64_t /*vocabulary*/, const std::vector<std::filesystem::path>& /*inputs*/,
                      std::int64_t /*training_bytes*/) {
  throw InputError(kMissing);
}

}  // namespace tandem
