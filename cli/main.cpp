// SPDX-License-Identifier: Apache-2.0
#include <unistd.h>

#include <array>
#include <atomic>
#include <csignal>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <exception>
#include <new>
#include <string>
#include <string_view>
#include <vector>

#include <fmt/format.h>

#include "cli/command.h"
#include "cli/installation.h"
#include "cli/usage.h"
#include "core/error.h"
#include "optimized/comm/mpi/mpi_world.h"
#include "optimized/comm/nccl/nccl_world.h"

namespace {

// A signal handler can reach nothing else.
std::atomic<bool> stop_requested{false};
std::atomic<std::time_t> stop_requested_at{0};
// The command saves what it has done before it stops. Others have nothing to save: what they write appears whole or not at all.
std::atomic<bool> stops_by_itself{true};

// The first signal asks for a clean stop. Another one ends the program at once, unless it comes with the first: launchers signal
// a process and then its group.
void request_stop(int) {
  if (!stops_by_itself) {
    constexpr std::string_view kLine = "tandem: interrupted\n";
    static_cast<void>(!write(STDERR_FILENO, kLine.data(), kLine.size()));
    _exit(tandem::kInterrupted);
  }
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  if (stop_requested.exchange(true)) {
    if (now.tv_sec > stop_requested_at + 1) _exit(tandem::kInterrupted);
  } else {
    stop_requested_at = now.tv_sec;
  }
}

// On a stack of its own: generated code of matrix products keeps values below the stack pointer, where a handler's frame would
// lie.
void stop_on_signals() {
  static std::array<std::byte, 1 << 16> memory;
  stack_t stack{};
  stack.ss_sp = memory.data();
  stack.ss_size = memory.size();
  sigaltstack(&stack, nullptr);
  struct sigaction action {};
  action.sa_handler = request_stop;
  action.sa_flags = SA_ONSTACK | SA_RESTART;
  for (const int signal : {SIGINT, SIGTERM, SIGUSR1, SIGHUP}) {
    struct sigaction before {};
    sigaction(signal, &action, &before);
    // Who has said that a closed terminal is no reason to stop means it.
    if (signal == SIGHUP && before.sa_handler == SIG_IGN) sigaction(signal, &before, nullptr);
  }
}

int report(const std::string& text, int status) {
  fmt::print(stderr, "tandem: {}\n", text);
  return status;
}

// Which process of its job this is on its host, as mpirun says, and srun.
std::string_view place_on_host() {
  for (const char* const variable : {"OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID"}) {
    if (const char* const text = std::getenv(variable)) return text;
  }
  return "0";
}

// Bad input is the same in all processes of a job, but what a machine lacks may be lacking on one host alone: one process of each
// host says so.
int report_input(const std::string& text) {
  if (place_on_host() != "0") return tandem::kBadInput;
  return report(text, tandem::kBadInput);
}

// Of a job whose other processes have died or hang, on another thread than the one that is not ready to stop.
void end_at_once(const std::string& reason) {
  report(reason, tandem::kRunBroke);
  _exit(tandem::kRunBroke);
}

int run(tandem::CommandLine& line, int argc, char** argv) {
  const std::vector<std::string> words = tandem::words_to_parse(argc, argv);
  std::vector<const char*> pointers;
  for (const std::string& word : words) pointers.push_back(word.c_str());
  try {
    line.app.parse(static_cast<int>(pointers.size()), pointers.data());
  } catch (const CLI::Success& help) {
    return line.app.exit(help);
  } catch (const CLI::ParseError& error) {
    return report_input(tandem::explain(line.app, error, words));
  } catch (const tandem::InputError& error) {
    return report_input(error.what());
  }
  constexpr std::array<std::string_view, 5> kAtOnce = {"checkpoint", "compare", "list", "probe", "report"};
  stops_by_itself = std::find(kAtOnce.begin(), kAtOnce.end(), line.app.get_subcommands().front()->get_name()) == kAtOnce.end();
  try {
    return line.action();
  } catch (const tandem::InputError& error) {
    return report_input(error.what());
  } catch (const std::bad_alloc&) {
    return report("no memory for a run of this size; lower its model, rows or ranks", tandem::kRunBroke);
  } catch (const std::exception& error) {
    return report(error.what(), tandem::kRunBroke);
  }
}

}  // namespace

int main(int argc, char** argv) {
  stop_on_signals();
  std::signal(SIGPIPE, SIG_DFL);
  CLI::App app{
      "tandem: every technique of large-scale LLM training twice, as a reference and optimized, proven equal and measured"};
  app.require_subcommand(1);
  tandem::CommandLine line{app, tandem::shipped_data(), tandem::libraries_of_build(), stop_requested};
  app.set_version_flag("--version", [&line] { return tandem::describe_program(line.libraries); });
  tandem::add_list_command(line);
  tandem::add_run_command(line);
  tandem::add_train_command(line);
  tandem::add_generate_command(line);
  tandem::add_golden_command(line);
  tandem::add_data_command(line);
  tandem::add_checkpoint_command(line);
  tandem::add_compare_command(line);
  tandem::add_report_command(line);
  tandem::add_probe_command(line);
  tandem::add_plan_command(line);
  tandem::add_scale_command(line);
  tandem::add_trace_command(line);
  tandem::add_claims_command(line);
  tandem::add_pitfalls_command(line);
  tandem::add_compose_command(line);
  tandem::on_broken_job(end_at_once);
  const int status = run(line, argc, argv);
  tandem::leave_nccl_job(status);
  tandem::leave_job(status);
  return status;
}
