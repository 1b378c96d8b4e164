// SPDX-License-Identifier: Apache-2.0
#include "suites/golden_movement.h"

#include <algorithm>
#include <cmath>

namespace tandem {
namespace {

// Elements of a stored tensor that are compared.
template <class Function>
void for_each_compared(const GoldenSet& set, const std::string& name, const GoldenTensor& tensor, Function&& function) {
  const std::int64_t third = name.ends_with("attn.c_attn.bias") ? set.model.hidden : 0;
  for (std::size_t i = 0; i < tensor.values.size(); ++i) {
    const std::int64_t element = static_cast<std::int64_t>(i) * tensor.stride;
    if (element < third || element >= 2 * third) function(i);
  }
}

double norm_of(const GoldenSet& set, const std::string& name, const GoldenTensor& tensor) {
  double squares = 0;
  for_each_compared(set, name, tensor, [&](std::size_t i) { squares += tensor.values[i] * tensor.values[i]; });
  return std::sqrt(squares);
}

double ratio(double part, double whole) { return whole > 0 ? part / whole : part; }

// Where an error of relative size 1 lies, element by element: independent errors of x and dy in dW = sum over tokens of x dy^T
// are as large as the gradient's rows and columns are, rms(row) rms(column) / rms. A vector has them evenly: its elements are
// sums over tokens that may cancel, the errors do not.
std::vector<double> error_shape(const GoldenTensor& tensor, const std::vector<double>& gradient) {
  const bool is_matrix = tensor.shape.size() == 2;
  const std::int64_t columns = is_matrix ? tensor.shape[1] : num_elements(tensor.shape);
  struct Sum {
    double squares = 0, count = 0;
    [[nodiscard]] double rms() const { return count > 0 ? std::sqrt(squares / count) : 0.0; }
  };
  Sum all;
  std::vector<Sum> of_row(static_cast<std::size_t>(num_elements(tensor.shape) / columns)),
      of_column(static_cast<std::size_t>(columns));
  const auto row = [&](std::size_t i) -> Sum& { return of_row[i * static_cast<std::size_t>(tensor.stride) / of_column.size()]; };
  const auto column = [&](std::size_t i) -> Sum& {
    return of_column[i * static_cast<std::size_t>(tensor.stride) % of_column.size()];
  };
  for (std::size_t i = 0; i < gradient.size(); ++i) {
    for (Sum* sum : {&all, &row(i), &column(i)}) {
      sum->squares += gradient[i] * gradient[i];
      sum->count += 1;
    }
  }
  std::vector<double> shape(gradient.size());
  for (std::size_t i = 0; i < gradient.size(); ++i) {
    shape[i] = is_matrix ? ratio(row(i).rms() * column(i).rms(), all.rms()) : row(i).rms();
  }
  return shape;
}

// What an error does to updates: over the elements that a set stores.
struct Updates {
  double norm = 0;     // |du|
  double largest = 0;  // of one element
  double loss = 0;     // |sqrt(v) du|
};

double second_moment_bias(const GoldenSet& set) { return 1 - std::pow(set.optimizer.beta2, static_cast<double>(set.steps)); }

Updates first_updates(const GoldenSet& set, const std::string& name, double error) {
  const GoldenTensor& gradient = set.gradients_step0.tensors.at(name);
  const GoldenTensor& second = set.second_moments_last.tensors.at(name);
  const double clip = set.clip_coefficients.front();
  const std::vector<double> shape = error_shape(gradient, gradient.values);
  const auto update = [&](double g) { return g / (std::abs(g) + set.optimizer.epsilon); };
  Updates updates;
  for_each_compared(set, name, gradient, [&](std::size_t i) {
    const double g = clip * gradient.values[i];
    const double d = clip * error * shape[i];
    const double most = std::max(std::abs(update(g + d) - update(g)), std::abs(update(g - d) - update(g)));
    updates.norm += most * most;
    updates.largest = std::max(updates.largest, most);
    // The batches to come have a gradient there, however small that of the first was.
    updates.loss += most * most * std::max(0.0, second.values[i]) / second_moment_bias(set);
  });
  updates.loss = std::sqrt(updates.loss);
  updates.norm = std::sqrt(updates.norm);
  return updates;
}

// sqrt(persistent n^2 + (1 - persistent) sum of c_j^2) for n = 0 .. steps.
std::vector<double> summed_errors(const GoldenSet& set, double persistent) {
  const double b1 = set.optimizer.beta1;
  std::vector<double> roots = {0.0};
  std::vector<double> c;
  for (std::int64_t n = 1; n <= set.steps; ++n) {
    c.push_back(0);
    double squares = 0;
    for (std::size_t j = 0; j < c.size(); ++j) {
      const auto age = static_cast<double>(c.size() - 1 - j);
      c[j] += (1 - b1) * std::pow(b1, age) / (1 - std::pow(b1, static_cast<double>(n)));
      squares += c[j] * c[j];
    }
    const auto count = static_cast<double>(n);
    roots.push_back(std::sqrt(persistent * count * count + (1 - persistent) * squares));
  }
  return roots;
}

// The gradient of one tensor over the whole run, by its moments.
class TensorRun {
 public:
  TensorRun(const GoldenSet& set, const std::string& name) : set_(set), name_(name) {
    const GoldenTensor& first = set.first_moments_last.tensors.at(name);
    const GoldenTensor& second = set.second_moments_last.tensors.at(name);
    const auto steps = static_cast<double>(set.steps);
    const double first_bias = 1 - std::pow(set.optimizer.beta1, steps);
    const double second_bias = second_moment_bias(set);
    std::vector<double> sizes;
    for (const double v : second.values) sizes.push_back(std::sqrt(std::max(0.0, v) / second_bias));
    const std::vector<double> shape = error_shape(second, sizes);
    double sum = 0;
    for_each_compared(set, name, second, [&](std::size_t i) {
      elements_.push_back({sizes[i], ratio(std::abs(first.values[i]) / first_bias, sizes[i]), shape[i]});
      sum += sizes[i] * sizes[i];
    });
    norm_ = std::sqrt(sum);
    stride_ = static_cast<double>(second.stride);
    parameter_norm_ = norm_of(set, name, set.parameters_last.tensors.at(name));
  }

