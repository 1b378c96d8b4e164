// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cmath>

#include "core/error.h"
#include "optimized/comm/adversary.h"
#include "optimized/comm/comm_test_support.h"

namespace tandem::comm_test {

using Counts = std::vector<std::int64_t>;

inline void run_adversarial(Way way, int ranks, const AdversaryScript& script, const std::function<void(Communicator&)>& body) {
  run_ranks(ranks, way, [&](Communicator& comm) {
    const auto adversarial = make_adversarial(comm, script);
    body(*adversarial);
  });
}

// Parts of uneven size, one of them empty from three ranks on.
inline Counts uneven(int ranks) {
  Counts counts;
  for (int r = 0; r < ranks; ++r) counts.push_back(r == 1 && ranks > 2 ? 0 : 5 + 11 * r);
  return counts;
}

inline std::int64_t before(const Counts& counts, int rank) { return total_of({counts.begin(), counts.begin() + rank}); }

// One operation on buffers that a test looks at: `input` may be a part of `output` or the other way round.
struct Started {
  std::vector<float> input, output;
  TensorView read, written;
  Work work;
};

using Start = std::function<void(Communicator&, Started&)>;
struct Operation {
  std::string name;
  Start start;
};

inline void use_input(Started& s, std::vector<float> values) {
  s.input = std::move(values);
  s.read = flat_view(s.input);
}

inline void use_output(Started& s, std::int64_t count) {
  s.output.assign(static_cast<std::size_t>(count), -5.0F);
  s.written = flat_view(s.output);
}

inline void ring_exchange(Communicator& comm, Started& s, std::int64_t count, bool sends) {
  const int next = (comm.rank() + 1) % comm.size();
  const int previous = (comm.rank() + comm.size() - 1) % comm.size();
  const Envelope envelope{3, 1, 2, 1};
  if (sends) {
    use_input(s, values_of<float>(comm.rank(), count));
    s.work = comm.send(s.read, next, envelope, {.name = "ring"});
  } else {
    use_output(s, count);
    s.work = comm.recv(s.written, previous, envelope, {.name = "ring"});
  }
}

inline std::vector<Operation> collectives() {
  std::vector<Operation> all;
  all.push_back({"all_reduce", [](Communicator& comm, Started& s) {
                   s.output = values_of<float>(comm.rank(), 257);
                   s.written = flat_view(s.output);
                   s.work = comm.all_reduce(s.written, {.name = "sum"});
                 }});
  all.push_back({"reduce_scatter", [](Communicator& comm, Started& s) {
                   const Counts counts = uneven(comm.size());
                   use_input(s, values_of<float>(comm.rank(), total_of(counts)));
                   use_output(s, counts[static_cast<std::size_t>(comm.rank())]);
                   s.work = comm.reduce_scatter(s.read, s.written, counts, {.name = "part"});
                 }});
  all.push_back({"reduce_scatter in place", [](Communicator& comm, Started& s) {
                   const Counts counts = uneven(comm.size());
                   use_input(s, values_of<float>(comm.rank(), total_of(counts)));
                   s.written = s.read.flat(before(counts, comm.rank()), counts[static_cast<std::size_t>(comm.rank())]);
                   s.work = comm.reduce_scatter(s.read, s.written, counts, {.name = "part"});
                 }});
  all.push_back({"all_gather", [](Communicator& comm, Started& s) {
                   const Counts counts = uneven(comm.size());
                   use_input(s, values_of<float>(comm.rank(), counts[static_cast<std::size_t>(comm.rank())]));
                   use_output(s, total_of(counts));
                   s.work = comm.all_gather(s.read, s.written, counts, {.name = "whole"});
                 }});
  all.push_back({"all_gather in place", [](Communicator& comm, Started& s) {
                   const Counts counts = uneven(comm.size());
                   s.output = values_of<float>(comm.rank(), total_of(counts));
                   s.written = flat_view(s.output);
                   s.read = s.written.flat(before(counts, comm.rank()), counts[static_cast<std::size_t>(comm.rank())]);
                   s.work = comm.all_gather(s.read, s.written, counts, {.name = "whole"});
                 }});
  all.push_back({"all_to_all", [](Communicator& comm, Started& s) {
                   const Counts sent = uneven(comm.size());
                   const Counts received(sent.size(), sent[static_cast<std::size_t>(comm.rank())]);
                   use_input(s, values_of<float>(comm.rank(), total_of(sent)));
                   use_output(s, total_of(received));
                   s.work = comm.all_to_all(s.read, sent, s.written, received, {.name = "parts"});
                 }});
  all.push_back({"broadcast", [](Communicator& comm, Started& s) {
                   s.output = values_of<float>(comm.rank(), 300);
                   const int root = comm.size() - 1;
                   (comm.rank() == root ? s.read : s.written) = flat_view(s.output);
                   s.work = comm.broadcast(flat_view(s.output), root, {.name = "root's"});
                 }});
  return all;
}

inline std::int64_t not_nan(TensorView view) {
  std::int64_t count = 0;
  if (!view) return 0;
  for (const float value : view.as<float>()) count += std::isnan(value) ? 0 : 1;
  return count;
}

}  // namespace tandem::comm_test
