// SPDX-License-Identifier: Apache-2.0
#include <nlohmann/json.hpp>

#include "optimized/probe/probe.h"

namespace tandem {
namespace {

using Json = nlohmann::ordered_json;

Json matrices_json(const ProbeReport& report) {
  Json list = Json::array();
  for (const MatrixSample& sample : report.matrices) {
    list.push_back({{"m", sample.m},
                    {"n", sample.n},
                    {"k", sample.k},
                    {"dtype", sample.dtype},
                    {"seconds", sample.seconds},
                    {"flops_per_second", sample.flops_per_second},
                    {"fitted", sample.fitted},
                    {"predicted_seconds", sample.predicted_seconds}});
  }
  return list;
}

Json links_json(const ProbeReport& report) {
  Json list = Json::array();
  for (const LinkSample& sample : report.links) {
    list.push_back({{"rank", sample.rank},
                    {"peer", sample.peer},
                    {"bytes", sample.bytes},
                    {"seconds", sample.seconds},
                    {"fitted_seconds", sample.fitted_seconds}});
  }
  return list;
}

Json collectives_json(const ProbeReport& report) {
  Json list = Json::array();
  for (const CollectiveSample& sample : report.collectives) {
    list.push_back({{"collective", "all_reduce"},
                    {"level", sample.level},
                    {"ranks", sample.ranks},
                    {"bytes", sample.bytes},
                    {"seconds", sample.seconds},
                    {"predicted_seconds", sample.predicted_seconds}});
  }
  return list;
}

Json storage_json(const ProbeReport& report) {
  Json list = Json::array();
  for (const StorageSample& sample : report.storage) {
    list.push_back({{"host", sample.host},
                    {"read_bytes_per_second", sample.read_bytes_per_second},
                    {"write_bytes_per_second", sample.write_bytes_per_second},
                    {"direct", sample.direct}});
  }
  return list;
}

Json text_or_null(const std::string& text) { return text.empty() ? Json(nullptr) : Json(text); }

Json nodes_json(const ProbeReport& report) {
  Json list = Json::array();
  for (const NodeInventory& node : report.nodes) {
    list.push_back({{"host", node.host},
                    {"cpu", node.cpu},
                    {"cores", node.cores},
                    {"memory_bytes", node.memory_bytes},
                    {"gpus", node.gpus},
                    {"nics", node.nics},
                    {"driver", text_or_null(node.driver)},
                    {"nccl", text_or_null(node.nccl)},
                    {"kernel", text_or_null(node.kernel)}});
  }
  return list;
}

Json ranks_json(const ProbeReport& report) {
  Json list = Json::array();
  for (const RankSpeed& rank : report.slowest_first) {
    list.push_back({{"rank", rank.rank},
                    {"host", rank.host},
                    {"matrix_flops_per_second", rank.matrix_flops_per_second},
                    {"memory_bytes_per_second", rank.memory_bytes_per_second},
                    {"message_seconds", rank.message_seconds > 0 ? Json(rank.message_seconds) : Json(nullptr)},
                    {"slowness", rank.slowness}});
  }
  return list;
}

}  // namespace

std::string to_json(const ProbeReport& report) {
  Json document = Json::parse(to_json(report.cluster));
  document["probe"] = {{"version", 1},
                       {"dilation", report.dilation},
                       {"copy_bytes_per_second", report.copy_bytes_per_second},
                       {"matrices", matrices_json(report)},
                       {"links", links_json(report)},
                       {"collectives", collectives_json(report)},
                       {"storage", storage_json(report)},
                       {"nodes", nodes_json(report)},
                       {"slowest_first", ranks_json(report)},
                       {"notes", report.notes}};
  return document.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
}

}  // namespace tandem