  // What n updates with gradients wrong by `error` have changed; `root` is summed_errors()[n].
  void move(double error, double root, std::int64_t updates) {
    error_ = error;
    if (updates == 0) return;
    const Updates later = later_updates(error);
    const Updates first = first_updates(set_, name_, error);
    const double rate = set_.optimizer.learning_rate;
    moved_ = rate * (first.norm + root * later.norm);
    largest_ = rate * std::min(first.largest + root * later.largest, 2.0 * static_cast<double>(updates));
    loss_ = rate * std::sqrt(stride_) * (first.loss + root * later.loss);
  }
  void accumulate(double weight_in_m) { first_moment_ += weight_in_m * error_ * norm_; }

  [[nodiscard]] double moved_squared() const { return stride_ * moved_ * moved_; }
  [[nodiscard]] double parameters_squared() const { return stride_ * parameter_norm_ * parameter_norm_; }
  [[nodiscard]] double loss() const { return loss_; }
  [[nodiscard]] double parameters() const { return ratio(moved_, parameter_norm_); }
  [[nodiscard]] double largest() const { return ratio(largest_, set_.parameters_last.tensors.at(name_).summary.max_abs); }
  [[nodiscard]] double first_moment() const {
    return ratio(first_moment_, norm_of(set_, name_, set_.first_moments_last.tensors.at(name_)));
  }
  [[nodiscard]] double second_moment() const {
    double spread = 0;
    double whole = 0;
    for (const Element& element : elements_) {
      const double d = error_ * element.shape;
      const double change = 2 * element.size * d + d * d;
      spread += change * change;
      whole += element.size * element.size * element.size * element.size;
    }
    // Large elements may as well be wrong by as much, relative to their size, as small ones.
    return std::max(ratio(std::sqrt(spread), std::sqrt(whole)), 2 * error_ + error_ * error_);
  }

