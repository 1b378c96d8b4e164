// SPDX-License-Identifier: Apache-2.0
#include "optimized/data_pipeline/encode_chunks.h"

#include <cstring>
#include <span>
#include <utility>

#include <fmt/format.h>

#include "core/error.h"
#include "core/text.h"

namespace tandem {
namespace {

constexpr std::size_t kChunksPerThread = 3;  // one being encoded, one waiting, one done

template <class Stored>
void append_as(std::span<const std::int32_t> tokens, std::vector<std::byte>& out) {
  const std::size_t begin = out.size();
  out.resize(begin + tokens.size() * sizeof(Stored));
  std::byte* to = out.data() + begin;
  for (const std::int32_t token : tokens) {
    const auto stored = static_cast<Stored>(token);
    std::memcpy(to, &stored, sizeof(Stored));
    to += sizeof(Stored);
  }
}

void append_stored(DType dtype, std::span<const std::int32_t> tokens, std::vector<std::byte>& out) {
  switch (dtype) {
    case DType::u8: return append_as<std::uint8_t>(tokens, out);
    case DType::u16: return append_as<std::uint16_t>(tokens, out);
    case DType::i32: return append_as<std::int32_t>(tokens, out);
    default: throw ContractError(fmt::format("tokens are not stored as {}", name(dtype)));
  }
}

}  // namespace

EncodedChunk encode_chunk(const TextChunk& chunk, const TextTokenizer& tokenizer, DType dtype) {
  const auto* file_begin = reinterpret_cast<const char*>(chunk.file->bytes().data());
  const bool plain_bytes = tokenizer.model().empty() && dtype == DType::u8;
  EncodedChunk encoded;
  encoded.text_bytes = chunk.bytes;
  encoded.pieces.reserve(chunk.pieces.size());
  encoded.tokens.reserve(chunk.bytes + chunk.pieces.size());
  std::vector<std::int32_t> tokens;
  for (const TextPiece& piece : chunk.pieces) {
    require_text(piece.text, chunk.file->path().string(), static_cast<std::size_t>(piece.text.data() - file_begin));
    tokens.clear();
    std::size_t count = piece.text.size();
    if (plain_bytes) {
      const auto bytes = std::as_bytes(std::span(piece.text));
      encoded.tokens.insert(encoded.tokens.end(), bytes.begin(), bytes.end());
    } else {
      tokenizer.encode(piece.text, tokens);
      count = tokens.size();
    }
    if (piece.ends_document) tokens.push_back(tokenizer.end_of_document());
    append_stored(dtype, tokens, encoded.tokens);
    encoded.pieces.push_back({static_cast<std::int64_t>(count), piece.ends_document});
  }
  return encoded;
}

ChunkEncoder::ChunkEncoder(int threads, Encode encode, Use use)
    : encode_(std::move(encode)), use_(std::move(use)), window_(kChunksPerThread * static_cast<std::size_t>(threads)) {
  TANDEM_CHECK(threads >= 1, fmt::format("{} threads", threads));
  for (int i = 0; threads > 1 && i < threads; ++i) {
    threads_.emplace_back([this](const std::stop_token& stop) { run(stop); });
  }
}

ChunkEncoder::~ChunkEncoder() {
  for (std::jthread& thread : threads_) thread.request_stop();
}

void ChunkEncoder::submit(TextChunk chunk) {
  if (threads_.empty()) return use_(encode_(chunk));
  while (jobs_.size() >= window_) use_oldest();
  auto job = std::make_shared<Job>();
  job->chunk = std::move(chunk);
  {
    const std::lock_guard lock(mutex_);
    jobs_.push_back(std::move(job));
  }
  added_.notify_one();
}

void ChunkEncoder::finish() {
  while (!failed_ && !jobs_.empty()) use_oldest();
}

void ChunkEncoder::use_oldest() {
  std::shared_ptr<Job> job;
  failed_ = true;
  {
    std::unique_lock lock(mutex_);
    ended_.wait(lock, [&] { return jobs_.front()->done; });
    job = std::move(jobs_.front());
    jobs_.pop_front();
    --next_;
  }
  if (job->failure) std::rethrow_exception(job->failure);
  use_(std::move(job->result));
  failed_ = false;
}

void ChunkEncoder::run(const std::stop_token& stop) {
  for (std::unique_lock lock(mutex_); added_.wait(lock, stop, [&] { return next_ < jobs_.size(); });) {
    if (stop.stop_requested()) return;
    const std::shared_ptr<Job> job = jobs_[next_++];
    lock.unlock();
    EncodedChunk result;
    std::exception_ptr failure;
    try {
      result = encode_(job->chunk);
    } catch (...) {
      failure = std::current_exception();
    }
    lock.lock();
    job->result = std::move(result);
    job->failure = std::move(failure);
    job->done = true;
    ended_.notify_one();
  }
}

}  // namespace tandem
