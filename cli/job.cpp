// SPDX-License-Identifier: Apache-2.0
#include "cli/job.h"

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "core/error.h"
#include "core/io/binary.h"
#include "harness/agreement.h"
#include "optimized/comm/exchange.h"
#include "optimized/comm/mpi/mpi_world.h"
#include "optimized/comm/nccl/nccl_world.h"

namespace tandem {
namespace {

// What a process tells the others after a case.
struct News {
  Opinion opinion;
  bool stop = false;
};

template <class Archive>
void serialize(Archive& archive, News& news) {
  archive(news.opinion, news.stop);
}

}  // namespace

void Job::on_leader(const std::function<void()>& action) const {
  std::string refusal;
  if (leads()) {
    try {
      action();
    } catch (const InputError& error) {
      refusal = error.what();
    }
  }
  const std::string told = all_gather_bytes(settings_, refusal).front();
  if (!told.empty()) throw InputError(told);
}

std::vector<double> Job::of_leader(const std::vector<double>& values) const {
  return from_bytes<std::vector<double>>(all_gather_bytes(settings_, to_bytes(values)).front());
}

std::string Job::of_leader(const std::string& text) const { return all_gather_bytes(settings_, text).front(); }

int Job::agree_on_status(int status) const { return from_bytes<int>(all_gather_bytes(settings_, to_bytes(status)).front()); }

void Job::agree(CaseResult& result, std::atomic<bool>& stop) const {
  require_whole_job();
  require_whole_nccl_job();
  std::vector<Opinion> opinions;
  for (const std::string& part : all_gather_bytes(settings_, to_bytes(News{opinion_of(result), stop.load()}))) {
    auto news = from_bytes<News>(part);
    if (news.stop) stop = true;
    opinions.push_back(std::move(news.opinion));
  }
  take_worst(result, opinions);
}

void skip_what_does_not_fit(CaseList& cases, const Job& job) {
  for (Case& entry : cases) {
    const int ranks = entry.plan.parallel.world_size();
    std::optional<std::string> reason;
    if (ranks > job.processes()) {
      reason = fmt::format("needs {} ranks, the job has {} process{}", ranks, job.processes(), job.processes() == 1 ? "" : "es");
    } else if (entry.timed) {
      reason = "measures the time of one process, and the others of the job would work beside it";
    }
    if (reason) entry.unavailable = [text = std::move(*reason)](const RunContext&) { return std::optional(text); };
  }
}

}  // namespace tandem