 private:
  [[nodiscard]] Updates later_updates(double error) const {
    Updates updates;
    for (const Element& element : elements_) {
      const double d = error * element.shape;
      const double du = d > 0 ? std::min(2.0, (1 + element.update) * d / element.size) : 0.0;
      updates.norm += du * du;
      updates.largest = std::max(updates.largest, du);
      updates.loss += du * element.size * du * element.size;
    }
    updates.norm = std::sqrt(updates.norm);
    updates.loss = std::sqrt(updates.loss);
    return updates;
  }

  const GoldenSet& set_;
  std::string name_;
  struct Element {
    double size, update, shape;  // sqrt(v), |m| / sqrt(v), its part of an error
  };
  std::vector<Element> elements_;
  double norm_ = 0, stride_ = 1, parameter_norm_ = 0;
  double moved_ = 0, largest_ = 0, loss_ = 0, first_moment_ = 0, error_ = 0;
};

// 2 (4 L + 2) rho^2 over all matrices.
double error_of_moved_weights(const GoldenSet& set, const std::map<std::string, TensorRun>& tensors) {
  double moved = 0;
  double whole = 0;
  for (const ParameterSpec& spec : gpt_parameters(set.model)) {
    if (!spec.decays()) continue;
    moved += tensors.at(spec.name).moved_squared();
    whole += tensors.at(spec.name).parameters_squared();
  }
  return 2 * (4 * set.model.layers + 2) * ratio(moved, whole);
}

}  // namespace

double first_update_movement(const GoldenSet& set, const std::string& name, double error) {
  const double norm = norm_of(set, name, set.parameters_step1.tensors.at(name));
  return set.optimizer.learning_rate * ratio(first_updates(set, name, error).norm, norm);
}

GoldenMovement golden_movement(const GoldenSet& set, const GradientErrors& errors, double persistent) {
  std::map<std::string, TensorRun> tensors;
  double largest_error = 0;
  for (const auto& [name, error] : errors) {
    tensors.emplace(name, TensorRun(set, name));
    largest_error = std::max(largest_error, error);
  }
  const std::vector<double> roots = summed_errors(set, persistent);
  GoldenMovement movement;
  double grown = 0;  // error^2 that moved weights have added
  for (std::int64_t updates = 0; updates <= set.steps; ++updates) {
    const auto n = static_cast<std::size_t>(updates);
    double loss = 0;
    for (auto& [name, tensor] : tensors) {
      const double error = errors.at(name);
      tensor.move(std::sqrt(error * error + grown), roots[n], updates);
      loss += tensor.loss() * tensor.loss();
    }
    if (updates == set.steps) break;
    movement.loss.push_back(std::sqrt(loss) / set.clip_coefficients[n] / set.losses[n]);
    grown = error_of_moved_weights(set, tensors);
    movement.growth.push_back(largest_error > 0 ? std::sqrt(1 + grown / (largest_error * largest_error)) : 1.0);
    const auto age = static_cast<double>(set.steps - 1 - updates);
    for (auto& [name, tensor] : tensors) tensor.accumulate((1 - set.optimizer.beta1) * std::pow(set.optimizer.beta1, age));
  }
  for (const auto& [name, tensor] : tensors) {
    const double error = errors.at(name);
    const double rate = set.optimizer.learning_rate;
    const GoldenTensor& step1 = set.parameters_step1.tensors.at(name);
    movement.parameters_step1[name] = first_update_movement(set, name, error);
    movement.parameters_last[name] = tensor.parameters();
    const auto missed = [&](const GoldenTensor& of) {
      return of.stride > 1 ? ratio(2 * rate * std::sqrt(static_cast<double>(of.stride)), of.summary.l2_norm) : 0.0;
    };
    movement.summary_step1[name] = std::max(std::hypot(movement.parameters_step1[name], missed(step1)),
                                            rate * ratio(first_updates(set, name, error).largest, step1.summary.max_abs));
    movement.summary_last[name] =
        std::max(std::hypot(tensor.parameters(), missed(set.parameters_last.tensors.at(name))), tensor.largest());
    movement.first_moments[name] = tensor.first_moment();
    movement.second_moments[name] = tensor.second_moment();
  }
  return movement;
}

}  // namespace tandem
