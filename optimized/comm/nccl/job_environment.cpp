// SPDX-License-Identifier: Apache-2.0
#include "optimized/comm/nccl/job_environment.h"

#include <charconv>
#include <string_view>

#include <fmt/format.h>

#include "core/error.h"

namespace tandem {
namespace {

// Of jobs that have none of their own: below the ports that systems give out themselves.
constexpr int kFirstSlurmPort = 20000, kSlurmPorts = 10000;

class Reader {
 public:
  explicit Reader(const EnvironmentVariable& variable) : variable_(variable) {}

  [[nodiscard]] std::optional<std::string> text(const char* name) const {
    const char* const value = variable_(name);
    return value != nullptr && *value != '\0' ? std::optional<std::string>(value) : std::nullopt;
  }
  [[nodiscard]] bool has(const char* name) const { return text(name).has_value(); }
  [[nodiscard]] std::optional<int> number(const char* name, int low, int high) const {
    const std::optional<std::string> value = text(name);
    if (!value) return std::nullopt;
    int parsed = 0;
    const auto [end, error] = std::from_chars(value->data(), value->data() + value->size(), parsed);
    if (error != std::errc() || end != value->data() + value->size() || parsed < low || parsed > high) {
      throw InputError(fmt::format("environment variable {}={}: must be a number from {} to {}", name, *value, low, high));
    }
    return parsed;
  }
  template <class Value>
  [[nodiscard]] Value require(const std::optional<Value>& value, const char* name, const char* beside) const {
    if (!value) throw InputError(fmt::format("environment variable {} is not set, though {} is", name, beside));
    return *value;
  }

 private:
  const EnvironmentVariable& variable_;
};

constexpr int kMany = 1 << 24;

void require_rank(const JobEnvironment& job, const char* name) {
  if (job.rank >= job.processes)
    throw InputError(fmt::format("environment variable {}={}: of {} processes", name, job.rank, job.processes));
}

JobEnvironment of_torchrun(const Reader& read) {
  JobEnvironment job;
  job.launcher = JobEnvironment::Launcher::torchrun;
  job.rank = read.number("RANK", 0, kMany).value();
  job.processes = read.require(read.number("WORLD_SIZE", 1, kMany), "WORLD_SIZE", "RANK");
  require_rank(job, "RANK");
  job.local_rank = read.number("LOCAL_RANK", 0, kMany);
  if (job.processes > 1) {
    job.host = read.require(read.text("MASTER_ADDR"), "MASTER_ADDR", "RANK");
    int port = read.require(read.number("MASTER_PORT", 1, 65534), "MASTER_PORT", "RANK");
    // On the port itself torchrun's own store listens.
    if (read.text("TORCHELASTIC_USE_AGENT_STORE").value_or("") == "True") ++port;
    job.port = static_cast<std::uint16_t>(port);
  }
  job.generation = fmt::format("run {}, restart {}", read.text("TORCHELASTIC_RUN_ID").value_or("none"),
                               read.text("TORCHELASTIC_RESTART_COUNT").value_or("0"));
  return job;
}

// "node[3-5,7]" begins with node3; "a,b" with a.
std::string first_of_node_list(std::string_view list) {
  const std::size_t end = list.find_first_of(",[");
  std::string first(list.substr(0, end));
  if (end != std::string_view::npos && list[end] == '[') first += list.substr(end + 1, list.find_first_of(",-]", end) - end - 1);
  return first;
}

JobEnvironment of_slurm(const Reader& read) {
  JobEnvironment job;
  job.launcher = JobEnvironment::Launcher::slurm;
  job.rank = read.number("SLURM_PROCID", 0, kMany).value();
  job.processes = read.number("SLURM_NTASKS", 1, kMany).value();
  require_rank(job, "SLURM_PROCID");
  job.local_rank = read.number("SLURM_LOCALID", 0, kMany);
  // Rank 0 runs on the first node of the step. The launch node, where srun was called, is the same only within an allocation.
  const std::optional<std::string> nodes =
      read.has("SLURM_STEP_NODELIST") ? read.text("SLURM_STEP_NODELIST") : read.text("SLURM_NODELIST");
  if (const auto chosen = read.text("MASTER_ADDR"))
    job.host = *chosen;
  else if (nodes)
    job.host = first_of_node_list(*nodes);
  else
    job.host = read.require(read.text("SLURM_LAUNCH_NODE_IPADDR"), "SLURM_NODELIST", "SLURM_PROCID");
  const int id = read.number("SLURM_JOB_ID", 0, 2147483647).value_or(0);
  const int step = read.number("SLURM_STEP_ID", 0, 2147483647).value_or(0);
  const int own_port = kFirstSlurmPort + (id % kSlurmPorts * 7 + step % kSlurmPorts) % kSlurmPorts;
  job.port = static_cast<std::uint16_t>(read.number("MASTER_PORT", 1, 65535).value_or(own_port));
  job.generation = fmt::format("job {}.{}, restart {}", id, step, read.text("SLURM_RESTART_COUNT").value_or("0"));
  return job;
}

}  // namespace

JobEnvironment read_job_environment(const EnvironmentVariable& variable) {
  const Reader read(variable);
  for (const char* const of_mpi : {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK"}) {
    if (!read.has(of_mpi)) continue;
    JobEnvironment job;
    job.launcher = JobEnvironment::Launcher::mpi;
    job.local_rank = read.number("OMPI_COMM_WORLD_LOCAL_RANK", 0, kMany);
    return job;
  }
  if (read.has("RANK")) return of_torchrun(read);
  if (read.has("SLURM_PROCID") && read.has("SLURM_NTASKS")) return of_slurm(read);
  return {};
}

}  // namespace tandem
