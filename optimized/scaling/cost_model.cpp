// SPDX-License-Identifier: Apache-2.0
#include "optimized/scaling/cost_model.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <utility>

#include <fmt/format.h>

#include "core/error.h"

namespace tandem {
namespace {

struct AxisSpan {
  std::int64_t stride = 1, size = 1;
};

// Distance between neighbours of an axis, and how many there are.
AxisSpan span_of(const TrainingPlan& plan, std::string_view axis) {
  const std::array<std::pair<std::string_view, int>, 4> degrees = {{{"tensor", plan.parallel.tensor},
                                                                    {"context", plan.parallel.context},
                                                                    {"data", plan.parallel.data},
                                                                    {"pipeline", plan.parallel.pipeline}}};
  std::int64_t stride = 1;
  std::string_view order = plan.rank_order;
  while (!order.empty()) {
    const std::size_t end = std::min(order.find('-'), order.size());
    const std::string_view name = order.substr(0, end);
    order.remove_prefix(std::min(end + 1, order.size()));
    for (const auto& [known, degree] : degrees) {
      if (known != name) continue;
      if (name == axis) return {stride, degree};
      stride *= degree;
    }
  }
  throw InputError(fmt::format("rank_order '{}' does not name the axis '{}'", plan.rank_order, axis));
}

std::vector<AxisSpan> spans_of(const TrainingPlan& plan, GroupAxis axis) {
  const AxisSpan data = span_of(plan, "data");
  const std::int64_t expert = plan.parallel.expert;
  switch (axis) {
    case GroupAxis::data: return {data};
    case GroupAxis::tensor: return {span_of(plan, "tensor")};
    case GroupAxis::pipeline: return {span_of(plan, "pipeline")};
    case GroupAxis::context: return {span_of(plan, "context")};
    case GroupAxis::expert: return {{data.stride, expert}};
    case GroupAxis::gradient: return {data, span_of(plan, "context")};
    case GroupAxis::expert_gradient: return {{data.stride * expert, data.size / expert}, span_of(plan, "context")};
    case GroupAxis::model: return {span_of(plan, "tensor"), span_of(plan, "pipeline"), {data.stride, expert}};
    case GroupAxis::embedding: {
      const AxisSpan pipeline = span_of(plan, "pipeline");
      return {{pipeline.stride * std::max<std::int64_t>(pipeline.size - 1, 1), std::min<std::int64_t>(pipeline.size, 2)}};
    }
    case GroupAxis::world: return {{1, plan.parallel.world_size()}};
  }
  return {};
}

// Of a product that is cut into tiles of this shape: how much of the large-product rate a tile's own loop reaches.
struct Tile {
  double rows, columns, share;
};
constexpr std::array<Tile, 5> kTiles = {{{256, 128, 1.0}, {128, 256, 1.0}, {128, 128, 0.95}, {128, 64, 0.80}, {64, 64, 0.65}}};

double bytes_of(std::string_view dtype) {
  if (dtype == "fp64") return 8;
  if (dtype == "fp32" || dtype == "tf32") return 4;
  if (dtype.starts_with("fp8") || dtype == "mxfp8") return 1;
  return dtype == "nvfp4" ? 0.5 : 2;
}

}  // namespace

GroupPlacement placement(const TrainingPlan& plan, GroupAxis axis, const ClusterSpec& cluster) {
  std::vector<AxisSpan> spans = spans_of(plan, axis);
  std::sort(spans.begin(), spans.end(), [](const AxisSpan& a, const AxisSpan& b) { return a.stride < b.stride; });
  GroupPlacement group;
  std::int64_t size = 1;
  for (const AxisSpan& span : spans) size *= span.size;
  group.size = static_cast<int>(size);
  const std::int64_t world = plan.parallel.world_size();
  for (const NetworkLevel& level : cluster.levels) {
    const std::int64_t devices = level.devices > 0 ? std::min<std::int64_t>(level.devices, world) : world;
    std::int64_t inside = 1;
    // As an island has that the group's first member lies in: ranks 0 and 6 of eight are neighbours though 6 does not divide it.
    for (const AxisSpan& span : spans)
      inside *= std::clamp<std::int64_t>((devices + span.stride - 1) / span.stride, 1, span.size);
    group.ranks_in_island.push_back(static_cast<int>(inside));
    group.groups_in_island.push_back(static_cast<int>(std::max<std::int64_t>(devices / inside, 1)));
  }
  if (!group.ranks_in_island.empty()) group.ranks_in_island.back() = group.size;
  return group;
}

CostModel::CostModel(const ClusterSpec& cluster) : cluster_(&cluster) {
  const auto& given = cluster.device.constants;
  const auto take = [&given](const std::string& name, double& value) {
    const auto found = given.find(name);
    if (found != given.end()) value = found->second;
  };
  take("multiprocessors", constants_.multiprocessors);
  take("tile_scale", constants_.tile_scale);
  take("memory_efficiency", constants_.memory_efficiency);
  take("kernel_seconds", constants_.kernel_seconds);
  take("host_kernel_seconds", constants_.host_kernel_seconds);
  take("attention_forward_efficiency", constants_.attention_forward_efficiency);
  take("attention_backward_efficiency", constants_.attention_backward_efficiency);
  take("ported_attention_efficiency", constants_.ported_attention_efficiency);
  take("misaligned_efficiency", constants_.misaligned_efficiency);
  take("overlap_interference", constants_.overlap_interference);
  take("tensor_overlap_efficiency", constants_.tensor_overlap_efficiency);
  for (const auto& [dtype, flops] : cluster.device.peak_flops) {
    OperandRate rate{dtype, flops, bytes_of(dtype)};
    take("matmul_efficiency." + dtype, rate.efficiency);
    take("matmul_half_depth." + dtype, rate.half_depth);
    rates_.push_back(rate);
  }
}

const CostModel::OperandRate& CostModel::rate(std::string_view dtype) const {
  for (const OperandRate& rate : rates_) {
    if (rate.dtype == dtype) return rate;
  }
  throw InputError(
      fmt::format("cluster {}: device {} states no peak_flops for {}", cluster_->name, cluster_->device.name, dtype));
}

double CostModel::peak_flops(std::string_view dtype) const { return rate(dtype).flops; }

double CostModel::share_of_peak(double count, double m, double n, double k, const OperandRate& rate) const {
  double best = 0;
  for (const Tile& tile : kTiles) {
    const double tile_rows = tile.rows * constants_.tile_scale, tile_columns = tile.columns * constants_.tile_scale;
    const double rows = std::ceil(m / tile_rows), columns = std::ceil(n / tile_columns);
    const double tiles = count * rows * columns;
    const double waves = std::ceil(tiles / constants_.multiprocessors);
    const double filled = m * n / (rows * tile_rows * columns * tile_columns);
    best = std::max(best, tile.share * filled * tiles / (waves * constants_.multiprocessors));
  }
  double share = rate.efficiency * best * k / (k + rate.half_depth);
  const auto misaligned = [](double size) { return std::fmod(size, 8) != 0; };
  if (misaligned(n) || misaligned(k)) share *= constants_.misaligned_efficiency;
  return share;
}

double CostModel::matmul_seconds(double m, double n, double k, std::string_view dtype) const {
  return batched_matmul_seconds(1, m, n, k, dtype);
}

double CostModel::batched_matmul_seconds(double count, double m, double n, double k, std::string_view dtype) const {
  if (m * n * k * count <= 0) return 0;
  const OperandRate& operands = rate(dtype);
  const double computing = 2 * count * m * n * k / (operands.flops * share_of_peak(count, m, n, k, operands));
  const double bytes = count * (operands.bytes * (m * k + k * n) + std::max(2.0, operands.bytes) * m * n);
  const double moving = bytes / (cluster_->device.memory_bytes_per_second * constants_.memory_efficiency);
  return std::max(computing, moving) + constants_.kernel_seconds;
}

double CostModel::elementwise_seconds(double bytes) const {
  if (bytes <= 0) return 0;
  return bytes / (cluster_->device.memory_bytes_per_second * constants_.memory_efficiency) + constants_.kernel_seconds;
}

double CostModel::attention_seconds(double rows, double heads, double queries, double keys, double head_size, bool backward,
                                    bool fused, std::string_view dtype) const {
  const double count = rows * heads;
  if (!fused) {
    const double scores = batched_matmul_seconds(count, queries, keys, head_size, dtype);
    const double values = batched_matmul_seconds(count, queries, head_size, keys, dtype);
    return backward ? 2 * (scores + values) : scores + values;
  }
  const double flops = (backward ? 5 : 2) * 2 * count * queries * keys * head_size / 2;
  const double share = backward ? constants_.attention_backward_efficiency : constants_.attention_forward_efficiency;
  return flops / (rate(dtype).flops * share) + constants_.kernel_seconds;
}

double CostModel::score_passes_seconds(double scores, bool backward, bool fused_elementwise) const {
  // Forward: softmax with scale and mask reads and writes 2 bytes, dropout as well and a byte of mask. Backward: dropout, then
  // softmax, which reads gradient and probabilities. Unfused, scale, mask and the casts around an fp32 softmax are passes too.
  const double bytes = backward ? (fused_elementwise ? 11 : 27) : (fused_elementwise ? 9 : 25);
  return elementwise_seconds(scores * bytes) + (fused_elementwise ? 1 : 4) * constants_.kernel_seconds;
}

double CostModel::collective_seconds(Collective collective, double bytes, const GroupPlacement& group) const {
  const double ranks = group.size;
  if (group.size <= 1 || bytes <= 0) return 0;
  const auto& levels = cluster_->levels;
  double bandwidth = std::numeric_limits<double>::infinity();
  double ring_latency = 0;  // once around
  double tree_latency = 0;  // up or down
  double tree_part = 0;     // one direction's bytes through the level that is slowest for the tree
  double below = 1;         // ranks of the group in an island of the level below
  int crossed = 0;
  for (std::size_t i = 0; i < levels.size(); ++i) {
    const double inside = group.ranks_in_island[i];
    if (inside <= below) continue;
    ++crossed;
    // The devices of an island share its links to the others, so a group has as many devices' shares as it has ranks there.
    const double others = group.alone && i > 0 ? group.groups_in_island[i - 1] : 1;
    const double links = levels[i].bytes_per_second * levels[i].efficiency / levels[i].oversubscription * below * others;
    bandwidth = std::min(bandwidth, links);
    const double islands = inside / below;
    // Of two islands each sends half to the other; of many each sends nearly all up and down.
    tree_part = std::max(tree_part, bytes / links * (crossed == 1 ? 1 : (islands - 1) / islands));
    ring_latency += (ranks / inside) * (islands - 1) * levels[i].latency_seconds;
    tree_latency += (crossed == 1 ? islands - 1 : std::ceil(std::log2(islands))) * levels[i].latency_seconds;
    below = inside;
  }
  const double part = (ranks - 1) / ranks * bytes / bandwidth;
  switch (collective) {
    case Collective::all_reduce: {
      const double ring = 2 * (ring_latency + part);
      return crossed > 1 ? std::min(ring, 2 * (tree_latency + tree_part)) : ring;
    }
    case Collective::broadcast: return std::min(ring_latency, tree_latency) + part;
    case Collective::ring_shift:
    case Collective::send:
    case Collective::recv: return ring_latency / (ranks - 1) + bytes / bandwidth;
    case Collective::reduce_scatter:
    case Collective::all_gather:
    case Collective::all_to_all: return ring_latency + part;
  }
  return 0;
}

double CostModel::message_seconds(double bytes, int level) const {
  if (bytes <= 0) return 0;
  const NetworkLevel& link = cluster_->levels[static_cast<std::size_t>(level)];
  return link.latency_seconds + bytes / (link.bytes_per_second * link.efficiency / link.oversubscription);
}

int CostModel::level_between(std::int64_t rank, std::int64_t other) const {
  for (std::size_t i = 0; i < cluster_->levels.size(); ++i) {
    const std::int64_t devices = cluster_->levels[i].devices;
    if (devices == 0 || rank / devices == other / devices) return static_cast<int>(i);
  }
  return static_cast<int>(cluster_->levels.size()) - 1;
}

}  // namespace tandem
