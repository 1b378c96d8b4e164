// SPDX-License-Identifier: Apache-2.0
// The simulated ranks of reference/zero.h.
#include <algorithm>
#include <cmath>
#include <map>
#include <utility>

#include <fmt/format.h>

#include "core/error.h"
#include "reference/zero_ranks.h"

namespace tandem::reference {
namespace {

/// One step of all ranks.
template <class Real>
class ZeroRun {
 public:
  ZeroRun(const GptConfig& model, const Batch& batch, const ZeroLayout& layout, const std::optional<DropoutStep>& dropout,
          ZeroState<Real>& state)
      : model_(model),
        batch_(batch),
        layout_(layout),
        state_(state),
        ranks_(layout.stage, state),
        routing_(state.ranks.size()),
        losses_(state.ranks.size(), 0.0) {
    Pass<Real> pass;
    pass.valid_tokens = batch.valid_tokens();
    pass.global_rows = batch.rows;
    pass.dropout = dropout;
    passes_.assign(state.ranks.size(), pass);
    for (std::size_t r = 0; r < passes_.size(); ++r) passes_[r].routing = &routing_[r];
    for (std::size_t u = 0; u < state.units.size(); ++u) unit_index_[state.units[u].name] = u;
  }

  ZeroStep<Real> run(const OptimizerConfig& optimizer, double learning_rate) {
    if (layout_.stage == 1) {
      gradients_of_the_step();
    } else {
      for (ZeroRank<Real>& rank : state_.ranks) {
        for (std::vector<Real>& part : rank.gradients) std::fill(part.begin(), part.end(), Real{0});
      }
      for (int i = 0; i < layout_.data.micro_batches; ++i) micro_batch(i);
    }
    ZeroStep<Real> step;
    for (const double loss : losses_) step.loss += loss;
    for (const RoutingRecord& routing : routing_) step.routing.add(routing);
    step.gradients = joined(state_, &ZeroRank<Real>::gradients);
    step.gradient_norm = norm();
    step.clip_coefficient = clip_coefficient(step.gradient_norm, optimizer.max_grad_norm);
    update(optimizer, learning_rate, step.clip_coefficient);
    step.peak_bytes = ranks_.peak_bytes();
    for (int r = 0; r < ranks_.ranks(); ++r) step.held_bytes.push_back(ranks_.bytes(r));
    step.gradient_wire_bytes = ranks_.gradient_wire_bytes();
    step.parameter_wire_bytes = ranks_.parameter_wire_bytes();
    return step;
  }

 private:
  using Now = typename ZeroRanks<Real>::Now;

  /// The units that a layer, or what is named, consists of.
  [[nodiscard]] std::vector<std::size_t> units_of(int layer) const {
    std::vector<std::size_t> found = {unit_index_.at(fmt::format("h.{}", layer))};
    if (model_.experts > 0) found.push_back(unit_index_.at(fmt::format("h.{}.experts", layer)));
    return found;
  }
  [[nodiscard]] std::size_t unit_of(const std::string& name) const { return unit_index_.at(name); }
  [[nodiscard]] std::size_t head_unit() const { return unit_of(model_.tied ? "wte" : "lm_head"); }

  void micro_batch(int index) {
    for (int r = 0; r < ranks_.ranks(); ++r) {
      const Interval rows = micro_batch_rows(batch_.rows, ranks_.ranks(), r, layout_.data.micro_batches, index);
      ranks_.now(r).batch = slice_rows(batch_, rows.begin, rows.size());
      ranks_.now(r).blocks.assign(static_cast<std::size_t>(model_.layers), {});
    }
    forward();
    backward();
  }

  /// Calls work(now, context, rank) for every rank that has rows.
  template <class Work>
  void on_ranks(const Work& work) {
    for (int r = 0; r < ranks_.ranks(); ++r) {
      if (ranks_.now(r).batch.rows == 0) continue;
      const PassContext<Real> context{model_, ranks_.now(r).parameters, ranks_.now(r).batch,
                                      passes_[static_cast<std::size_t>(r)]};
      work(ranks_.now(r), context, static_cast<std::size_t>(r));
    }
  }

  void forward() {
    const std::vector<std::size_t> tables = {unit_of("wte"), unit_of("wpe")};
    ranks_.gather(tables);
    on_ranks([](Now& own, const PassContext<Real>& context, std::size_t) { own.stream = embed(context); });
    ranks_.release(tables);
    for (int layer = 0; layer < model_.layers; ++layer) {
      ranks_.gather(units_of(layer));
      on_ranks([&](Now& own, const PassContext<Real>& context, std::size_t) {
        block_forward(context, layer, own.stream, own.blocks[static_cast<std::size_t>(layer)]);
      });
      ranks_.release(units_of(layer));
    }
    ranks_.gather({unit_of("ln_f"), head_unit()});
    on_ranks([&](Now& own, const PassContext<Real>& context, std::size_t r) {
      own.head = head(context, std::move(own.stream));
      losses_[r] += head_loss(context, own.head);
    });
    ranks_.release({unit_of("ln_f")});
  }

