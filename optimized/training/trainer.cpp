// SPDX-License-Identifier: Apache-2.0
#include "optimized/training/trainer.h"

#include <utility>

#include <fmt/format.h>

#include "core/io/binary.h"
#include "optimized/checkpoint/load.h"
#include "optimized/comm/exchange.h"
#include "optimized/comm/world.h"
#include "optimized/training/rank_trainer.h"

namespace tandem {
namespace {

// What every rank has for itself.
struct RankRecord {
  std::vector<Span> spans;
  std::vector<MemoryLedger> ledgers;  // of device and host
};

template <class Archive>
void serialize(Archive& archive, RankRecord& record) {
  archive(record.spans, record.ledgers);
}

void share_records(const WorldSettings& world, TrainReport& report) {
  const JobShape job = job_shape(world);
  if (job.processes == 1) return;
  RankRecord own;
  const auto rank = static_cast<std::size_t>(job.rank);
  if (rank < report.ledgers.size()) own = {report.spans_by_rank[rank], {report.ledgers[rank], report.host_ledgers[rank]}};
  const std::vector<std::string> records = all_gather_bytes(world, to_bytes(own));
  for (std::size_t i = 0; i < report.ledgers.size(); ++i) {
    auto record = from_bytes<RankRecord>(records[i]);
    report.spans_by_rank[i] = std::move(record.spans);
    report.ledgers[i] = record.ledgers.at(0);
    report.host_ledgers[i] = record.ledgers.at(1);
  }
}

std::optional<CheckpointInfo> read_resumed(const TrainOptions& options) {
  if (!options.resume) return std::nullopt;
  CheckpointInfo info = read_checkpoint_info(*options.resume);
  const std::string identity = options.data->identity();
  if (!options.data_may_change && !info.data_identity.empty() && info.data_identity != identity) {
    throw InputError(fmt::format(
        "{}: was saved with other data ('{}', now '{}'), so that the position in it means nothing; give the data that "
        "the run began with, or --data to go on with other data",
        options.resume->string(), info.data_identity, identity));
  }
  return info;
}

}  // namespace

TrainReport train(const TrainOptions& options) {
  validate(options.config.model);
  require_legal(options.config.plan, options.config.model);
  if (options.config.anomaly.action == AnomalyAction::rollback && options.output.empty()) {
    throw InputError("anomaly_action=rollback needs a folder for checkpoints to go back to: give --out");
  }
  const std::optional<CheckpointInfo> resumed = read_resumed(options);
  TrainReport report;
  report.first_step = resumed ? resumed->next_step : 0;
  const int ranks = options.config.plan.parallel.world_size();
  report.spans_by_rank.resize(static_cast<std::size_t>(ranks));
  report.ledgers.resize(static_cast<std::size_t>(ranks));
  report.host_ledgers.resize(static_cast<std::size_t>(ranks));
  RunData data(options, resumed, job_shape(options.world).processes == 1 ? ranks : 1);
  run_world({.ranks = ranks, .settings = options.world},
            [&](Communicator& comm) { RankTrainer(options, resumed, data, comm, report).run(); });
  report.loading = data.batches.statistics();
  share_records(options.world, report);
  const bool is_over = !report.interrupted && !report.gave_up;
  if (options.memory && is_over) clear_memory_tier(*options.memory);
  return report;
}

}  // namespace tandem
