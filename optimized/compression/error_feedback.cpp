// SPDX-License-Identifier: Apache-2.0
#include "optimized/compression/error_feedback.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include <fmt/format.h>

#include "core/error.h"

namespace tandem {

ErrorFeedback::Places ErrorFeedback::places_of(const std::vector<ResidualTensor>& layout) {
  Places places;
  std::int64_t first = 0;
  for (const ResidualTensor& tensor : layout) {
    TANDEM_CHECK(tensor.elements >= 0, fmt::format("{} has {} elements", tensor.name, tensor.elements));
    const bool added = places.emplace(tensor.name, Place{first, tensor.elements}).second;
    TANDEM_CHECK(added, fmt::format("{} has two residuals", tensor.name));
    first += tensor.elements;
  }
  return places;
}

ErrorFeedback::ErrorFeedback(Arena& arena, std::vector<ResidualTensor> layout)
    : layout_(std::move(layout)), places_(places_of(layout_)) {
  for (const ResidualTensor& tensor : layout_) num_elements_ += tensor.elements;
  current_ = arena.allocate(DType::f32, {num_elements_}, MemoryCategory::gradients);
  next_ = arena.allocate(DType::f32, {num_elements_}, MemoryCategory::gradients);
  std::ranges::fill(elements_of(current_), 0.0F);
}

std::span<float> ErrorFeedback::elements_of(const Arena::Buffer& buffer) const {
  return buffer.view(DType::f32, {num_elements_}).as<float>();
}

ErrorFeedback::Piece ErrorFeedback::begin(std::int64_t first_element, std::int64_t count) {
  TANDEM_CHECK(first_element >= 0 && count >= 0 && first_element + count <= num_elements_,
               fmt::format("elements [{}, {}) of {} residuals", first_element, first_element + count, num_elements_));
  if (count > 0) {
    const auto after = begun_.lower_bound(first_element);
    const bool meets_next = after != begun_.end() && after->first < first_element + count;
    const bool meets_previous = after != begun_.begin() && std::prev(after)->first + std::prev(after)->second > first_element;
    TANDEM_CHECK(!meets_next && !meets_previous,
                 fmt::format("elements of [{}, {}) are compressed twice in a step", first_element, first_element + count));
    begun_.emplace(first_element, count);
  }
  const auto first = static_cast<std::size_t>(first_element), size = static_cast<std::size_t>(count);
  return {elements_of(current_).subspan(first, size), elements_of(next_).subspan(first, size)};
}

std::span<float> ErrorFeedback::next(std::int64_t first_element, std::int64_t count) {
  const auto begun = begun_.find(first_element);
  TANDEM_CHECK(begun != begun_.end() && begun->second == count,
               fmt::format("elements [{}, {}) were not handed out", first_element, first_element + count));
  return elements_of(next_).subspan(static_cast<std::size_t>(first_element), static_cast<std::size_t>(count));
}

bool ErrorFeedback::compress(const Codec& codec, std::int64_t first_element, std::span<const float> gradient,
                             std::span<std::byte> payload, const CodecPosition& position) {
  const Piece piece = begin(first_element, static_cast<std::int64_t>(gradient.size()));
  const bool finite = codec.compress({.gradient = gradient,
                                      .residual = piece.residual,
                                      .new_residual = piece.new_residual,
                                      .payload = payload,
                                      .position = position});
  failed_ = failed_ || !finite;
  return finite;
}

void ErrorFeedback::commit() {
  std::int64_t covered = 0;
  for (const auto& [first, count] : begun_) covered += count;
  TANDEM_CHECK(covered == num_elements_, fmt::format("{} of {} residuals were renewed in this step", covered, num_elements_));
  TANDEM_CHECK(!failed_, "a step with a gradient that is not finite cannot be committed");
  std::swap(current_, next_);
  begun_.clear();
}

void ErrorFeedback::discard() noexcept {
  begun_.clear();
  failed_ = false;
}

const ErrorFeedback::Place& ErrorFeedback::place(std::string_view name) const {
  const auto found = places_.find(name);
  TANDEM_CHECK(found != places_.end(), fmt::format("{} has no residual", name));
  return found->second;
}

void ErrorFeedback::require_between_steps() const {
  TANDEM_CHECK(begun_.empty() && !failed_, "in the middle of a step: commit() or discard() it first");
}

std::span<const float> ErrorFeedback::residual(std::string_view name) const {
  require_between_steps();
  const Place& at = place(name);
  return elements_of(current_).subspan(static_cast<std::size_t>(at.first), static_cast<std::size_t>(at.elements));
}

void ErrorFeedback::restore(std::string_view name, std::span<const float> values) {
  require_between_steps();
  const Place& at = place(name);
  TANDEM_CHECK(static_cast<std::int64_t>(values.size()) == at.elements,
               fmt::format("the residual of {} has {} elements, not {}", name, at.elements, values.size()));
  std::ranges::copy(values, elements_of(current_).begin() + at.first);
}

void ErrorFeedback::scale(float factor) {
  require_between_steps();
  for (float& value : elements_of(current_)) value *= factor;
}

}  // namespace tandem