  void backward() {
    ranks_.gather({unit_of("ln_f")});
    ranks_.open({unit_of("ln_f"), head_unit()});
    on_ranks([](Now& own, const PassContext<Real>& context, std::size_t) {
      own.stream = head_loss_backward(context, own.head, own.gradients);
    });
    ranks_.release({unit_of("ln_f"), head_unit()});
    ranks_.reduce({unit_of("ln_f")});
    if (!model_.tied) ranks_.reduce({head_unit()});
    for (int layer = model_.layers - 1; layer >= 0; --layer) {
      ranks_.gather(units_of(layer));
      ranks_.open(units_of(layer));
      on_ranks([&](Now& own, const PassContext<Real>& context, std::size_t) {
        block_backward(context, layer, own.blocks[static_cast<std::size_t>(layer)], own.stream, own.gradients);
      });
      ranks_.release(units_of(layer));
      ranks_.reduce(units_of(layer));
    }
    const std::vector<std::size_t> tables = {unit_of("wte"), unit_of("wpe")};
    ranks_.open(tables);
    on_ranks([](Now& own, const PassContext<Real>& context, std::size_t) {
      embed_backward<Real>(context, own.stream, own.gradients);
    });
    ranks_.reduce(tables);
  }

  /// Stage 1: as without ZeRO up to the reduction, which gives each rank the sum of its own part alone. What else a rank's whole
  /// gradients hold is its own, of no use to anybody.
  void gradients_of_the_step() {
    NamedTensors<Real> parameters;
    for (std::size_t u = 0; u < state_.units.size(); ++u) unpack(ranks_.unit(u), ranks_.rank(0).parameters[u], parameters);
    const auto local = local_gradients<Real>(model_, parameters, batch_, layout_.data, passes_.front().dropout);
    for (int r = 0; r < ranks_.ranks(); ++r) {
      const RankGradients<Real>& own = local[static_cast<std::size_t>(r)];
      losses_[static_cast<std::size_t>(r)] = own.loss;
      routing_[static_cast<std::size_t>(r)] = own.routing;
      for (std::size_t u = 0; u < ranks_.units(); ++u) ranks_.rank(r).gradients[u] = flat(ranks_.unit(u), own.gradients);
    }
    for (std::size_t u = 0; u < ranks_.units(); ++u) ranks_.reduce_kept(u);
  }

  /// Each rank squares what it owns.
  [[nodiscard]] double norm() const {
    double sum = 0.0;
    for (std::size_t u = 0; u < ranks_.units(); ++u) {
      for (int r = 0; r < ranks_.ranks(); ++r) {
        double partial = 0.0;
        for (const Real g : ranks_.own_gradient(u, r)) partial += static_cast<double>(g) * static_cast<double>(g);
        sum += partial;
      }
    }
    return std::sqrt(sum);
  }

  void update(const OptimizerConfig& optimizer, double learning_rate, double coefficient) {
    ++state_.updates;
    for (std::size_t u = 0; u < ranks_.units(); ++u) {
      PerRank<Real> parts;
      for (int r = 0; r < ranks_.ranks(); ++r) parts.push_back(updated_part(optimizer, learning_rate, coefficient, u, r));
      ranks_.store(u, parts);
    }
  }

  /// The own part of a unit after the update, parameter by parameter: each decays or not.
  [[nodiscard]] std::vector<Real> updated_part(const OptimizerConfig& optimizer, double learning_rate, double coefficient,
                                               std::size_t u, int r) {
    const Interval own = ranks_.part(u, r);
    ZeroRank<Real>& holder = ranks_.rank(r);
    std::vector<Real> values = layout_.stage == 3 ? holder.parameters[u] : part_of(holder.parameters[u], own);
    std::vector<Real> gradient = ranks_.own_gradient(u, r);
    for (Real& g : gradient) g *= static_cast<Real>(coefficient);
    std::int64_t begin = 0;  // of the parameter in its unit
    for (const ParameterSpec& parameter : ranks_.unit(u).parameters) {
      const std::int64_t from = std::max(begin, own.begin);
      const std::int64_t to = std::min(begin + parameter.num_elements(), own.end);
      begin += parameter.num_elements();
      if (from >= to) continue;
      const auto piece = [&](std::vector<Real>& of) {
        return std::span(of).subspan(static_cast<std::size_t>(from - own.begin), static_cast<std::size_t>(to - from));
      };
      const UpdateStep step{state_.updates, learning_rate, parameter.decays()};
      if (optimizer.kind == OptimizerKind::adamw) {
        adamw_update<Real>(optimizer, step, piece(values), piece(gradient), piece(holder.m[u]), piece(holder.v[u]));
      } else {
        sgd_update<Real>(optimizer, step, piece(values), piece(gradient));
      }
    }
    return values;
  }

