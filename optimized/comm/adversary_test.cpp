// SPDX-License-Identifier: Apache-2.0
#include <atomic>
#include <cstring>
#include <deque>
#include <optional>
#include <thread>

#include "optimized/comm/adversary_test_support.h"

namespace tandem::comm_test {
namespace {

class Adversary : public OnRanks {};
INSTANTIATE_TEST_SUITE_P(World, Adversary, testing::Combine(kBothWays, testing::Values(1, 2, 4)), param_name);
class AdversaryOfSeveral : public OnRanks {};
INSTANTIATE_TEST_SUITE_P(World, AdversaryOfSeveral, testing::Combine(kBothWays, testing::Values(2, 3)), param_name);

TEST_P(Adversary, GivesTheValuesOfTheInnerCommunicator) {
  run_ranks(ranks(), [&](Communicator& comm) {
    const auto adversarial = make_adversarial(comm, {.seed = 3, .longest_delay_seconds = 5e-4});
    for (int round = 0; round < 5; ++round) {
      for (const Operation& operation : collectives()) {
        Started plain, late;
        operation.start(comm, plain);
        plain.work.wait_host();
        operation.start(*adversarial, late);
        late.work.wait_host();
        ASSERT_EQ(late.input, plain.input) << operation.name;
        ASSERT_EQ(late.output, plain.output) << operation.name;
      }
    }
  });
}

TEST_P(Adversary, CarriesMessagesInOrder) {
  run_adversarial(way(), ranks(), {.seed = 4}, [&](Communicator& comm) {
    std::deque<Started> sent(30), received(30);
    for (std::size_t i = 0; i < sent.size(); ++i) ring_exchange(comm, sent[i], static_cast<std::int64_t>(i), true);
    for (std::size_t i = 0; i < sent.size(); ++i) ring_exchange(comm, received[i], static_cast<std::int64_t>(i), false);
    for (Started& s : received) s.work.wait_host();
    for (Started& s : sent) s.work.wait_host();
    const int previous = (comm.rank() + comm.size() - 1) % comm.size();
    for (std::size_t i = 0; i < sent.size(); ++i) {
      EXPECT_EQ(received[i].output, values_of<float>(previous, static_cast<std::int64_t>(i)));
    }
  });
}

// Bits of each element of a buffer under way.
template <class T, class Bits>
void expect_sum_of(Communicator& comm, DType dtype, T one, T sum, Bits poison) {
  std::vector<T> data(33, one);
  Work work = comm.all_reduce(TensorView(data.data(), dtype, {33}), {});
  for (const T& value : data) ASSERT_EQ(std::memcmp(&value, &poison, sizeof(T)), 0) << name(dtype);
  work.wait_host();
  for (const T& value : data) ASSERT_EQ(value, sum) << name(dtype);
}

TEST_P(Adversary, WorksForEveryWidth) {
  run_adversarial(way(), ranks(), {}, [](Communicator& comm) {
    const int n = comm.size();
    expect_sum_of(comm, DType::i32, 3, 3 * n, std::uint32_t{0xFFFFFFFF});
    expect_sum_of(comm, DType::i64, std::int64_t{3}, std::int64_t{3 * n}, std::uint64_t{0xFFFFFFFFFFFFFFFF});
    expect_sum_of(comm, DType::f32, 3.0F, 3.0F * static_cast<float>(n), std::uint32_t{0xFFBFFFFF});
    expect_sum_of(comm, DType::f64, 3.0, 3.0 * n, std::uint64_t{0xFFF7FFFFFFFFFFFF});
    expect_sum_of(comm, DType::f16, to_f16_bits(3.0F), to_f16_bits(3.0F * static_cast<float>(n)), std::uint16_t{0xFDFF});
    expect_sum_of(comm, DType::bf16, to_bf16_bits(3.0F), to_bf16_bits(3.0F * static_cast<float>(n)), std::uint16_t{0xFFBF});
  });
}

TEST_P(Adversary, WhoAddsToAnOutputUnderWayIsToldThoughTheSumIsNaN) {
  const auto world = [&] {
    run_adversarial(way(), ranks(), {}, [](Communicator& comm) {
      std::vector<float> data(5, 1.0F);
      Work work = comm.all_reduce(flat_view(data), {.name = "sum"});
      data[2] += 1.0F;
      EXPECT_TRUE(std::isnan(data[2]));
      work.wait_host();
    });
  };
  EXPECT_TRUE(contains(text_of<ContractError>(world), "element 2 of the output was written while all_reduce 'sum'"));
}

TEST_P(Adversary, WhoReadsTooEarlyReadsNaN) {
  run_adversarial(way(), ranks(), {.seed = 5}, [](Communicator& comm) {
    for (const Operation& operation : collectives()) {
      Started s;
      operation.start(comm, s);
      EXPECT_EQ(not_nan(s.written), 0) << operation.name;
      s.work.wait_host();
      EXPECT_EQ(not_nan(s.written), s.written ? s.written.num_elements() : 0) << operation.name;
    }
    Started sent, received;
    ring_exchange(comm, received, 100, false);
    EXPECT_EQ(not_nan(received.written), 0);
    ring_exchange(comm, sent, 100, true);
    received.work.wait_host();
    EXPECT_EQ(not_nan(received.written), 100);
    sent.work.wait_host();
  });
}

TEST_P(Adversary, LeavesWhatIsOnlyReadAsItIs) {
  run_adversarial(way(), ranks(), {.seed = 6}, [](Communicator& comm) {
    for (const Operation& operation : collectives()) {
      Started s;
      operation.start(comm, s);
      if (s.read && !s.input.empty()) {
        const std::vector<float> whole = values_of<float>(comm.rank(), std::ssize(s.input));
        for (std::size_t i = 0; i < whole.size(); ++i) {
          const bool is_written = s.written && &s.input[i] >= s.written.as<float>().data() &&
                                  &s.input[i] < s.written.as<float>().data() + s.written.num_elements();
          EXPECT_TRUE(is_written || s.input[i] == whole[i]) << operation.name << " " << i;
        }
      }
      s.work.wait_host();
    }
  });
}

// On rank `who` one element is touched while the operation is under way; that rank must be told which.
void expect_told(Way way, int ranks, const Operation& operation, bool output) {
  const int who = ranks - 1;
  std::atomic<int> told{0};
  std::atomic<int> hit{0};
  try {
    run_adversarial(way, ranks, {.seed = 7}, [&](Communicator& comm) {
      Started s;
      operation.start(comm, s);
      const TensorView touched = output ? s.written : s.read;
      // Of an input that lies in the output nothing is only read, and the other way round an element beyond the output.
      const bool can = comm.rank() == who && touched && touched.num_elements() > 0 && (output || not_nan(touched) > 0);
      std::int64_t element = can ? touched.num_elements() / 2 : 0;
      if (can && !output) {
        while (std::isnan(touched.as<float>()[static_cast<std::size_t>(element)]))
          element = (element + 1) % touched.num_elements();
      }
      if (can) {
        touched.as<float>()[static_cast<std::size_t>(element)] = 77.0F;
        hit.fetch_add(1);
      }
      try {
        s.work.wait_host();
      } catch (const ContractError& error) {
        const std::string text = error.what();
        const std::string expected = "rank " + std::to_string(who) + ": element " + std::to_string(element) +
                                     (output ? " of the output was written while " : " of the input changed while ");
        EXPECT_TRUE(contains(text, expected)) << text;
        EXPECT_TRUE(contains(text, operation.name.substr(0, operation.name.find(' ')) + " '")) << text;
        told.fetch_add(1);
        throw;
      }
    });
  } catch (const ContractError&) {
  }
  EXPECT_EQ(told.load(), hit.load()) << operation.name;
}

TEST_P(Adversary, WhoWritesToAnOutputUnderWayIsTold) {
  for (const Operation& operation : collectives()) expect_told(way(), ranks(), operation, true);
  expect_told(way(), ranks(),
              {"recv",
               [](Communicator& comm, Started& s) {
                 std::vector<float> out = values_of<float>(comm.rank(), 10);
                 ring_exchange(comm, s, 10, false);
                 comm.send(flat_view(out), (comm.rank() + 1) % comm.size(), {3, 1, 2, 1}, {}).wait_host();
               }},
              true);
}

TEST_P(Adversary, WhoChangesAnInputUnderWayIsTold) {
  for (const Operation& operation : collectives()) expect_told(way(), ranks(), operation, false);
  expect_told(way(), ranks(),
              {"send",
               [](Communicator& comm, Started& s) {
                 std::vector<float> in(10);
                 ring_exchange(comm, s, 10, true);
                 comm.recv(flat_view(in), (comm.rank() + comm.size() - 1) % comm.size(), {3, 1, 2, 1}, {}).wait_host();
                 EXPECT_EQ(in[0], value_at((comm.rank() + comm.size() - 1) % comm.size(), 0));
               }},
              false);
}

TEST_P(AdversaryOfSeveral, TheOthersAreToldWhoWasAtFault) {
  std::atomic<int> told{0};
  const auto world = [&] {
    run_adversarial(way(), ranks(), {}, [&](Communicator& comm) {
      // Numbers of the whole world, in a part too.
      const auto part = comm.split(comm.rank() / (comm.size() - 1), 0);
      std::vector<float> data(10, 1.0F);
      Work work = part->all_reduce(flat_view(data), {.name = "gradient bucket 2"});
      if (comm.rank() == comm.size() - 1) data[4] = 0;
      try {
        work.wait_host();
        comm.barrier();
      } catch (const PeerError& error) {
        EXPECT_EQ(error.rank(), comm.size() - 1);
        EXPECT_TRUE(contains(error.what(), "all_reduce 'gradient bucket 2' of 10 fp32")) << error.what();
        told.fetch_add(1);
        throw;
      }
    });
  };
  const std::string text = text_of<ContractError>(world);
  EXPECT_EQ(text, "rank " + std::to_string(ranks() - 1) +
                      ": element 4 of the output was written while all_reduce 'gradient bucket 2' of 10 fp32 was under way");
  EXPECT_EQ(told.load(), ranks() - 1);
}

TEST_P(Adversary, IsDoneLateAndThenItsResultIsThere) {
  run_adversarial(way(), ranks(), {.seed = 8, .longest_delay_seconds = 1e-3}, [](Communicator& comm) {
    int looks_in_vain = 0;
    for (int round = 0; round < 20; ++round) {
      std::vector<float> data(100, static_cast<float>(round));
      Work work = comm.all_reduce(flat_view(data), {});
      while (!work.done()) {
        ASSERT_EQ(not_nan(flat_view(data)), 0);
        ++looks_in_vain;
        std::this_thread::yield();
      }
      ASSERT_EQ(data, std::vector<float>(100, static_cast<float>(round * comm.size())));
      EXPECT_TRUE(work.done());
      work.wait_host();
      ASSERT_EQ(data[99], static_cast<float>(round * comm.size()));
    }
    EXPECT_TRUE(comm.size() == 1 || looks_in_vain > 0);
  });
}

TEST_P(Adversary, ADisturbanceThatDoneHasSeenIsReportedByTheWait) {
  const auto world = [&] {
    run_adversarial(way(), ranks(), {}, [](Communicator& comm) {
      std::vector<float> data(5, 1.0F);
      Work work = comm.all_reduce(flat_view(data), {.name = "polled"});
      data[3] = 1.0F;
      while (!work.done()) std::this_thread::yield();
      work.wait_host();
    });
  };
  EXPECT_TRUE(contains(text_of<ContractError>(world), "element 3 of the output was written while all_reduce 'polled'"));
}
}  // namespace
}  // namespace tandem::comm_test
