// SPDX-License-Identifier: Apache-2.0
#include "optimized/scaling/layer_cost.h"

#include <algorithm>
#include <cmath>

namespace tandem {
namespace {

constexpr double kHalf = 2;  // bytes of an element of activations

}  // namespace

double update_bytes_of_parameter(const std::string& optimizer, double gradient_bytes) {
  return 2 * gradient_bytes + (optimizer == "adam_bf16" ? 8 + 8 : 24) + 2;
}

PassSeconds& PassSeconds::operator+=(const PassSeconds& other) {
  compute += other.compute;
  recompute += other.recompute;
  tensor += other.tensor;
  context += other.context;
  expert += other.expert;
  data += other.data;
  hidden += other.hidden;
  return *this;
}

PassSeconds PassSeconds::times(double count) const {
  return {compute * count, recompute * count, tensor * count, context * count, expert * count, data * count, hidden * count};
}

PassTriple& PassTriple::operator+=(const PassTriple& other) {
  forward += other.forward;
  backward_input += other.backward_input;
  backward_weight += other.backward_weight;
  return *this;
}

PassTriple PassTriple::times(double count) const {
  return {forward.times(count), backward_input.times(count), backward_weight.times(count)};
}

LayerCost::LayerCost(const Workload& workload, const CostModel& costs, bool contention_ignored)
    : workload_(workload),
      costs_(costs),
      model_(workload.model),
      rows_(static_cast<double>(workload.plan.batch.rows) / workload.plan.parallel.data / workload.plan.batch.micro_batches),
      sequence_(static_cast<double>(workload.tokens_per_row()) / workload.plan.parallel.context),
      tokens_(rows_ * sequence_),
      tensor_(workload.plan.parallel.tensor),
      width_(static_cast<double>(model_.hidden)),
      key_value_width_(static_cast<double>(model_.key_value_heads() * model_.head_size())),
      mlp_width_(static_cast<double>(model_.mlp_width())),
      gradient_bytes_(workload.plan.gradients == "stored" ? 2 : 4),
      product_dtype_(workload.software.product_dtype.empty() ? workload.plan.precision : workload.software.product_dtype),
      dtype_(workload.plan.precision),
      tensor_group_(placement(workload.plan, GroupAxis::tensor, costs.cluster())),
      context_group_(placement(workload.plan, GroupAxis::context, costs.cluster())),
      gradient_group_(placement(workload.plan, GroupAxis::gradient, costs.cluster())),
      expert_group_(placement(workload.plan, GroupAxis::expert, costs.cluster())) {
  for (GroupPlacement* group : {&tensor_group_, &context_group_, &gradient_group_, &expert_group_}) {
    group->alone = contention_ignored;
  }
  products_ = {{width_, (width_ + 2 * key_value_width_) / tensor_}, {width_ / tensor_, width_}};
  if (model_.experts == 0) {
    products_.push_back({width_, (model_.gated ? 2 : 1) * mlp_width_ / tensor_});
    products_.push_back({mlp_width_ / tensor_, width_});
  } else {
    products_.push_back({width_, static_cast<double>(model_.experts)});
  }
  for (const Product& product : products_) layer_parameters_ += product.inner * product.outer;
  const double experts_here = model_.experts > 0 ? static_cast<double>(model_.experts) / workload.plan.parallel.expert : 0;
  layer_parameters_ += experts_here * (model_.gated ? 3 : 2) * width_ * mlp_width_ / tensor_;
}

double LayerCost::vocabulary_part() const noexcept {
  return std::ceil(static_cast<double>(model_.vocabulary) / (128 * tensor_)) * 128;
}

double LayerCost::embedding_parameters() const noexcept {
  return width_ * (vocabulary_part() + (model_.learned_positions ? static_cast<double>(workload_.tokens_per_row()) : 0));
}

double LayerCost::head_parameters() const noexcept { return width_ * vocabulary_part(); }

double LayerCost::boundary_bytes() const noexcept {
  const bool cut = workload_.plan.sequence_parallel || workload_.software.scatter_gather_pipeline;
  return tokens_ * width_ * kHalf / (cut ? tensor_ : 1);
}

LayerCost::Work LayerCost::product(double m, double n, double k) const {
  return {costs_.matmul_seconds(m, n, k, product_dtype_), 1};
}

LayerCost::Work LayerCost::products(bool input_gradient, bool weight_gradient) const {
  Work work;
  const auto add = [&work](const Work& more, double count = 1) {
    work.seconds += more.seconds * count;
    work.kernels += more.kernels * count;
  };
  const auto one = [&](double tokens, const Product& product, double count) {
    if (!input_gradient && !weight_gradient) add(this->product(tokens, product.outer, product.inner), count);
    if (input_gradient) add(this->product(tokens, product.inner, product.outer), count);
    if (!weight_gradient) return;
    add(this->product(product.inner, product.outer, tokens), count);
    // Sums over micro-batches: read and written by the product itself, or by a pass of their own that also reads the product.
    const double sums = product.inner * product.outer * 2 * gradient_bytes_;
    if (!workload_.software.fused_accumulation && workload_.plan.batch.micro_batches > 1) {
      add({costs_.elementwise_seconds(sums + 2 * product.inner * product.outer), 1}, count);
    }
  };
  for (const Product& product : products_) one(tokens_, product, 1);
  if (model_.experts > 0) {
    const double here = static_cast<double>(model_.experts) / workload_.plan.parallel.expert;
    const double each = tokens_ * model_.expert_choices * workload_.plan.parallel.expert / model_.experts;
    one(each, {width_, (model_.gated ? 2 : 1) * mlp_width_ / tensor_}, here);
    one(each, {mlp_width_ / tensor_, width_}, here);
  }
  return work;
}

LayerCost::Work LayerCost::attention(bool backward) const {
  const bool fused = workload_.software.fused_attention;
  const double heads = static_cast<double>(model_.heads) / tensor_;
  const double keys = static_cast<double>(workload_.tokens_per_row());
  const auto head = static_cast<double>(model_.head_size());
  Work work{costs_.attention_seconds(rows_, heads, sequence_, keys, head, backward, fused, dtype_), fused ? 1.0 : 2.0};
  if (fused && !workload_.software.tuned_attention) work.seconds /= costs_.constants().ported_attention_efficiency;
  // Rotary positions read and write queries and keys.
  const double rotated = model_.learned_positions ? 0 : tokens_ * (width_ + key_value_width_) / tensor_;
  if (rotated > 0)
    work.seconds += costs_.elementwise_seconds(rotated * 2 * kHalf * (workload_.software.fused_elementwise ? 1 : 3));
  if (!fused) {
    work.seconds += costs_.score_passes_seconds(rows_ * heads * sequence_ * keys, backward, workload_.software.fused_elementwise);
    // Heads are brought together and apart again by copies.
    work.seconds += costs_.elementwise_seconds(8 * tokens_ * width_ / tensor_ * kHalf);
    work.kernels += workload_.software.fused_elementwise ? 6 : 9;
  }
  work.kernels += rotated > 0 ? 2 : 1;
  return work;
}

LayerCost::Work LayerCost::norms(bool backward) const {
  const double elements = tokens_ * width_ / (workload_.plan.sequence_parallel ? tensor_ : 1);
  // Forward reads and writes; backward reads input and gradient twice, once for the weights' gradient, and writes.
  const double passes = backward ? 5 : 2;
  const double wide = workload_.software.fused_elementwise ? 1 : 2;
  return {2 * costs_.elementwise_seconds(elements * passes * wide * kHalf), 2 * (backward ? 2.0 : 1.0)};
}

LayerCost::Work LayerCost::activation(bool backward) const {
  const double choices = model_.experts > 0 ? model_.expert_choices : 1;
  const double elements = tokens_ * mlp_width_ / tensor_ * choices;
  double passes = model_.gated ? (backward ? 5 : 3) : (backward ? 3 : 2);
  double kernels = 1;
  if (!workload_.software.fused_elementwise) {
    passes += 2;  // bias or product apart
    kernels += 1;
  }
  return {costs_.elementwise_seconds(elements * passes * kHalf), kernels};
}

LayerCost::Work LayerCost::residuals(bool backward) const {
  const double elements = tokens_ * width_ / (workload_.plan.sequence_parallel ? tensor_ : 1);
  // Bias, dropout and residual in one pass read two and write one; apart they are 4.5 more. Backward: the mask and the sum.
  double passes = 3;
  double kernels = backward ? 2 : 1;
  if (!workload_.software.fused_elementwise) {
    passes += model_.biases ? 4.5 : 0;
    kernels += model_.biases ? 2 : 0;
  }
  return {2 * costs_.elementwise_seconds(elements * passes * kHalf), 2 * kernels};
}

LayerCost::Work LayerCost::casts(bool backward) const {
  if (product_dtype_ == dtype_) return {};
  // Each operand is read, scaled and written in few bits, as it is and transposed; backward the gradients of the outputs.
  Work work;
  for (const Product& product : products_) {
    const double elements = tokens_ * (backward ? product.outer : product.inner);
    work.seconds += costs_.elementwise_seconds(elements * 4);
    // Matrices are cast for each micro-batch forward.
    if (!backward) work.seconds += costs_.elementwise_seconds(product.inner * product.outer * 4);
    work.kernels += backward ? 1 : 2;
  }
  return work;
}

double LayerCost::floor_of_host(const Work& work, double communication) const {
  if (workload_.software.cuda_graphs) return work.seconds;
  // The host launches the two sums over the tensor ranks too; while these go on it gets ahead again.
  const double kernels = work.kernels + (communication > 0 ? 2 : 0);
  return std::max(work.seconds, kernels * costs_.constants().host_kernel_seconds - communication);
}

void LayerCost::overlap(double communication, double computing, double& exposed, double& hidden, double share) const {
  const double behind = share * std::min(communication, computing);
  const double lost = behind * costs_.constants().overlap_interference;
  exposed += communication - behind + lost;
  hidden += behind - lost;
}

PassSeconds LayerCost::communicate(const Work& products, const Work& attention, bool backward) const {
  PassSeconds pass;
  const double activations = tokens_ * width_ * kHalf;
  // Two sums over the tensor ranks, which sequence parallelism splits into a scatter and a gather.
  double tensor = 0;
  if (workload_.plan.sequence_parallel) {
    tensor = 2 * (costs_.collective_seconds(Collective::all_gather, activations, tensor_group_) +
                  costs_.collective_seconds(Collective::reduce_scatter, activations, tensor_group_));
  } else {
    tensor = 2 * costs_.collective_seconds(Collective::all_reduce, activations, tensor_group_);
  }
  const double share = workload_.software.overlap_tensor ? costs_.constants().tensor_overlap_efficiency : 0;
  overlap(tensor, products.seconds, pass.tensor, pass.hidden, share);
  if (context_group_.size > 1) {
    // Keys and values go around the ring, and with them backward their gradients, while attention works on those at hand.
    const double bytes = 2 * tokens_ * key_value_width_ / tensor_ * kHalf * (backward ? 2 : 1);
    const double around = (context_group_.size - 1) * costs_.collective_seconds(Collective::ring_shift, bytes, context_group_);
    const double other = attention.seconds * (context_group_.size - 1) / context_group_.size;
    overlap(around, other, pass.context, pass.hidden);
  }
  if (model_.experts > 0) {
    const double bytes = activations * model_.expert_choices;
    pass.expert += 2 * costs_.collective_seconds(Collective::all_to_all, bytes, expert_group_);
  }
  return pass;
}

void LayerCost::wait_for_parameters(PassSeconds& pass, double parameters, bool gradients, bool gather) const {
  const int stage = workload_.plan.zero_stage;
  double seconds = 0;
  const double bytes = workload_.software.gather_products && product_dtype_ != dtype_ ? 1 : 2;
  if (gather && stage == 3) seconds += costs_.collective_seconds(Collective::all_gather, parameters * bytes, gradient_group_);
  if (gradients && stage >= 2 && workload_.software.scatter_each_micro_batch) {
    seconds += costs_.collective_seconds(Collective::reduce_scatter, parameters * gradient_bytes_, gradient_group_);
  }
  if (seconds == 0) return;
  const bool behind = gradients ? workload_.software.overlap_gradients : workload_.software.overlap_parameters;
  overlap(seconds, pass.total(), pass.data, pass.hidden, behind ? 1 : 0);
}

LayerCost::Work LayerCost::recomputed_work() const {
  Work work;
  const auto add = [&work](const Work& more, double share = 1) {
    work.seconds += more.seconds * share;
    work.kernels += more.kernels * share;
  };
  const std::string& mode = workload_.plan.recompute.mode;
  const std::string& selective = workload_.software.selective;
  const bool all = mode == "full";
  if (mode == "none") return work;
  if (all || selective == "products") {
    add(products(false, false), all ? 1 : 0.5);
    add(residuals(false));
    add(casts(false), all ? 1 : 0.5);
  }
  if (all || selective != "attention" || !workload_.software.fused_attention) {
    // An attention kernel counts as a product that is kept.
    if (all || selective == "attention") add(attention(false));
    if (selective != "attention" || all) {
      add(norms(false));
      add(activation(false));
    }
  }
  return work;
}

PassTriple LayerCost::layer(bool recomputed) const {
  const auto joined = [](std::initializer_list<Work> parts) {
    Work sum;
    for (const Work& part : parts) {
      sum.seconds += part.seconds;
      sum.kernels += part.kernels;
    }
    return sum;
  };
  PassTriple pass;
  const Work forward_products = products(false, false), forward_attention = attention(false);
  pass.forward = communicate(forward_products, forward_attention, false);
  const Work forward =
      joined({forward_products, forward_attention, norms(false), activation(false), residuals(false), casts(false)});
  pass.forward.compute = floor_of_host(forward, pass.forward.tensor);

  const Work input_products = products(true, false), backward_attention = attention(true), weights = products(false, true);
  pass.backward_input = communicate(input_products, backward_attention, true);
  const Work input = joined({input_products, backward_attention, norms(true), activation(true), residuals(true), casts(true)});
  pass.backward_input.compute = floor_of_host(input, pass.backward_input.tensor);
  pass.backward_weight.compute = floor_of_host(weights);
  if (recomputed) {
    const bool whole = workload_.plan.recompute.mode == "full";
    pass.backward_input.recompute = floor_of_host(recomputed_work(), whole ? pass.forward.tensor : 0);
    if (whole) {
      const PassSeconds again = pass.forward;
      pass.backward_input.tensor += again.tensor;
      pass.backward_input.context += again.context;
      pass.backward_input.expert += again.expert;
      pass.backward_input.hidden += again.hidden;
    }
  }
  wait_for_parameters(pass.forward, layer_parameters_, false, true);
  // Gathered and scattered behind the whole backward pass of the layer; the waiting is counted in its first part.
  PassSeconds both = pass.backward_input;
  both += pass.backward_weight;
  both.data = both.hidden = 0;
  wait_for_parameters(both, layer_parameters_, true, true);
  pass.backward_input.data += both.data;
  pass.backward_input.hidden += both.hidden;
  return pass;
}

PassTriple LayerCost::embedding() const {
  PassTriple pass;
  const double elements = tokens_ * width_;
  pass.forward.compute = floor_of_host({costs_.elementwise_seconds(elements * 3 * kHalf), 4});
  pass.backward_weight.compute =
      floor_of_host({costs_.elementwise_seconds(elements * 4 * kHalf + embedding_parameters() * kHalf), 4});
  const Collective sum = workload_.plan.sequence_parallel ? Collective::reduce_scatter : Collective::all_reduce;
  pass.forward.tensor = costs_.collective_seconds(sum, elements * kHalf, tensor_group_);
  wait_for_parameters(pass.forward, embedding_parameters(), false, true);
  wait_for_parameters(pass.backward_weight, embedding_parameters(), true, false);
  return pass;
}

PassTriple LayerCost::head() const {
  PassTriple pass;
  const double part = vocabulary_part();
  const double logits = tokens_ * part;
  // The head's product is in the plan's precision. The loss works in fp32: logits read, written wide, exponentials, their sum;
  // backward the probabilities become gradients in 16 bits.
  const double loss = logits * (workload_.software.fused_elementwise ? 14 : 24);
  const double norm = tokens_ * width_ * kHalf;
  pass.forward.compute =
      floor_of_host({costs_.matmul_seconds(tokens_, part, width_, dtype_) + costs_.elementwise_seconds(loss), 8}) +
      costs_.elementwise_seconds(2 * norm);
  pass.backward_input.compute =
      floor_of_host({costs_.matmul_seconds(tokens_, width_, part, dtype_) + costs_.elementwise_seconds(logits * 8), 4}) +
      costs_.elementwise_seconds(5 * norm);
  pass.backward_weight.compute = floor_of_host({costs_.matmul_seconds(width_, part, tokens_, dtype_), 1});
  if (workload_.plan.sequence_parallel) {
    const double gather = costs_.collective_seconds(Collective::all_gather, norm, tensor_group_);
    pass.forward.tensor = gather;
    pass.backward_input.tensor = gather + costs_.collective_seconds(Collective::reduce_scatter, norm, tensor_group_);
  } else {
    pass.backward_input.tensor = costs_.collective_seconds(Collective::all_reduce, norm, tensor_group_);
  }
  if (!model_.tied || workload_.plan.parallel.pipeline > 1) {
    wait_for_parameters(pass.forward, head_parameters(), false, true);
    wait_for_parameters(pass.backward_input, head_parameters(), true, false);
  }
  return pass;
}

}  // namespace tandem