  const GptConfig& model_;
  const Batch& batch_;
  const ZeroLayout& layout_;
  ZeroState<Real>& state_;
  std::map<std::string, std::size_t> unit_index_;
  ZeroRanks<Real> ranks_;
  std::vector<Pass<Real>> passes_;      // [ranks]
  std::vector<RoutingRecord> routing_;  // [ranks]
  std::vector<double> losses_;          // [ranks]
};

}  // namespace

template <class Real>
ZeroState<Real> initial_zero_state(const GptConfig& model, const ZeroLayout& layout, OptimizerKind optimizer,
                                   const NamedTensors<Real>& parameters) {
  TANDEM_CHECK(layout.stage >= 1 && layout.stage <= 3, fmt::format("ZeRO has no stage {} here", layout.stage));
  TANDEM_CHECK(layout.data.ranks > 0 && layout.data.micro_batches > 0, "ZeRO without ranks or micro-batches");
  require_parameters_of(model, parameters);
  ZeroState<Real> state;
  state.units = zero_units(model);
  for (int r = 0; r < layout.data.ranks; ++r) {
    ZeroRank<Real> rank;
    for (const ZeroUnit& unit : state.units) {
      const Interval part = balanced_part(unit.elements, layout.data.ranks, r);
      const std::vector<Real> whole = flat(unit, parameters);
      const std::vector<Real> zeros(static_cast<std::size_t>(part.size()), Real{0});
      rank.parameters.push_back(layout.stage == 3 ? part_of(whole, part) : whole);
      rank.gradients.push_back(layout.stage == 1 ? std::vector<Real>(whole.size(), Real{0}) : zeros);
      if (optimizer != OptimizerKind::adamw) continue;
      rank.m.push_back(zeros);
      rank.v.push_back(zeros);
    }
    state.ranks.push_back(std::move(rank));
  }
  return state;
}

template <class Real>
ZeroStep<Real> zero_step(const GptConfig& model, const OptimizerConfig& optimizer, double learning_rate, const Batch& batch,
                         const ZeroLayout& layout, const std::optional<DropoutStep>& dropout, ZeroState<Real>& state) {
  TANDEM_CHECK(static_cast<int>(state.ranks.size()) == layout.data.ranks,
               fmt::format("a state of {} ranks, the layout has {}", state.ranks.size(), layout.data.ranks));
  validate_tokens(batch, model.vocabulary);
  return ZeroRun<Real>(model, batch, layout, dropout, state).run(optimizer, learning_rate);
}

template <class Real>
NamedTensors<Real> joined_parameters(const ZeroState<Real>& state) {
  return joined(state, &ZeroRank<Real>::parameters);
}

template <class Real>
OptimizerState<Real> joined_optimizer_state(const ZeroState<Real>& state) {
  OptimizerState<Real> joined_state;
  joined_state.updates = state.updates;
  if (state.ranks.front().m.empty()) return joined_state;
  joined_state.m = joined(state, &ZeroRank<Real>::m);
  joined_state.v = joined(state, &ZeroRank<Real>::v);
  return joined_state;
}

template ZeroState<float> initial_zero_state(const GptConfig&, const ZeroLayout&, OptimizerKind, const NamedTensors<float>&);
template ZeroState<double> initial_zero_state(const GptConfig&, const ZeroLayout&, OptimizerKind, const NamedTensors<double>&);
template ZeroStep<float> zero_step(const GptConfig&, const OptimizerConfig&, double, const Batch&, const ZeroLayout&,
                                   const std::optional<DropoutStep>&, ZeroState<float>&);
template ZeroStep<double> zero_step(const GptConfig&, const OptimizerConfig&, double, const Batch&, const ZeroLayout&,
                                    const std::optional<DropoutStep>&, ZeroState<double>&);
template NamedTensors<float> joined_parameters(const ZeroState<float>&);
template NamedTensors<double> joined_parameters(const ZeroState<double>&);
template OptimizerState<float> joined_optimizer_state(const ZeroState<float>&);
template OptimizerState<double> joined_optimizer_state(const ZeroState<double>&);

}  // namespace tandem::reference
