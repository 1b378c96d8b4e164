// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "optimized/compression/codec.h"
#include "optimized/memory/arena.h"

namespace tandem {

/// A parameter (or this rank's part of one) whose gradient is compressed.
struct ResidualTensor {
  std::string name;
  std::int64_t elements = 0;
};

/// The residuals of one rank: what compression has not sent yet. They belong to parameters, by name, and lie in one flat buffer
/// in the order of a layout, so that a bucket, a run of neighbouring parameters, has its residual in one piece. A step is
///
///   compress() of every bucket;  then commit(), or discard() where the step is skipped by agreement of all ranks
///
/// New residuals go to a second buffer until commit(): a skipped step leaves the old ones untouched, bit for bit, whoever found
/// the overflow and whenever. 8 bytes per element, of category gradients. Not thread-safe.
class ErrorFeedback {
 public:
  /// Residuals are zero. The arena must outlive this. Throws ContractError on a name given twice.
  ErrorFeedback(Arena& arena, std::vector<ResidualTensor> layout);

  [[nodiscard]] std::int64_t num_elements() const noexcept { return num_elements_; }
  [[nodiscard]] const std::vector<ResidualTensor>& layout() const noexcept { return layout_; }

  /// Where a run of elements has its residual, and where the next one goes. Each element may be asked for once a step, by this or
  /// by compress(); a second time throws ContractError, as does a range that is not inside.
  struct Piece {
    std::span<const float> residual;
    std::span<float> new_residual;
  };
  [[nodiscard]] Piece begin(std::int64_t first_element, std::int64_t count);
  /// The new residual of elements that begin() has handed out in this step.
  [[nodiscard]] std::span<float> next(std::int64_t first_element, std::int64_t count);

  /// codec.compress() of the elements from `first_element` on. False: the step must be skipped, and discard() called.
  [[nodiscard]] bool compress(const Codec& codec, std::int64_t first_element, std::span<const float> gradient,
                              std::span<std::byte> payload, const CodecPosition& position);

  /// The new residuals become the residuals. Throws ContractError where an element had none this step (a bucket was forgotten),
  /// or where a compress() of the step had failed.
  void commit();
  /// The step did not happen.
  void discard() noexcept;

  /// In between steps only (ContractError): the state to save and restore. restore() takes this rank's own residual: that of
  /// another rank would break conservation.
  [[nodiscard]] std::span<const float> residual(std::string_view name) const;
  void restore(std::string_view name, std::span<const float> values);
  /// Multiplies every residual, each product rounded: they are in units of the loss, which may be scaled differently next step.
  void scale(float factor);

 private:
  struct Place {
    std::int64_t first = 0;
    std::int64_t elements = 0;
  };
  using Places = std::map<std::string, Place, std::less<>>;

  [[nodiscard]] static Places places_of(const std::vector<ResidualTensor>& layout);
  [[nodiscard]] std::span<float> elements_of(const Arena::Buffer& buffer) const;
  [[nodiscard]] const Place& place(std::string_view name) const;
  void require_between_steps() const;

  std::vector<ResidualTensor> layout_;
  Places places_;
  std::int64_t num_elements_ = 0;
  Arena::Buffer current_, next_;
  std::map<std::int64_t, std::int64_t> begun_;  // first element, count: the pieces of this step
  bool failed_ = false;
};

}  // namespace tandem
