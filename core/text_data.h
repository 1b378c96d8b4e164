// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace tandem {

/// The `bytes` tokenizer: a token is a byte of the UTF-8 text. NUL, which text does not contain (a file with one is refused as
/// not text), ends each document, so that the vocabulary is 256 and a token fits one byte.
inline constexpr std::int32_t kEndOfDocument = 0;

struct Tokenizer {
  std::string name;
  std::int64_t vocabulary = 0;
  std::int32_t end_of_document = 0;
};

/// "bytes". Throws InputError on any other name, listing those that exist.
[[nodiscard]] Tokenizer find_tokenizer(std::string_view name);

/// The bytes tokenizer on a piece of text (a prompt), and back; decoding leaves kEndOfDocument out.
[[nodiscard]] std::vector<std::int32_t> encode_bytes(std::string_view text);
[[nodiscard]] std::string decode_bytes(std::span<const std::int32_t> tokens);

/// What is one document of a text file. A line ends at '\n' or at the end of the file; it is empty when nothing, or only '\r',
/// stands before that.
///   file       the whole file
///   paragraph  a longest run of lines that are not empty, with the '\n' of each
///   line       a line that is not empty, without its '\n'
enum class DocumentRule : std::uint8_t { file, paragraph, line };
[[nodiscard]] std::string_view name(DocumentRule rule);
/// Throws InputError on an unknown name, listing those that exist.
[[nodiscard]] DocumentRule parse_document_rule(std::string_view name);

/// How text becomes batches. Definition, for both implementations (docs/techniques/data_pipeline.md):
///
/// stream     the documents in order, each followed by kEndOfDocument: D documents, N tokens
/// split      k = floor(validation_fraction * D). If k >= 1, document d is held out where floor((d+1) k / D) > floor(d k / D),
/// and
///            each part is the stream of its documents. Otherwise the last floor(validation_fraction * N) tokens are held out.
/// samples    sample i of a part is its tokens [i T, i T + T], T = sequence: T inputs, and the targets one further. A part of n
///            tokens has floor((n - 1) / T) samples.
/// order      row r of step s is number g = s * rows + r: sample p_e(g mod S) of epoch e = floor(g / S), S the samples of the
///            training part, p_e a permutation keyed by (seed, e). Validation keeps the order of the samples.
/// p_e        2h bits, h >= 4 the least with 4^h >= S. x = L 2^h + R. Round r = 0..7: (L, R) <- (R, L xor (word 0 of
///            philox({R, r, 0, 0}, key) mod 2^h)). Again from the start while the result is >= S. The key is next_u64() of
///            CounterRng(seed, "data_pipeline/epoch/<e>"), low word first.
struct TextDataOptions {
  std::int64_t sequence = 64;
  double validation_fraction = 0.1;  ///< [0, 1)
  std::uint64_t seed = 1;
  /// true: attention and positions restart at each document of a row, and the last token of a document has no target.
  bool respect_documents = false;
  DocumentRule documents = DocumentRule::file;  ///< for plain text; prepared data has its documents
};

/// Throws InputError where the sequence is not positive or the fraction not in [0, 1).
void validate(const TextDataOptions& options);

}  // namespace tandem
