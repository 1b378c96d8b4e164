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
  std::int64_t vocabulary = 0;       ///< token ids are [0, vocabulary)
  std::int32_t end_of_document = 0;  ///< the token that ends each document
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

/// What one row of a batch is.
///   stream    a sample of the stream of all documents (below): no padding, documents cut where a row ends
///   padded    one piece of one document; a batch is as long as its longest piece
///   bucketed  the same pieces, grouped so that those of a batch have about the same length
///   packed    several whole pieces one behind the other, each with its own positions and attention
enum class Batching : std::uint8_t { stream, padded, bucketed, packed };
[[nodiscard]] std::string_view name(Batching batching);

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
/// Batching other than stream:
/// pieces     a document of n tokens, its end included, is n - 1 pairs (token, next token), cut every T pairs; the last piece is
///            what is left. A document without a pair has no piece. In the order of the documents of the part. A document that
///            the split by position cuts is one document of n tokens in each part, n those of this part.
/// rows       padded, bucketed: one piece. A batch is as long as its longest piece, over the whole global batch, rounded up to a
///            multiple of pad_multiple, which divides T; 1 where it has no row.
///            packed: the pieces, W = kPackWindow at a time in their order (the last window has what is left), are put into rows
///            of T pairs: longest first (of equal ones the earlier), each into the first row of this window that has room. Within
///            a row by number of the piece. Rows by window, then as opened. A batch is T long.
///            Positions and attention restart at each piece. Behind the last one of a row follows padding: id 0, no target,
///            positions and attention restarting once, as if it were one more document: it is seen by nothing.
/// order      padded, packed: as above, S the pieces, or rows, of the training part. bucketed: the places g of all epochs in a
///            row, in windows of B = bucket_batches batches; in window w the B * rows pieces in order of (length, place) are cut
///            into B batches, and batch q_w(s mod B) of these is that of step s, w = floor(s / B): q_w a permutation of B as p_e,
///            keyed by "data_pipeline/window/<w>". So each place is in exactly one row. A window that two epochs share may show
///            pieces of the later one before the last of the earlier one.
/// validation padded, bucketed: the pieces of the held-out part in their order, no buckets. packed: its rows in their order.
/// p_e        2h bits, h >= 4 the least with 4^h >= S. x = L 2^h + R. Round r = 0..7: (L, R) <- (R, L xor (word 0 of
///            philox({R, r, 0, 0}, key) mod 2^h)). Again from the start while the result is >= S. The key is next_u64() of
///            CounterRng(seed, "data_pipeline/epoch/<e>"), low word first.
struct TextDataOptions {
  std::int64_t sequence = 64;
  double validation_fraction = 0.1;  ///< [0, 1)
  std::uint64_t seed = 1;
  /// stream: attention and positions restart at each document of a row, and the last token of a document has no target.
  bool respect_documents = false;
  DocumentRule documents = DocumentRule::file;  ///< for plain text; prepared data has its documents
  Batching batching = Batching::stream;
  std::int64_t bucket_batches = 16;  ///< bucketed: batches of a window
  std::int64_t pad_multiple = 1;     ///< padded, bucketed: divides the length of a batch, and the sequence
};

inline constexpr std::int64_t kPackWindow = 1024;  ///< pieces that are packed together

/// Throws InputError where the sequence is not positive, the fraction not in [0, 1), bucket_batches or pad_multiple not positive,
/// or, with rows that are padded to the longest, pad_multiple does not divide the sequence.
void validate(const TextDataOptions& options);

}  // namespace tandem
