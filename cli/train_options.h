// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cli/data_source.h"
#include "cli/job.h"
#include "cli/run_options.h"
#include "core/fault_script.h"
#include "optimized/recovery/memory_tier.h"
#include "optimized/storage/object_store.h"

namespace tandem {

/// How the supervisor of a run behaves.
struct SuperviseArguments {
  bool on = false;
  std::string launcher;  ///< command in front of the workers; empty: mpirun where they are processes
  int max_restarts = 10;
  double backoff_seconds = 1;
  double restore_seconds = 300;
  double stall_seconds = 120;  ///< of what is neither training nor restoring
  bool elastic = false;
  int least_ranks = 1;
  bool replace_slow = false;
  bool requeue = false;
  double patience_seconds = 20;  ///< with a run that has the folder
};

/// What a supervisor tells its workers.
struct WorkerArguments {
  std::uint64_t attempt = 0;
  std::string heartbeat;  ///< HOST:PORT; empty: nobody supervises
  int ranks = 0;
  int supervisor_process = 0;
};

struct TrainArguments {
  std::string config_file;
  std::string data;
  std::int64_t steps = 0;
  std::vector<std::string> settings;
  std::string resume;
  std::string output;
  std::string store;
  std::string trace;
  std::string json;
  DataCache cache;
  WorldArguments world;
  std::string backend = "cpu";
  std::vector<std::string> faults;
  bool uses_memory = false;
  bool names_cache = false;   ///< --data-cache or --data-cache-gib is there
  std::string memory_folder;  ///< empty: by the name of `output`
  int ranks_per_node = 0;
  std::string replay;
  std::string metrics, tensorboard, prometheus;
  bool live = false;
  double heartbeat_seconds = 1;
  SuperviseArguments supervise;
  WorkerArguments worker;
};
void add_train_options(CLI::App& command, TrainArguments& arguments);

/// Throws InputError where an option has no meaning without another that is missing, or none beside one that is there: it would
/// be passed over in silence.
void require_options_that_count(const CLI::App& command, const TrainArguments& arguments);

/// Where the run's copies in memory are: nothing without --memory-tier. Throws InputError where the folder is not known.
[[nodiscard]] std::optional<MemoryTierPlace> memory_place(const TrainArguments& arguments);

/// What a run is to do.
struct TrainPlan {
  RunConfig config;
  std::string data;
  std::optional<std::filesystem::path> resume;  ///< step folder
  std::string output;                           ///< folder of checkpoints; empty: none
  std::shared_ptr<ObjectStore> store;
  std::optional<MemoryTierPlace> memory;
  std::vector<Fault> faults;
};

/// Starts from the newest checkpoint's configuration over all tiers (--resume), the file's, or the defaults; --set and --steps
/// come last. Collective. Throws InputError.
[[nodiscard]] TrainPlan resolve(const TrainArguments& arguments, const Job& job);

/// Makes the folders that --metrics and --tensorboard need. Throws InputError.
void require_writable_metrics(const TrainArguments& arguments);

/// Where the faults of a run that have struck are noted.
[[nodiscard]] std::filesystem::path struck_file(const std::filesystem::path& output);

/// "tandem: LINE" on standard error.
void note(const std::string& line);

}  // namespace tandem
