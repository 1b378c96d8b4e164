// SPDX-License-Identifier: Apache-2.0
// Bandwidth of collectives from 8 B to 64 MB, as nccl-tests defines it.
//
//   collectives_bench [--ranks N] [--transport threads|mpi] [--link PROFILE] [--algorithms shared,direct,ring,...] [--operations
//   all_reduce,...]
//                     [--backend cpu|cuda|simt] [--smallest BYTES] [--largest BYTES] [--step FACTOR] [--rounds N] [--csv FILE]
//                     [--json FILE]
//
// `shared` is the memory of threads; every other algorithm exchanges messages. With a GPU's backend the buffers lie in its
// memory. Under mpirun all processes are given the same arguments, and the first one writes. Before each call a barrier lines the
// ranks up; the clock covers the call; the time of a repetition is that of the slowest rank, a line's the median over all
// repetitions of all rounds, in which algorithms take turns. Every result is checked. ci/peers/mpi_allreduce.cpp measures
// MPI_Allreduce in the same way.
//
// Not Google Benchmark: the number of repetitions must be the same on all ranks, and a repetition is the maximum of several
// clocks.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <fstream>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "core/error.h"
#include "kernels/kernels.h"
#include "optimized/collectives/algorithms.h"
#include "optimized/comm/mpi/mpi_world.h"
#include "optimized/comm/world.h"
#include "optimized/memory/arena.h"

namespace tandem {
namespace {

const std::map<std::string, CollectiveKind>& kinds() {
  static const std::map<std::string, CollectiveKind> all = {{"all_reduce", CollectiveKind::all_reduce},
                                                            {"reduce_scatter", CollectiveKind::reduce_scatter},
                                                            {"all_gather", CollectiveKind::all_gather},
                                                            {"all_to_all", CollectiveKind::all_to_all},
                                                            {"broadcast", CollectiveKind::broadcast}};
  return all;
}

struct Settings {
  int ranks = 2;
  std::string transport = "threads";
  std::string backend = "cpu";    ///< whose memory the buffers lie in
  std::string link = "unshaped";  ///< of messages between threads
  std::vector<std::string> algorithms = {"shared", "direct", "ring", "recursive", "tree"};
  std::vector<std::string> operations = {"all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast"};
  std::int64_t smallest_bytes = 8;
  std::int64_t largest_bytes = std::int64_t{64} << 20;
  std::int64_t step = 8;
  int rounds = 3;
  std::string csv, json;
};

struct Line {
  std::string operation, algorithm;
  std::int64_t bytes = 0;  ///< of the whole tensor
  std::vector<double> seconds;

  [[nodiscard]] double quantile(double share) const {
    std::vector<double> sorted = seconds;
    std::ranges::sort(sorted);
    return sorted[static_cast<std::size_t>(share * static_cast<double>(sorted.size() - 1))];
  }
};

// Algorithm bandwidth times this is comparable with the bandwidth of a link, whatever the number of ranks.
double bus_factor(const std::string& operation, int ranks) {
  if (operation == "broadcast") return 1;
  return (operation == "all_reduce" ? 2.0 : 1.0) * (ranks - 1) / ranks;
}

int repetitions_of(std::int64_t bytes) { return bytes <= 65536 ? 60 : bytes <= 4 << 20 ? 15 : 5; }

// The buffers of one rank for one size, whole floats in equal parts.
class Operation {
 public:
  Operation(Communicator& comm, Memory& memory, const std::string& name, std::int64_t bytes)
      : comm_(comm),
        memory_(memory),
        kind_(kinds().at(name)),
        elements_(elements_of(kinds().at(name), bytes, comm.size())),
        arena_({.memory = &memory}) {
    for (Arena::Buffer* buffer : {&first_, &second_}) {
      *buffer = arena_.allocate(DType::f32, {elements_}, MemoryCategory::communication);
      fill(buffer->view(DType::f32, {elements_}), 0.0F);
    }
    counts_.assign(static_cast<std::size_t>(comm.size()), elements_ / comm.size());
  }

