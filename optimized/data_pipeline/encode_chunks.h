// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "core/dtype.h"
#include "optimized/data_pipeline/documents.h"
#include "optimized/data_pipeline/tokenizer.h"

namespace tandem {

/// The tokens of a chunk as the data set stores them, the end of each document among them.
struct EncodedChunk {
  struct Piece {
    std::int64_t tokens = 0;  ///< without the end of the document
    bool ends_document = true;
  };
  std::vector<std::byte> tokens;
  std::vector<Piece> pieces;
  std::size_t text_bytes = 0;
};

/// Checks that the pieces are text (InputError with file and offset) and encodes them. Any thread may do it: the result is a
/// function of the arguments.
[[nodiscard]] EncodedChunk encode_chunk(const TextChunk& chunk, const TextTokenizer& tokenizer, DType dtype);

/// Encodes chunks with several threads and hands the results over in the order of the chunks, in the thread that calls submit()
/// and finish(). No more than a few chunks for each thread are held.
///
/// Of the failures, of chunks and of `use`, the first in the order of the chunks is thrown, by submit() or finish(); the encoder
/// can only be destroyed then, or finished, which does nothing.
class ChunkEncoder {
 public:
  using Encode = std::function<EncodedChunk(const TextChunk&)>;
  using Use = std::function<void(EncodedChunk&&)>;

  /// threads: 1 encodes in the calling thread.
  ChunkEncoder(int threads, Encode encode, Use use);
  ChunkEncoder(const ChunkEncoder&) = delete;
  ChunkEncoder& operator=(const ChunkEncoder&) = delete;
  ~ChunkEncoder();

  void submit(TextChunk chunk);
  /// Hands over what is left.
  void finish();

 private:
  struct Job {
    TextChunk chunk;
    EncodedChunk result;
    std::exception_ptr failure;
    bool done = false;
  };
  void run(const std::stop_token& stop);
  void use_oldest();

  Encode encode_;
  Use use_;
  std::size_t window_;
  std::mutex mutex_;
  std::condition_variable_any added_;
  std::condition_variable ended_;
  std::deque<std::shared_ptr<Job>> jobs_;  ///< in order, the oldest first; those before next_ have a thread
  std::size_t next_ = 0;
  bool failed_ = false;                ///< of the calling thread
  std::vector<std::jthread> threads_;  // the last member: they use the others until they are joined
};

}  // namespace tandem
