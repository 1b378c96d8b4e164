// SPDX-License-Identifier: Apache-2.0
#include "ring_all_reduce.h"

#include <algorithm>
#include <cstddef>
#include <vector>

namespace own {
namespace {

using tandem::CommOptions;
using tandem::TensorView;

// Part `index`, modulo the number of parts, of data that is cut as evenly as can be.
TensorView part_of(TensorView data, int index, int parts) {
  const int part = ((index % parts) + parts) % parts;
  const std::int64_t begin = data.num_elements() * part / parts;
  return data.flat(begin, data.num_elements() * (part + 1) / parts - begin);
}

template <class Real>
void add(TensorView from, TensorView to) {
  const auto source = from.as<Real>();
  const auto target = to.as<Real>();
  for (std::size_t i = 0; i < target.size(); ++i) target[i] += source[i];
}

}  // namespace

tandem::Work RingAllReduce::all_reduce(TensorView data, const CommOptions& options) {
  if (size() == 1 || (data.dtype() != tandem::DType::f32 && data.dtype() != tandem::DType::f64)) {
    return inner().all_reduce(data, options);
  }
  ++*calls_;
  const bool is_single = data.dtype() == tandem::DType::f32;
  if (bug_ == RingBug::wasteful) {
    is_single ? everything_to_everybody<float>(data, options) : everything_to_everybody<double>(data, options);
  } else {
    is_single ? around_the_ring<float>(data, options) : around_the_ring<double>(data, options);
  }
  return {};
}

template <class Real>
void RingAllReduce::around_the_ring(TensorView data, const CommOptions& options) {
  const int right = (rank() + 1) % size();
  const int left = (rank() + size() - 1) % size();
  std::vector<Real> memory(static_cast<std::size_t>(data.num_elements() / size() + 1));
  const TensorView arrived(memory.data(), data.dtype(), {static_cast<std::int64_t>(memory.size())});

  // Hop h: this rank passes part rank - h on, to which it has added its own, and adds its own to part rank - h - 1.
  const int hops = bug_ == RingBug::missing_hop ? size() - 2 : size() - 1;
  for (int hop = 0; hop < hops; ++hop) {
    const TensorView sum = part_of(data, rank() - hop - 1, size());
    const TensorView incoming = arrived.flat(0, sum.num_elements());
    pass(part_of(data, rank() - hop, size()), right, incoming, left, options);
    add<Real>(incoming, sum);
  }
  // Now this rank has the sum of part rank + 1.
  for (int hop = 0; hop < size() - 1; ++hop) {
    const TensorView sum = part_of(data, rank() - hop, size());
    pass(part_of(data, rank() + 1 - hop, size()), right, sum, left, options);
    const auto values = sum.as<Real>();
    if (bug_ == RingBug::off_by_one && values.size() > 1) std::copy_backward(values.begin(), values.end() - 1, values.end());
  }
}

template <class Real>
void RingAllReduce::everything_to_everybody(TensorView data, const CommOptions& options) {
  const std::vector<Real> own(data.as<Real>().begin(), data.as<Real>().end());
  std::vector<Real> copy = own, theirs(own.size());
  const TensorView outgoing = tandem::view_of(copy, {data.num_elements()});
  const TensorView incoming = tandem::view_of(theirs, {data.num_elements()});
  std::vector<std::vector<Real>> all(static_cast<std::size_t>(size()), own);
  for (int distance = 1; distance < size(); ++distance) {
    const int from = (rank() + size() - distance) % size();
    pass(outgoing, (rank() + distance) % size(), incoming, from, options);
    all[static_cast<std::size_t>(from)] = theirs;
  }
  const auto sum = data.as<Real>();
  std::fill(sum.begin(), sum.end(), Real{0});
  for (std::vector<Real>& values : all) add<Real>(tandem::view_of(values, {data.num_elements()}), data);
}

// Both at once: a send is complete only when its receiver has the bytes. They are counted as this communicator's, under the
// purpose of the operation.
void RingAllReduce::pass(TensorView outgoing, int to, TensorView incoming, int from, const CommOptions& options) {
  CommOptions now = options;
  now.algorithm.reset();
  tandem::Work receive = inner().recv(incoming, from, {}, now);
  tandem::Work send = inner().send(outgoing, to, {}, now);
  receive.wait_host();
  send.wait_host();
}

}  // namespace own
