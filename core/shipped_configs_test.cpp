// SPDX-License-Identifier: Apache-2.0
#include <filesystem>
#include <map>
#include <string>

#include <gtest/gtest.h>

#include "core/config.h"
#include "core/io/atomic_file.h"

namespace tandem {
namespace {

const std::filesystem::path kRoot = TANDEM_SOURCE_DIR;

TEST(ShippedConfigs, AreLegal) {
  int checked = 0;
  for (const char* folder : {"docs/examples", "results/models"}) {
    for (const auto& entry : std::filesystem::directory_iterator(kRoot / folder)) {
      if (entry.path().extension() != ".json") continue;
      if (read_text_file(entry.path()).find("\"shape\"") != std::string::npos)
        continue;  // for planning alone (core/model_shape.h)
      ASSERT_NO_THROW({
        const RunConfig config = read_config(entry.path());
        validate(config.model);
        require_legal(config.plan, config.model);
      }) << entry.path();
      ++checked;
    }
  }
  EXPECT_GE(checked, 18);
}

TEST(ShippedConfigs, Gpt2ModelsHaveThePublishedSizes) {
  const std::map<std::string, std::int64_t> published = {
      {"gpt2-124m", 124'439'808}, {"gpt2-355m", 354'823'168}, {"gpt2-774m", 774'030'080}, {"gpt2-1558m", 1'557'611'200}};
  for (const auto& [name, parameters] : published) {
    EXPECT_EQ(num_parameters(read_config(kRoot / "results/models" / (name + ".json")).model), parameters) << name;
  }
}

}  // namespace
}  // namespace tandem