  [[nodiscard]] std::int64_t bytes() const { return 4 * elements_; }

  // Seconds of one call.
  double time(CollectiveAlgorithm algorithm, int repetition) {
    fill(whole(), value_of(comm_.rank(), repetition));
    memory_.synchronize();
    comm_.barrier();
    const auto begin = std::chrono::steady_clock::now();
    call({.name = "bench", .progress = Progress::on_wait, .algorithm = algorithm});
    const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - begin;
    comm_.barrier();  // or a rank that checks would hold back the clock of another on the same core
    check(repetition);
    return taken.count();
  }

 private:
  // Whole floats; where every rank has a part, equal ones.
  static std::int64_t elements_of(CollectiveKind kind, std::int64_t bytes, int ranks) {
    const bool in_parts = kind != CollectiveKind::all_reduce && kind != CollectiveKind::broadcast;
    const std::int64_t unit = in_parts ? ranks : 1;
    return std::max<std::int64_t>(bytes / 4 / unit, 1) * unit;
  }
  static float value_of(int rank, int repetition) { return static_cast<float>(rank + 1 + repetition % 5); }
  [[nodiscard]] TensorView whole() const { return first_.view(DType::f32, {elements_}); }
  [[nodiscard]] TensorView other() const { return second_.view(DType::f32, {elements_}); }
  [[nodiscard]] TensorView own_part(TensorView view) const { return view.flat(comm_.rank() * counts_[0], counts_[0]); }

  void fill(TensorView view, float value) {
    HostView on_host(memory_, view, Access::write);
    std::ranges::fill(on_host.view().as<float>(), value);
  }

  void call(const CommOptions& options) {
    switch (kind_) {
      case CollectiveKind::all_reduce: return comm_.all_reduce(whole(), options).wait_host();
      case CollectiveKind::reduce_scatter: return comm_.reduce_scatter(whole(), own_part(whole()), counts_, options).wait_host();
      case CollectiveKind::all_gather: return comm_.all_gather(own_part(whole()), whole(), counts_, options).wait_host();
      case CollectiveKind::all_to_all: return comm_.all_to_all(whole(), counts_, other(), counts_, options).wait_host();
      case CollectiveKind::broadcast: return comm_.broadcast(whole(), 0, options).wait_host();
    }
  }

  void check(int repetition) const {
    float sum = 0;
    for (int rank = 0; rank < comm_.size(); ++rank) sum += value_of(rank, repetition);
    const auto all_are = [&](TensorView view, float value) {
      const HostView on_host(memory_, view, Access::read);
      TANDEM_CHECK(std::ranges::all_of(on_host.view().as<float>(), [&](float each) { return each == value; }),
                   "a result is wrong");
    };
    switch (kind_) {
      case CollectiveKind::all_reduce: return all_are(whole(), sum);
      case CollectiveKind::reduce_scatter: return all_are(own_part(whole()), sum);
      case CollectiveKind::broadcast: return all_are(whole(), value_of(0, repetition));
      case CollectiveKind::all_gather:
      case CollectiveKind::all_to_all: break;
    }
    const TensorView result = kind_ == CollectiveKind::all_gather ? whole() : other();
    for (int rank = 0; rank < comm_.size(); ++rank) {
      all_are(result.flat(rank * counts_[0], counts_[0]), value_of(rank, repetition));
    }
  }

