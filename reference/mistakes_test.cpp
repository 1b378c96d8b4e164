// SPDX-License-Identifier: Apache-2.0
// The golden comparison is only worth something if wrong training would not pass it. Each known mistake is made here on purpose:
// it must leave the tolerances, and by about as much as the makers of the sets measured.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <numbers>
#include <string>

#include "core/io/golden_set.h"
#include "reference/block.h"
#include "reference/test_support.h"
#include "reference/training.h"

namespace tandem::reference {
namespace {

enum class Mistake {
  none,
  small_epsilon,
  decay_everything,
  epsilon_inside_root,
  no_clipping,
  clip_without_epsilon,
  mean_of_means
};

/// Largest relative change of the loss, of the norm, and of a parameter tensor after the last step (relative L2).
using Change = std::array<double, 3>;

NamedTensors<double> initial_of(const GoldenSet& set) {
  NamedTensors<double> parameters;
  for (const auto& [name, values] : set.initial_parameters) parameters[name] = {values.begin(), values.end()};
  return parameters;
}

RankGradients<double> gradients_with(Mistake mistake, const GoldenSet& set, const NamedTensors<double>& parameters,
                                     const Batch& batch) {
  const auto micro_batches = static_cast<int>(set.micro_batches);
  if (mistake != Mistake::mean_of_means) {
    return data_parallel_gradients<double>(set.model, parameters, batch, {1, micro_batches}, {});
  }
  RankGradients<double> result{0.0, zero_tensors<double>(set.model)};
  for (int i = 0; i < micro_batches; ++i) {
    const Batch own = slice_rows(batch, i * set.micro_batch_size, set.micro_batch_size);
    result.loss += loss_and_gradients<double>(set.model, parameters, own, {.valid_tokens = own.valid_tokens()}, result.gradients);
  }
  result.loss /= micro_batches;
  scale(result.gradients, 1.0 / micro_batches);
  return result;
}

double coefficient_with(Mistake mistake, double norm, double max_norm) {
  if (mistake == Mistake::no_clipping) return 1.0;
  if (mistake == Mistake::clip_without_epsilon) return std::min(1.0, max_norm / norm);
  return clip_coefficient(norm, max_norm);
}

void update_with_epsilon_inside_root(const OptimizerConfig& config, const UpdateStep& step, std::span<double> p,
                                     std::span<const double> g, std::span<double> m, std::span<double> v) {
  const auto n = static_cast<double>(step.number);
  for (std::size_t i = 0; i < p.size(); ++i) {
    m[i] = config.beta1 * m[i] + (1.0 - config.beta1) * g[i];
    v[i] = config.beta2 * v[i] + (1.0 - config.beta2) * g[i] * g[i];
    if (step.decays) p[i] *= 1.0 - step.learning_rate * config.weight_decay;
    const double root = std::sqrt(v[i] / (1.0 - std::pow(config.beta2, n)) + config.epsilon * config.epsilon);
    p[i] -= step.learning_rate * (m[i] / (1.0 - std::pow(config.beta1, n))) / root;
  }
}

void update_with(Mistake mistake, const GoldenSet& set, const NamedTensors<double>& gradients, NamedTensors<double>& parameters,
                 OptimizerState<double>& state) {
  ++state.updates;
  for (const ParameterSpec& parameter : gpt_parameters(set.model)) {
    const std::string& name = parameter.name;
    const bool decays = mistake == Mistake::decay_everything || parameter.decays();
    const UpdateStep step{state.updates, set.optimizer.learning_rate, decays};
    const auto update = mistake == Mistake::epsilon_inside_root ? update_with_epsilon_inside_root : adamw_update<double>;
    update(set.optimizer, step, tensor(parameters, name), tensor(gradients, name), tensor(state.m, name), tensor(state.v, name));
  }
}

Change change_by(Mistake mistake, GoldenSet set) {
  if (mistake == Mistake::small_epsilon) set.model.layer_norm_epsilon = 1e-6;
  NamedTensors<double> parameters = initial_of(set);
  OptimizerState<double> state = initial_optimizer_state<double>(set.model);
  Change change{};
  for (std::size_t s = 0; s < set.batches.size(); ++s) {
    RankGradients<double> step = gradients_with(mistake, set, parameters, set.batches[s]);
    const double norm = global_norm(step.gradients);
    scale(step.gradients, coefficient_with(mistake, norm, set.optimizer.max_grad_norm));
    update_with(mistake, set, step.gradients, parameters, state);
    change[0] = std::max(change[0], std::abs(step.loss / set.losses[s] - 1.0));
    change[1] = std::max(change[1], std::abs(norm / set.gradient_norms[s] - 1.0));
  }
  for (const auto& [name, expected] : set.parameters_last.tensors) {
    change[2] = std::max(change[2], golden_deviation<double>(expected, name, tensor(std::as_const(parameters), name)));
  }
  return change;
}

struct Recorded {
  std::string set;
  std::string mistake_name;
  Mistake mistake;
  Change change;  ///< as the makers measured it, to one digit
};

class KnownMistake : public testing::TestWithParam<Recorded> {};

TEST_P(KnownMistake, LeavesTheTolerancesByWhatWasMeasured) {
  const Recorded& recorded = GetParam();
  if (!std::filesystem::exists(golden_folder(recorded.set))) {
    GTEST_SKIP() << "no golden set at " << golden_folder(recorded.set).string();
  }

  const Change change = change_by(recorded.mistake, read_golden_set(golden_folder(recorded.set)));

  for (std::size_t i = 0; i < change.size(); ++i) {
    EXPECT_GT(change[i], i == 2 ? 1e-8 : 1e-9) << "would pass in double";
    // One digit, and a maximum over steps: a factor of two either way.
    EXPECT_GT(change[i], recorded.change[i] / 2.0);
    EXPECT_LT(change[i], recorded.change[i] * 2.0);
  }
  EXPECT_TRUE(change[0] > 1e-6 || change[1] > 1e-5 || change[2] > 5e-5 || recorded.set == "tiny") << "would pass in float";
}

INSTANTIATE_TEST_SUITE_P(
    Table, KnownMistake,
    testing::Values(Recorded{"tiny", "small_epsilon", Mistake::small_epsilon, {3e-5, 9e-5, 4e-4}},
                    Recorded{"tiny", "decay_everything", Mistake::decay_everything, {3e-5, 7e-4, 8e-4}},
                    Recorded{"tiny", "epsilon_inside_root", Mistake::epsilon_inside_root, {2e-7, 3e-6, 9e-6}},
                    Recorded{"tiny", "no_clipping", Mistake::no_clipping, {1e-3, 6e-3, 7e-3}},
                    Recorded{"odd", "small_epsilon", Mistake::small_epsilon, {2e-5, 2e-3, 7e-3}},
                    Recorded{"odd", "decay_everything", Mistake::decay_everything, {8e-7, 2e-4, 2e-4}},
                    Recorded{"odd", "epsilon_inside_root", Mistake::epsilon_inside_root, {2e-7, 6e-6, 2e-4}},
                    Recorded{"odd", "no_clipping", Mistake::no_clipping, {3e-4, 7e-3, 8e-3}},
                    Recorded{"varlen", "small_epsilon", Mistake::small_epsilon, {7e-5, 2e-3, 1e-2}},
                    Recorded{"varlen", "decay_everything", Mistake::decay_everything, {1e-4, 1e-3, 2e-3}},
                    Recorded{"varlen", "epsilon_inside_root", Mistake::epsilon_inside_root, {2e-6, 2e-5, 2e-4}},
                    Recorded{"varlen", "no_clipping", Mistake::no_clipping, {7e-4, 6e-3, 3e-2}},
                    Recorded{"varlen", "mean_of_means", Mistake::mean_of_means, {2e-2, 6e-1, 2e-1}}),
    [](const auto& instance) { return instance.param.set + "_" + instance.param.mistake_name; });

TEST(KnownMistake, NoneLeavesNoTrace) {
  const Change change = change_by(Mistake::none, read_golden_set(golden_folder("tiny")));
  EXPECT_LE(*std::max_element(change.begin(), change.end()), 1e-12);
}

TEST(KnownMistake, MeanOfMeansHidesWhereAllMicroBatchesHaveEqualCounts) {
  const Change change = change_by(Mistake::mean_of_means, read_golden_set(golden_folder("tiny")));
  EXPECT_LE(*std::max_element(change.begin(), change.end()), 1e-12) << "a set of fixed lengths cannot show this mistake";
}

TEST(KnownMistake, ClippingWithoutEpsilonShowsInDoubleOnly) {
  const Change change = change_by(Mistake::clip_without_epsilon, read_golden_set(golden_folder("tiny")));
  EXPECT_GT(change[2], 1e-9);
  EXPECT_LT(change[2], 1e-7);
}

/// The loss of a forward pass whose MLPs use `gelu` in place of the right one.
double loss_with_gelu(const GoldenSet& set, const Batch& batch, const std::function<double(double)>& gelu) {
  const NamedTensors<double> parameters = initial_of(set);
  const Pass<double> pass{.valid_tokens = batch.valid_tokens()};
  const PassContext<double> context{set.model, parameters, batch, pass};
  std::vector<double> h(context.count(set.model.hidden));
  embedding_forward<double>(context.parameter("wte.weight"), context.parameter("wpe.weight"), batch.ids, batch.positions, h);
  for (int layer = 0; layer < set.model.layers; ++layer) {
    BlockActivations<double> kept;
    block_forward(context, layer, h, kept);
    std::transform(kept.mlp_in.begin(), kept.mlp_in.end(), kept.mlp_out.begin(), gelu);
    const std::string name = "h." + std::to_string(layer) + ".mlp.c_proj";
    std::vector<double> branch(h.size());
    linear_forward<double>({context.tokens(), set.model.mlp_width(), set.model.hidden}, kept.mlp_out,
                           context.parameter(name + ".weight"), context.parameter(name + ".bias"), branch);
    add<double>(kept.middle, branch, h);
  }
  std::vector<double> scores(context.count(set.model.vocabulary)), log_sum_exp(context.count(1));
  head_forward<double>({context.tokens(), set.model.hidden, set.model.vocabulary}, norm_forward<double>(context, "ln_f", h).out,
                       context.parameter("wte.weight"), scores);
  return cross_entropy_forward<double>(scores, batch.targets, pass.valid_tokens, log_sum_exp);
}

TEST(KnownMistake, GeluByErfChangesTheLossVisibly) {
  const GoldenSet set = read_golden_set(golden_folder("tiny"));
  const auto by_tanh = [](double x) {
    return 0.5 * x * (1.0 + std::tanh(std::sqrt(2.0 / std::numbers::pi) * (x + 0.044715 * x * x * x)));
  };
  const auto by_erf = [](double x) { return 0.5 * x * (1.0 + std::erf(x / std::numbers::sqrt2)); };

  const double right = loss_with_gelu(set, set.batches[0], by_tanh);
  const double wrong = loss_with_gelu(set, set.batches[0], by_erf);

  EXPECT_LE(std::abs(right / set.losses[0] - 1.0), 1e-12);
  EXPECT_GT(std::abs(wrong / set.losses[0] - 1.0), 1e-6);
}

}  // namespace
}  // namespace tandem::reference
