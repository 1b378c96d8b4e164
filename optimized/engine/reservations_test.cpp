// SPDX-License-Identifier: Apache-2.0
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include <gtest/gtest.h>

#include "core/config.h"
#include "core/synthetic_corpus.h"
#include "optimized/comm/world.h"
#include "optimized/engine/engine.h"
#include "optimized/machine.h"

namespace tandem {
namespace {

using Counts = std::span<const std::int64_t>;

// Another communicator, and what was registered with it.
class Registering final : public Communicator {
 public:
  explicit Registering(Communicator& inner) : inner_(inner) {}
  [[nodiscard]] int rank() const noexcept override { return inner_.rank(); }
  [[nodiscard]] int size() const noexcept override { return inner_.size(); }
  [[nodiscard]] std::uint64_t generation() const noexcept override { return inner_.generation(); }
  [[nodiscard]] Work all_reduce(TensorView data, const CommOptions& options) override { return inner_.all_reduce(data, options); }
  [[nodiscard]] Work reduce_scatter(TensorView input, TensorView output, Counts counts, const CommOptions& options) override {
    return inner_.reduce_scatter(input, output, counts, options);
  }
  [[nodiscard]] Work all_gather(TensorView input, TensorView output, Counts counts, const CommOptions& options) override {
    return inner_.all_gather(input, output, counts, options);
  }
  [[nodiscard]] Work all_to_all(TensorView input, Counts send, TensorView output, Counts receive,
                                const CommOptions& options) override {
    return inner_.all_to_all(input, send, output, receive, options);
  }
  [[nodiscard]] Work broadcast(TensorView data, int root, const CommOptions& options) override {
    return inner_.broadcast(data, root, options);
  }
  [[nodiscard]] Work send(TensorView data, int to, const Envelope& envelope, const CommOptions& options) override {
    return inner_.send(data, to, envelope, options);
  }
  [[nodiscard]] Work recv(TensorView data, int from, const Envelope& expected, const CommOptions& options) override {
    return inner_.recv(data, from, expected, options);
  }
  void barrier() override { inner_.barrier(); }
  [[nodiscard]] std::unique_ptr<Communicator> split(int colour, int key) override { return inner_.split(colour, key); }
  void abort(std::string_view reason) noexcept override { inner_.abort(reason); }
  void set_timeline(Timeline* timeline) noexcept override { inner_.set_timeline(timeline); }
  void set_memory(Memory* memory) override { inner_.set_memory(memory); }
  void register_memory(void* address, std::int64_t size_bytes) override { regions[address] = size_bytes; }
  void deregister_memory(void* address) noexcept override { EXPECT_EQ(regions.erase(address), 1U); }
  [[nodiscard]] std::int64_t bytes_sent(Purpose purpose) const noexcept override { return inner_.bytes_sent(purpose); }

  [[nodiscard]] std::int64_t bytes() const {
    std::int64_t sum = 0;
    for (const auto& [address, size_bytes] : regions) sum += size_bytes;
    return sum;
  }

  std::map<void*, std::int64_t> regions;

 private:
  Communicator& inner_;
};

// Trains one step; says what was registered then, and what the arena had reserved.
std::pair<std::int64_t, std::int64_t> registered_and_reserved(const std::string& backend) {
  RunConfig config;
  config.plan.batch = {2, 1};
  config.model.vocabulary = 29;
  config.model.sequence = 9;
  config.model.layers = 1;
  config.model.hidden = 16;
  config.model.heads = 2;
  config.model.mlp_hidden = 24;
  config.steps = 1;
  const SyntheticCorpus corpus({.vocabulary = config.model.vocabulary, .sequence = config.model.sequence, .seed = 3});
  std::pair<std::int64_t, std::int64_t> result;
  run_world({.ranks = 1}, [&](Communicator& inner) {
    Registering comm(inner);
    const auto kernels = make_kernels(config.plan, MachineChoice{backend});
    Arena arena({.huge_pages = false, .memory = &kernels->memory()});
    arena.reserve(1);  // before there is an engine
    {
      Engine engine({&comm, kernels.get(), &arena, nullptr, {}, {}},
                    {config.model, config.plan, config.optimizer, config.schedule, config.steps, 5});
      engine.store().initialise(config.model, Initialization::scattered, 5);
      engine.train_step(corpus.training_batch(0, config.plan.batch.rows), 0);
      arena.reserve(arena.reserved_bytes() + 1);
      result = {comm.bytes(), arena.reserved_bytes()};
    }
    EXPECT_TRUE(comm.regions.empty()) << "after the engine";
  });
  return result;
}

TEST(EngineReservations, OfADeviceAreRegisteredWithTheWorldAsLongAsTheEngineLives) {
  if (const std::string why = why_no_gpu("simt"); !why.empty()) GTEST_SKIP() << why;
  const auto [registered, reserved] = registered_and_reserved("simt");
  EXPECT_GT(reserved, 0);
  EXPECT_EQ(registered, reserved);
}

TEST(EngineReservations, OfTheHostAreNobodysBusiness) { EXPECT_EQ(registered_and_reserved("cpu").first, 0); }

}  // namespace
}  // namespace tandem