  Communicator& comm_;
  Memory& memory_;
  CollectiveKind kind_;
  std::int64_t elements_;
  std::vector<std::int64_t> counts_;
  Arena arena_;
  Arena::Buffer first_, second_;
};

// Of every repetition the seconds of the slowest rank, on every rank.
std::vector<double> slowest_of(Communicator& comm, std::vector<double> own) {
  const auto count = static_cast<std::int64_t>(own.size());
  std::vector<double> all(own.size() * static_cast<std::size_t>(comm.size()));
  const std::vector<std::int64_t> counts(static_cast<std::size_t>(comm.size()), count);
  comm.all_gather(TensorView(own.data(), DType::f64, {count}),
                  TensorView(all.data(), DType::f64, {static_cast<std::int64_t>(all.size())}), counts, {.name = "times"})
      .wait_host();
  for (std::size_t i = 0; i < all.size(); ++i) own[i % own.size()] = std::max(own[i % own.size()], all[i]);
  return own;
}

constexpr int kWarmUps = 3;

// From the smallest on by factors, and the largest.
std::vector<std::int64_t> sizes_of(const Settings& settings) {
  std::vector<std::int64_t> sizes;
  for (std::int64_t bytes = settings.smallest_bytes; bytes < settings.largest_bytes; bytes *= settings.step)
    sizes.push_back(bytes);
  sizes.push_back(settings.largest_bytes);
  return sizes;
}

void measure_on(Communicator& comm, Memory& memory, const Settings& settings, const std::string& algorithm,
                std::vector<Line>& lines) {
  const CollectiveAlgorithm used = find_algorithm(algorithm).value_or(CollectiveAlgorithm::direct);
  for (const std::string& operation : settings.operations) {
    if (!supports(used, kinds().at(operation))) continue;
    for (const std::int64_t bytes : sizes_of(settings)) {
      Operation timed(comm, memory, operation, bytes);
      std::vector<double> seconds;
      for (int repetition = -kWarmUps; repetition < repetitions_of(bytes); ++repetition) {
        const double taken = timed.time(used, repetition + kWarmUps);
        if (repetition >= 0) seconds.push_back(taken);
      }
      seconds = slowest_of(comm, std::move(seconds));
      if (comm.rank() != 0) continue;
      auto line = std::ranges::find_if(lines, [&](const Line& known) {
        return known.operation == operation && known.algorithm == algorithm && known.bytes == timed.bytes();
      });
      if (line == lines.end()) line = lines.insert(lines.end(), {operation, algorithm, timed.bytes(), {}});
      line->seconds.insert(line->seconds.end(), seconds.begin(), seconds.end());
    }
  }
}

std::vector<Line> measure(const Settings& settings) {
  std::vector<Line> lines;
  for (int round = 0; round < settings.rounds; ++round) {
    for (const std::string& algorithm : settings.algorithms) {
      WorldOptions options;
      options.ranks = settings.ranks;
      options.settings.transport = settings.transport;
      if (settings.transport == "threads" && algorithm != "shared") options.settings.link = parse_link(settings.link);
      run_world(options, [&](Communicator& comm) {
        const std::unique_ptr<Kernels> gpu = settings.backend == "cpu" ? nullptr : make_cuda_kernels(settings.backend, {});
        Memory& memory = gpu ? gpu->memory() : host_memory();
        comm.set_memory(&memory);
        measure_on(comm, memory, settings, algorithm, lines);
        comm.set_memory(nullptr);
      });
    }
  }
  std::ranges::stable_sort(
      lines, [](const Line& a, const Line& b) { return std::tie(a.operation, a.bytes) < std::tie(b.operation, b.bytes); });
  return lines;
}

nlohmann::ordered_json object_of(const Settings& settings, const Line& line) {
  const double rate = static_cast<double>(line.bytes) / line.quantile(0.5) / 1e9;
  nlohmann::ordered_json object;
  object["transport"] = settings.transport;
  object["link"] = settings.transport == "threads" && line.algorithm != "shared" ? settings.link : "none";
  object["backend"] = settings.backend;
  object["operation"] = line.operation;
  object["algorithm"] = line.algorithm;
  object["ranks"] = settings.ranks;
  object["bytes"] = line.bytes;
  object["repetitions"] = line.seconds.size();
  object["median_us"] = line.quantile(0.5) * 1e6;
  object["p10_us"] = line.quantile(0.1) * 1e6;
  object["p90_us"] = line.quantile(0.9) * 1e6;
  object["algbw_gigabytes_per_second"] = rate;
  object["busbw_gigabytes_per_second"] = rate * bus_factor(line.operation, settings.ranks);
  return object;
}

void write_file(const std::string& path, const std::string& text) {
  std::ofstream file(path);
  file << text << std::flush;
  if (!file) throw IoError(fmt::format("{}: cannot be written", path));
}

void write(const Settings& settings, const std::vector<Line>& lines) {
  nlohmann::ordered_json all = nlohmann::ordered_json::array();
  std::string csv, table;
  for (const Line& line : lines) {
    const nlohmann::ordered_json object = object_of(settings, line);
    std::vector<std::string> keys, values;
    for (const auto& [key, value] : object.items()) {
      keys.push_back(key);
      values.push_back(value.is_string() ? value.get<std::string>() : value.dump());
    }
    if (csv.empty()) csv = fmt::format("{}\n", fmt::join(keys, ","));
    csv += fmt::format("{}\n", fmt::join(values, ","));
    table += fmt::format("{:>14} {:>12} {:>10} B {:>11.1f} us {:>8.3f} GB/s algorithm {:>8.3f} GB/s bus\n", line.operation,
                         line.algorithm, line.bytes, object["median_us"].get<double>(),
                         object["algbw_gigabytes_per_second"].get<double>(), object["busbw_gigabytes_per_second"].get<double>());
    all.push_back(object);
  }
  fmt::print("{}", table);
  if (!settings.csv.empty()) write_file(settings.csv, csv);
  if (!settings.json.empty()) write_file(settings.json, all.dump(1) + "\n");
}

void add_options(CLI::App& app, Settings& settings) {
  std::vector<std::string> operations;
  for (const auto& [name, kind] : kinds()) operations.push_back(name);
  std::vector<std::string> algorithms = {"shared"};
  for (const CollectiveAlgorithm algorithm : all_algorithms()) algorithms.emplace_back(name(algorithm));
  app.add_option("--ranks", settings.ranks)->check(CLI::PositiveNumber);
  app.add_option("--transport", settings.transport)->check(CLI::IsMember(transports()));
  app.add_option("--backend", settings.backend, "in whose memory: cpu, cuda, simt")
      ->check(CLI::IsMember({"cpu", "cuda", "simt"}));
  app.add_option("--link", settings.link, "profile, as `tandem run` takes it; for messages of threads");
  app.add_option("--algorithms", settings.algorithms)->delimiter(',')->check(CLI::IsMember(algorithms));
  app.add_option("--operations", settings.operations)->delimiter(',')->check(CLI::IsMember(operations));
  app.add_option("--smallest", settings.smallest_bytes)->check(CLI::PositiveNumber);
  app.add_option("--largest", settings.largest_bytes)->check(CLI::PositiveNumber);
  app.add_option("--step", settings.step, "from one size to the next")->check(CLI::Range(2, 1 << 20));
  app.add_option("--rounds", settings.rounds)->check(CLI::PositiveNumber);
  app.add_option("--csv", settings.csv);
  app.add_option("--json", settings.json);
}

int run(int argc, char** argv) {
  Settings settings;
  CLI::App app("Bandwidth of collectives from 8 B to 64 MB, as nccl-tests defines it");
  add_options(app, settings);
  CLI11_PARSE(app, argc, argv);
  if (settings.transport != "threads") std::erase(settings.algorithms, "shared");
  try {
    const std::vector<Line> lines = measure(settings);
    if (!lines.empty()) write(settings, lines);
    return 0;
  } catch (const InputError& error) {
    fmt::print(stderr, "collectives_bench: {}\n", error.what());
    return 2;
  } catch (const std::exception& error) {
    fmt::print(stderr, "collectives_bench: {}\n", error.what());
    return 1;
  }
}

}  // namespace
}  // namespace tandem

int main(int argc, char** argv) {
  const int status = tandem::run(argc, argv);
  tandem::leave_job(status);
  return status;
}
