// SPDX-License-Identifier: Apache-2.0
#include "core/io/golden_set.h"

#include <gtest/gtest.h>

#include <unistd.h>

#include <cmath>
#include <fstream>
#include <functional>
#include <sstream>

#include <nlohmann/json.hpp>

#include "core/error.h"

namespace tandem {
namespace {

using nlohmann::json;

std::filesystem::path tiny_folder() { return std::filesystem::path(TANDEM_SOURCE_DIR) / "results" / "golden" / "tiny"; }

/// A copy of the set `tiny` that a test may damage.
class DamagedSet : public testing::Test {
 protected:
  void SetUp() override {
    folder_ = std::filesystem::temp_directory_path() / ("tandem_golden_" + std::to_string(::getpid()));
    std::filesystem::remove_all(folder_);
    std::filesystem::copy(tiny_folder(), folder_);
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  void change_config(const std::function<void(json&)>& change) const {
    std::ifstream in(folder_ / "config.json");
    json config = json::parse(in);
    change(config);
    std::ofstream(folder_ / "config.json") << config.dump();
  }
  /// The reader's complaint; a test fails where there is none.
  [[nodiscard]] std::string complaint() const {
    try {
      static_cast<void>(read_golden_set(folder_));
    } catch (const InputError& error) {
      return error.what();
    }
    ADD_FAILURE() << "the damage went unnoticed";
    return "";
  }
  void expect_complaint(std::initializer_list<std::string> parts) const {
    const std::string text = complaint();
    for (const std::string& part : parts) EXPECT_NE(text.find(part), std::string::npos) << part << " is not in: " << text;
    EXPECT_EQ(text.find('\n'), std::string::npos) << text;
  }

  std::filesystem::path folder_;
};

TEST(GoldenSet, ReadsTheSetTiny) {
  const GoldenSet set = read_golden_set(tiny_folder());

  EXPECT_EQ(set.name, "tiny");
  EXPECT_EQ(set.model.hidden, 32);
  EXPECT_TRUE(set.model.tied);
  EXPECT_DOUBLE_EQ(set.optimizer.beta2, 0.95);
  ASSERT_EQ(set.batches.size(), 8U);
  EXPECT_EQ(set.batches[3].rows, 4);
  EXPECT_EQ(set.batches[3].row_ids, (std::vector<std::int64_t>{0, 1, 2, 3}));
  EXPECT_EQ(set.batches[3].valid_tokens(), 64);
  EXPECT_EQ(set.initial_parameters.size(), gpt_parameters(set.model).size());
  EXPECT_DOUBLE_EQ(set.losses[0], 4.252209997339623);
  EXPECT_EQ(set.parameters_last.tensors.at("wte.weight").values.size(), 64U * 32U);
}

TEST(GoldenDeviation, MeasuresRelativeL2OfWhatIsStored) {
  GoldenTensor expected{{7}, 3, DType::f64, {3.0, 0.0, 4.0}, {}};
  std::vector<double> values = {3.0, 99.0, 99.0, 0.0, 99.0, 99.0, 4.5};
  EXPECT_DOUBLE_EQ(golden_deviation<double>(expected, "wte.weight", values), 0.5 / 5.0);
  values[3] = NAN;
  EXPECT_TRUE(std::isnan(golden_deviation<double>(expected, "wte.weight", values)));
}

TEST(GoldenDeviation, LeavesTheKeyBiasOut) {
  const GoldenTensor expected{{6}, 1, DType::f64, {1.0, 1.0, 1.0, 1.0, 1.0, 1.0}, {}};
  const std::vector<double> key_differs = {1.0, 1.0, 7.0, 7.0, 1.0, 1.0};
  EXPECT_EQ(golden_deviation<double>(expected, "h.0.attn.c_attn.bias", key_differs), 0.0);
  EXPECT_GT(golden_deviation<double>(expected, "h.0.mlp.c_fc.bias", key_differs), 1.0);
}

TEST(GoldenDeviation, OfTheSummarySeesElementsThatAreNotStored) {
  const GoldenTensor expected{{4}, 2, DType::f64, {1.0, 3.0}, {10.0, std::sqrt(30.0), 4.0}};
  EXPECT_LE(golden_summary_deviation<double>(expected, "x", std::vector<double>{1.0, 2.0, 3.0, 4.0}), 1e-15);
  EXPECT_GT(golden_summary_deviation<double>(expected, "x", std::vector<double>{1.0, 2.5, 3.0, 4.0}), 1e-2);
  EXPECT_TRUE(std::isnan(golden_summary_deviation<double>(expected, "x", std::vector<double>{1.0, NAN, 3.0, 4.0})));
}

TEST_F(DamagedSet, RejectsAFolderWithoutConfig) {
  std::filesystem::remove(folder_ / "config.json");
  expect_complaint({"config.json", "cannot be opened"});
}

TEST_F(DamagedSet, RejectsConfigThatIsNotJson) {
  std::ofstream(folder_ / "config.json") << "{\"format\": ";
  expect_complaint({"config.json", "not valid JSON"});
}

TEST_F(DamagedSet, RejectsAnotherFormat) {
  change_config([](json& config) { config["format"] = "gpt2-golden-2"; });
  expect_complaint({"config.json", "\"format\"", "gpt2-golden-2"});
}

TEST_F(DamagedSet, RejectsAMissingField) {
  change_config([](json& config) { config["optimizer"].erase("beta2"); });
  expect_complaint({"config.json", "\"optimizer.beta2\" is missing"});
}

TEST_F(DamagedSet, RejectsAFieldOfTheWrongType) {
  change_config([](json& config) { config["n_layer"] = "two"; });
  expect_complaint({"\"n_layer\"", "must be an integer"});
}

TEST_F(DamagedSet, RejectsAnActivationThatItCannotReproduce) {
  change_config([](json& config) { config["activation_function"] = "gelu"; });
  expect_complaint({"\"activation_function\"", "gelu_new"});
}

TEST_F(DamagedSet, RejectsDropout) {
  change_config([](json& config) { config["resid_pdrop"] = 0.1; });
  expect_complaint({"\"resid_pdrop\""});
}

TEST_F(DamagedSet, RejectsHeadsThatDoNotDivide) {
  change_config([](json& config) { config["n_head"] = 5; });
  expect_complaint({"config.json", "heads"});
}

TEST_F(DamagedSet, RejectsAMissingFile) {
  std::filesystem::remove(folder_ / "adam_v_stepK.safetensors");
  expect_complaint({"adam_v_stepK.safetensors"});
}

TEST_F(DamagedSet, RejectsATruncatedFile) {
  const auto file = folder_ / "grads_step0.safetensors";
  std::filesystem::resize_file(file, std::filesystem::file_size(file) - 9);
  expect_complaint({"grads_step0.safetensors"});
}

TEST_F(DamagedSet, RejectsTensorsOfAnotherShape) {
  change_config([](json& config) { config["vocab_size"] = 63; });
  expect_complaint({"vocabulary of 63"});
  change_config([](json& config) { config["vocab_size"] = 65; });
  expect_complaint({"init.safetensors", "wte.weight", "[64, 32]", "[65, 32]"});
}

TEST_F(DamagedSet, RejectsTokenCountsThatContradictTheTargets) {
  change_config([](json& config) { config["valid_tokens_per_step"][2] = 63; });
  expect_complaint({"data.safetensors", "step 2", "64 valid targets", "63"});
}

TEST_F(DamagedSet, RejectsMoreStepsThanThereAre) {
  change_config([](json& config) { config["steps"] = 9; });
  expect_complaint({"data.safetensors", "\"inputs\"", "[8, 2, 2, 16]", "[9, 2, 2, 16]"});
}

}  // namespace
}  // namespace tandem
