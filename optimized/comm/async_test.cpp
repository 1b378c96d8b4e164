// SPDX-License-Identifier: Apache-2.0
#include <deque>
#include <numeric>
#include <optional>

#include "optimized/comm/comm_test_support.h"

namespace tandem::comm_test {
namespace {

class Async : public OnRanks {};
INSTANTIATE_TEST_SUITE_P(World, Async, testing::Combine(kBothWays, testing::Values(1, 2, 3, 4, 7)), param_name);

float sum_of_ranks(int ranks) { return static_cast<float>(ranks * (ranks + 1)) / 2; }

TEST_P(Async, AnOperationProceedsWithoutFurtherCalls) {
  run_ranks(ranks(), [&](Communicator& comm) {
    std::vector<float> data(300007, static_cast<float>(comm.rank() + 1));
    Work work = comm.all_reduce(flat_view(data), {});
    while (!work.done()) std::this_thread::yield();
    // Read before wait_host(): done means done.
    EXPECT_EQ(data.front(), sum_of_ranks(comm.size()));
    EXPECT_EQ(data.back(), sum_of_ranks(comm.size()));
    work.wait_host();
  });
}

TEST_P(Async, ManyOperationsInFlightKeepTheirOrderAndResults) {
  run_ranks(ranks(), [&](Communicator& comm) {
    const int operations = 200;
    std::vector<std::vector<float>> buffers;
    for (int i = 0; i < operations; ++i) {
      buffers.emplace_back(static_cast<std::size_t>(i * 37 % 5000), static_cast<float>((comm.rank() + 1) * (i % 50)));
    }
    std::deque<Work> works;
    for (int i = 0; i < operations; ++i) {
      const Progress progress = i % 3 == 0 ? Progress::on_wait : Progress::background;
      works.push_back(comm.all_reduce(flat_view(buffers[static_cast<std::size_t>(i)]), {.name = "many", .progress = progress}));
      if (i % 40 == 39) comm.barrier();
    }
    // Waited for from both ends.
    while (!works.empty()) {
      works.back().wait_host();
      works.pop_back();
      if (works.empty()) break;
      works.front().wait_host();
      works.pop_front();
    }
    for (int i = 0; i < operations; ++i) {
      for (const float value : buffers[static_cast<std::size_t>(i)]) {
        ASSERT_EQ(value, sum_of_ranks(comm.size()) * static_cast<float>(i % 50)) << "operation " << i;
      }
    }
  });
}

TEST_P(Async, RanksMayWaitInDifferentOrders) {
  run_ranks(ranks(), [&](Communicator& comm) {
    std::vector<float> a(1000, 1.0F), b(70000, 2.0F);
    Work first = comm.all_reduce(flat_view(a), {});
    Work second = comm.all_reduce(flat_view(b), {});
    Work* order[] = {&first, &second};
    if (comm.rank() % 2 == 1) std::swap(order[0], order[1]);
    order[0]->wait_host();
    order[1]->wait_host();
    EXPECT_EQ(a[999], static_cast<float>(comm.size()));
    EXPECT_EQ(b[69999], 2 * static_cast<float>(comm.size()));
  });
}

TEST_P(Async, OnWaitOperationsRunOnTheWaitingThreadInOrder) {
  run_ranks(ranks(), [&](Communicator& comm) {
    std::vector<float> data(3, 1.0F);
    // Each works on the result of the one before.
    Work first = comm.all_reduce(flat_view(data), {.progress = Progress::on_wait});
    Work second = comm.all_reduce(flat_view(data), {.progress = Progress::on_wait});
    second.wait_host();
    EXPECT_EQ(data[0], static_cast<float>(comm.size() * comm.size()));
    EXPECT_TRUE(first.done());
    first.wait_host();
  });
}

TEST_P(Async, WaitingTwiceAndMovingAreHarmless) {
  run_ranks(ranks(), [&](Communicator& comm) {
    std::vector<float> data(10, 1.0F);
    Work work;
    EXPECT_TRUE(work.done());
    work = comm.all_reduce(flat_view(data), {});
    Work moved = std::move(work);
    moved.wait_host();
    moved.wait_host();
    EXPECT_EQ(data[9], static_cast<float>(comm.size()));
  });
}

TEST_P(Async, MessagesTravelAroundTheRing) {
  run_ranks(ranks(), [&](Communicator& comm) {
    const int next = (comm.rank() + 1) % comm.size();
    const int previous = (comm.rank() + comm.size() - 1) % comm.size();
    for (const std::int64_t count : {0, 1, 1009, 300007}) {
      std::vector<float> out = values_of<float>(comm.rank(), count), in(out.size());
      const Envelope envelope{.step = count, .micro_batch = 1, .chunk = 2, .direction = 0};
      // All send first: it only works when posted messages do not block.
      Work sent = comm.send(flat_view(out), next, envelope, {.purpose = Purpose::activation});
      Work received = comm.recv(flat_view(in), previous, envelope, {.purpose = Purpose::activation});
      received.wait_host();
      sent.wait_host();
      ASSERT_EQ(in, values_of<float>(previous, count));
    }
    const std::int64_t sent_bytes = comm.size() > 1 ? (1 + 1009 + 300007) * 4 : 0;
    EXPECT_EQ(comm.bytes_sent(Purpose::activation), sent_bytes);
  });
}

TEST_P(Async, MessagesBetweenTwoRanksKeepTheirOrder) {
  run_ranks(ranks(), [&](Communicator& comm) {
    const int peer = comm.size() - 1 - comm.rank();
    const int messages = 50;
    std::vector<std::vector<std::int32_t>> out, in;
    for (int i = 0; i < messages; ++i) {
      out.push_back({comm.rank() * 1000 + i});
      in.push_back({-1});
    }
    std::vector<Work> works;
    for (std::size_t i = 0; i < messages; ++i) {
      works.push_back(comm.send(flat_view(out[i]), peer, {.step = static_cast<std::int64_t>(i)}, {}));
    }
    for (std::size_t i = 0; i < messages; ++i) {
      works.push_back(comm.recv(flat_view(in[i]), peer, {.step = static_cast<std::int64_t>(i)}, {.progress = Progress::on_wait}));
    }
    for (Work& work : works) work.wait_host();
    for (std::size_t i = 0; i < messages; ++i) EXPECT_EQ(in[i][0], peer * 1000 + static_cast<int>(i));
  });
}

TEST_P(Async, AMessageArrivesWhileItsReceiverWaitsInACollective) {
  run_ranks(ranks(), [&](Communicator& comm) {
    std::vector<float> data(1000, 5.0F), got(1000);
    std::optional<Work> received;
    if (comm.rank() == 0) received = comm.recv(flat_view(got), comm.size() - 1, {}, {});
    Work sum = comm.all_reduce(flat_view(data), {});
    // The last rank joins the collective only after its message has arrived.
    if (comm.rank() == comm.size() - 1 && comm.size() > 1) {
      std::vector<float> message(1000, 3.0F);
      comm.send(flat_view(message), 0, {}, {}).wait_host();
    } else if (comm.size() == 1) {
      std::vector<float> message(1000, 3.0F);
      comm.send(flat_view(message), 0, {}, {}).wait_host();
    }
    sum.wait_host();
    if (received) {
      received->wait_host();
      EXPECT_EQ(got, std::vector<float>(1000, 3.0F));
    }
  });
}

class Messages : public OnRanks {};
INSTANTIATE_TEST_SUITE_P(World, Messages, testing::Combine(kBothWays, testing::Values(2)), param_name);

void expect_refused(Way way, const Envelope& sent, std::int64_t sent_count, DType sent_dtype) {
  std::atomic<int> told{0};
  const auto world = [&] {
    run_ranks(2, way, [&](Communicator& comm) {
      std::vector<double> data(64, -1.0);
      const Envelope expected{.step = 4, .micro_batch = 1, .chunk = 0, .direction = 1};
      Work work = comm.rank() == 0 ? comm.send(TensorView(data.data(), sent_dtype, {sent_count}), 1, sent, {.name = "grad"})
                                   : comm.recv(TensorView(data.data(), DType::f32, {10}), 0, expected, {.name = "grad"});
      try {
        work.wait_host();
        ADD_FAILURE() << "no exception";
      } catch (const ContractError& error) {
        const std::string text = error.what();
        EXPECT_NE(text.find("send 'grad'"), std::string::npos) << text;
        EXPECT_NE(text.find("recv 'grad' of 10 fp32 from rank 0 to rank 1 (step 4, micro-batch 1, chunk 0, backward)"),
                  std::string::npos)
            << text;
        told.fetch_add(1);
      }
      EXPECT_EQ(data, std::vector<double>(64, -1.0));
    });
  };
  world();
  EXPECT_EQ(told.load(), 2);
}

TEST_P(Messages, AreRefusedWhereEnvelopeSizeOrDtypeDiffer) {
  const Envelope same{.step = 4, .micro_batch = 1, .chunk = 0, .direction = 1};
  for (Envelope other : {Envelope{5, 1, 0, 1}, Envelope{4, 0, 0, 1}, Envelope{4, 1, 1, 1}, Envelope{4, 1, 0, 0}}) {
    expect_refused(way(), other, 10, DType::f32);
  }
  expect_refused(way(), same, 9, DType::f32);
  expect_refused(way(), same, 10, DType::i32);
}

class CommTimeline : public OnRanks {};
INSTANTIATE_TEST_SUITE_P(World, CommTimeline, testing::Combine(kBothWays, testing::Values(2)), param_name);

const Span* find_span(const std::vector<Span>& spans, Activity activity, Lane lane) {
  for (const Span& span : spans) {
    if (span.activity == activity && span.lane == lane) return &span;
  }
  return nullptr;
}

TEST_P(CommTimeline, TellsTransferFromWaitAndInlineFromBackground) {
  run_ranks(2, [](Communicator& comm) {
    Timeline timeline;
    comm.set_timeline(&timeline);
    std::vector<float> data(100000, 1.0F);

    all_reduce(comm, flat_view(data), {.purpose = Purpose::gradient, .name = "inline", .step = 3});
    const std::vector<Span> inline_spans = timeline.spans();
    const Span* transfer = find_span(inline_spans, Activity::transfer, Lane::compute);
    ASSERT_NE(transfer, nullptr);
    EXPECT_EQ(transfer->bytes, 400000);
    EXPECT_EQ(transfer->purpose, Purpose::gradient);
    EXPECT_EQ(transfer->step, 3);
    EXPECT_NE(transfer->name.find("all_reduce 'inline'"), std::string::npos);
    EXPECT_NE(find_span(inline_spans, Activity::wait, Lane::compute), nullptr);
    EXPECT_EQ(find_span(inline_spans, Activity::transfer, Lane::communication), nullptr);

    timeline.clear();
    Work work = comm.all_reduce(flat_view(data), {.name = "behind"});
    while (!work.done()) std::this_thread::yield();
    work.wait_host();
    const std::vector<Span> spans = timeline.spans();
    EXPECT_NE(find_span(spans, Activity::transfer, Lane::communication), nullptr);
    EXPECT_EQ(find_span(spans, Activity::transfer, Lane::compute), nullptr);
    for (const Span& span : spans) EXPECT_LE(span.begin_ns, span.end_ns);
    comm.set_timeline(nullptr);
  });
}

TEST_P(CommTimeline, RecordsMessagesOnBothSides) {
  run_ranks(2, [](Communicator& comm) {
    Timeline timeline;
    comm.set_timeline(&timeline);
    std::vector<float> data(1000);
    Work work = comm.rank() == 0 ? comm.send(flat_view(data), 1, {}, {}) : comm.recv(flat_view(data), 0, {}, {});
    work.wait_host();
    std::int64_t bytes = 0;
    int transfers = 0;
    for (const Span& span : timeline.spans()) {
      bytes += span.bytes;
      transfers += span.activity == Activity::transfer ? 1 : 0;
    }
    EXPECT_EQ(bytes, comm.rank() == 0 ? 4000 : 0);
    EXPECT_EQ(transfers, 1);
    comm.set_timeline(nullptr);
  });
}

}  // namespace
}  // namespace tandem::comm_test
