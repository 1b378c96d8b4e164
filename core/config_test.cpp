// SPDX-License-Identifier: Apache-2.0
#include "core/config.h"

#include <filesystem>
#include <fstream>
#include <iterator>
#include <set>
#include <sstream>

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "core/config_fields.h"
#include "core/error.h"

namespace tandem {
namespace {

// The text of the InputError that `run` throws.
template <class Run>
std::string input_error(Run run) {
  try {
    run();
  } catch (const InputError& error) {
    return error.what();
  }
  return "(no InputError was thrown)";
}

std::string json_error(std::string_view text) {
  return input_error([&] { (void)config_from_json(text, "x.json"); });
}

std::string set_error(std::string_view assignment) {
  return input_error([&] {
    RunConfig config;
    set_option(config, assignment);
  });
}

// A legal value that differs from the default, as JSON.
std::string changed_value(const ConfigField& field) {
  const RunConfig defaults;
  const FieldValue now = field.get(defaults);
  switch (field.type) {
    case FieldType::flag: return std::get<bool>(now) ? "false" : "true";
    case FieldType::unsigned_integer: return "18446744073709551615";
    case FieldType::integer: return std::to_string(static_cast<std::int64_t>(field.range.high));
    case FieldType::real: {
      for (const char* candidate : {"0.625", "0.5", "3.5"}) {
        const double value = std::stod(candidate);
        if (value != std::get<double>(now) && value > field.range.low) return candidate;
      }
      break;
    }
    case FieldType::text: return R"("3-2-2-1")";
    case FieldType::choice: break;
  }
  return '"' + field.choices.back() + '"';
}

TEST(ConfigFields, HaveUniqueKeysAndAMeaning) {
  std::set<std::string> keys;
  for (const ConfigField& field : config_fields()) {
    EXPECT_TRUE(keys.insert(field.key).second) << field.key;
    EXPECT_FALSE(field.meaning.empty()) << field.key;
  }
  EXPECT_EQ(keys.size(), 87U);
}

TEST(ConfigFields, EachReadsBackWhatWasSetAndNothingElseMoves) {
  const RunConfig defaults;
  for (const ConfigField& field : config_fields()) {
    if (field.shorthand) continue;
    const auto text = fmt::format(R"({{"{}": {{"{}": {}}}}})", field.section, field.key, changed_value(field));
    const auto before = nlohmann::json::parse(to_json(defaults));

    const auto after = nlohmann::json::parse(to_json(config_from_json(text, "x.json")));

    auto expected = before;
    expected[field.section][field.key] = nlohmann::json::parse(changed_value(field));
    EXPECT_EQ(after, expected) << field.full_name();
  }
}

TEST(Config, RoundTripsThroughJson) {
  RunConfig config;
  for (const ConfigField& field : config_fields()) {
    if (!field.shorthand) set_option(config, field.key + "=" + changed_value(field));
  }

  const RunConfig again = config_from_json(to_json(config), "again");

  EXPECT_EQ(again.model, config.model);
  EXPECT_EQ(again.plan, config.plan);
  EXPECT_EQ(again.optimizer, config.optimizer);
  EXPECT_EQ(again.schedule, config.schedule);
  EXPECT_EQ(to_json(again), to_json(config));
  EXPECT_EQ(again.seed, 18446744073709551615ULL);
}

TEST(Config, KeepsDoublesToTheLastBit) {
  RunConfig config;
  config.optimizer.learning_rate = 0.1 + 0.2;
  config.model.layer_norm_epsilon = 0x1.fffffffffffffp-20;

  const RunConfig again = config_from_json(to_json(config), "again");

  EXPECT_EQ(again.optimizer.learning_rate, config.optimizer.learning_rate);
  EXPECT_EQ(again.model.layer_norm_epsilon, config.model.layer_norm_epsilon);
}

TEST(Config, LeavesDefaultsWhereNothingIsSaid) {
  const RunConfig config = config_from_json(R"({"model": {"layers": 5}, "run": {}})", "x.json");

  EXPECT_EQ(config.model.layers, 5);
  EXPECT_EQ(config.model.hidden, GptConfig{}.hidden);
  const RunConfig defaults;
  EXPECT_EQ(config.steps, defaults.steps);
}

TEST(Config, PrecisionDecidesTheNumerics) {
  const RunConfig config = config_from_json(R"({"plan": {"precision": "fp64"}})", "x.json");

  EXPECT_EQ(config.plan.precision, "fp64");
  EXPECT_EQ(config.plan.numerics, numerics_from_precision("fp64"));
}

TEST(Config, GradientsAsStoredHoldBeforeAndAfterThePrecision) {
  RunConfig before, after;
  set_option(before, "gradients=stored");
  set_option(before, "precision=fp16");
  set_option(after, "precision=fp16");
  set_option(after, "gradients=stored");

  EXPECT_EQ(before.plan, after.plan);
  EXPECT_EQ(before.plan.numerics.accumulate, DType::f16);
  EXPECT_EQ(before.plan.numerics.reduce, DType::f16);
  EXPECT_EQ(before.plan.numerics.master, DType::f32);

  set_option(before, "precision=bf16");
  EXPECT_EQ(before.plan.numerics.accumulate, DType::bf16);
  set_option(before, "gradients=wide");
  EXPECT_EQ(before.plan.numerics, numerics_from_precision("bf16"));
}

TEST(Config, GradientsAsStoredAreOfTheStorageUnderAutocast) {
  const RunConfig config = config_from_json(R"({"plan": {"gradients": "stored", "precision": "fp16-autocast"}})", "x.json");
  EXPECT_EQ(config.plan.numerics, numerics_from_precision("fp16-autocast"));
}

TEST(Config, LossScaleIsItsOwnGroupOfKeys) {
  RunConfig config;
  set_option(config, "loss_scale=static");
  set_option(config, "loss_scale_initial=1024");
  set_option(config, "fp8_history=4");
  EXPECT_EQ(config.plan.loss_scale, (LossScaleConfig{.mode = "static", .initial = 1024.0}));
  EXPECT_EQ(config.plan.fp8, (Fp8Config{.history = 4}));
}

TEST(Config, DropoutSetsAllThreeAndYieldsToTheNamedOnes) {
  const RunConfig config = config_from_json(R"({"model": {"attention_dropout": 0.5, "dropout": 0.25}})", "x.json");

  EXPECT_EQ(config.model.embedding_dropout, 0.25);
  EXPECT_EQ(config.model.attention_dropout, 0.5);
  EXPECT_EQ(config.model.residual_dropout, 0.25);
  EXPECT_EQ(to_json(config).find("\"dropout\""), std::string::npos);
}

TEST(Config, AcceptsIntegersInScientificNotation) {
  EXPECT_EQ(config_from_json(R"({"run": {"steps": 2e3}})", "x.json").steps, 2000);
}

TEST(Config, NamesTheNearestKeyForAMisspelledOne) {
  EXPECT_EQ(json_error(R"({"model": {"hiden": 4}})"), "unknown key 'model.hiden' in x.json; did you mean 'model.hidden'?");
  EXPECT_EQ(json_error(R"({"plan": {"layers": 4}})"), "unknown key 'plan.layers' in x.json; did you mean 'model.layers'?");
  EXPECT_EQ(json_error(R"({"modle": {"layers": 4}})"), "unknown section 'modle' in x.json; did you mean 'model'?");
  EXPECT_EQ(json_error(R"({"layers": 4})"), "key 'layers' in x.json belongs into the section 'model'");
}

TEST(Config, ListsTheKeysWhereNoneIsNear) {
  EXPECT_EQ(json_error(R"({"schedule": {"nonsense_word": 4}})"),
            "unknown key 'schedule.nonsense_word' in x.json; the keys of 'schedule' are: learning_rate_schedule, warmup_steps, "
            "decay_steps, min_ratio");
  EXPECT_EQ(json_error(R"({"completely": {}})"),
            "unknown section 'completely' in x.json; the sections are: model, plan, optimizer, schedule, run, anomaly");
}

TEST(Config, NamesKeyValueAndRange) {
  EXPECT_EQ(json_error(R"({"model": {"layers": 0}})"), "model.layers is 0 in x.json; it must be an integer from 1 to 2147483647");
  EXPECT_EQ(json_error(R"({"model": {"layers": 2.5}})"),
            "model.layers is 2.5 in x.json; it must be an integer from 1 to 2147483647");
  EXPECT_EQ(json_error(R"({"model": {"residual_dropout": 1.0}})"),
            "model.residual_dropout is 1.0 in x.json; it must be a number in [0, 1)");
  EXPECT_EQ(json_error(R"({"optimizer": {"epsilon": 0}})"), "optimizer.epsilon is 0 in x.json; it must be a number above 0");
  EXPECT_EQ(json_error(R"({"optimizer": {"weight_decay": -1}})"),
            "optimizer.weight_decay is -1 in x.json; it must be a number of at least 0");
  EXPECT_EQ(json_error(R"({"plan": {"precision": "int8"}})"),
            "plan.precision is \"int8\" in x.json; it must be one of: fp64, fp32, bf16, fp16, bf16-autocast, fp16-autocast, fp8");
  EXPECT_EQ(json_error(R"({"plan": {"zero": 4}})"), "plan.zero is 4 in x.json; it must be an integer from 0 to 3");
  EXPECT_EQ(json_error(R"({"plan": {"loss_scale_growth_factor": 1}})"),
            "plan.loss_scale_growth_factor is 1 in x.json; it must be a number above 1");
  EXPECT_EQ(json_error(R"({"plan": {"loss_scale_backoff_factor": 1.0}})"),
            "plan.loss_scale_backoff_factor is 1.0 in x.json; it must be a number in (0, 1)");
  EXPECT_EQ(json_error(R"({"model": {"tied": 1}})"), "model.tied is 1 in x.json; it must be true or false");
  EXPECT_EQ(json_error(R"({"run": {"seed": -1}})"),
            "run.seed is -1 in x.json; it must be an integer from 0 to 18446744073709551615");
  EXPECT_EQ(json_error(R"({"run": {"steps": null}})"),
            "run.steps is null in x.json; it must be an integer from 0 to 9007199254740992");
}

TEST(Config, RefusesNumbersBeyondTheRangeOfTheirType) {
  EXPECT_NE(json_error(R"({"model": {"layers": 2147483648}})").find("it must be an integer from 1 to 2147483647"),
            std::string::npos);
  EXPECT_NE(json_error(R"({"run": {"steps": 18446744073709551615}})").find("run.steps is 18446744073709551615"),
            std::string::npos);
  EXPECT_NE(json_error(R"({"optimizer": {"learning_rate": 1e999}})").find("x.json cannot be read as JSON: number overflow"),
            std::string::npos);
}

TEST(Config, SaysWhereTheSyntaxBreaks) {
  const auto starts_with = [](const std::string& text, std::string_view place) {
    return text.starts_with(fmt::format("x.json is not valid JSON, {}: syntax error while parsing", place));
  };
  EXPECT_TRUE(starts_with(json_error("{\n  \"model\": {,}\n}"), "line 2, column 13")) << json_error("{\n  \"model\": {,}\n}");
  EXPECT_EQ(json_error(""), "x.json is empty; a JSON object with sections such as \"model\" is needed");
  EXPECT_TRUE(starts_with(json_error("{} x"), "line 1, column 4")) << json_error("{} x");
}

TEST(Config, RefusesAKeyThatIsWrittenTwice) {
  EXPECT_EQ(json_error(R"({"model": {"layers": 4, "heads": 1, "layers": 5}})"), "key 'layers' appears twice in x.json");
  EXPECT_EQ(json_error(R"({"model": {}, "run": {}, "model": {}})"), "key 'model' appears twice in x.json");
}

TEST(Config, RefusesWhatIsNotAnObject) {
  EXPECT_EQ(json_error("[1, 2]"), "x.json must hold a JSON object with sections such as \"model\"");
  EXPECT_EQ(json_error(R"({"model": 3})"), "'model' is 3 in x.json; it must be an object");
}

TEST(SetOption, TakesBareAndFullKeysAndPlainWords) {
  RunConfig config;

  set_option(config, "model.layers=7");
  set_option(config, "heads=2");
  set_option(config, "optimizer=sgd");
  set_option(config, "optimizer.learning_rate=3e-4");
  set_option(config, "initialization=\"scattered\"");
  set_option(config, "tied=false");

  EXPECT_EQ(config.model.layers, 7);
  EXPECT_EQ(config.model.heads, 2);
  EXPECT_EQ(config.optimizer.kind, OptimizerKind::sgd);
  EXPECT_EQ(config.optimizer.learning_rate, 3e-4);
  EXPECT_EQ(config.initialization, Initialization::scattered);
  EXPECT_FALSE(config.model.tied);
}

TEST(SetOption, NamesTheAssignmentAtFault) {
  EXPECT_EQ(set_error("hiden=4"), "unknown key 'hiden' in --set hiden=4; did you mean 'model.hidden'?");
  EXPECT_EQ(set_error("run.layers=4"), "unknown key 'run.layers' in --set run.layers=4; did you mean 'model.layers'?");
  EXPECT_EQ(set_error("layers=many"),
            "model.layers is \"many\" in --set layers=many; it must be an integer from 1 to 2147483647");
  EXPECT_EQ(set_error("layers="), "model.layers is \"\" in --set layers=; it must be an integer from 1 to 2147483647");
  EXPECT_EQ(set_error("learning_rate=nan"),
            "optimizer.learning_rate is \"nan\" in --set learning_rate=nan; it must be a number of at least 0");
  EXPECT_EQ(set_error("layers"), "--set layers is not of the form key=value");
  EXPECT_EQ(set_error("=3"), "--set =3 is not of the form key=value");
}

TEST(SetOption, SurvivesBytesThatAreNotText) {
  EXPECT_NE(set_error("optimizer=\xff\xfe").find("it must be one of: adamw, sgd"), std::string::npos);
  EXPECT_LT(set_error("precision=\"" + std::string(5000, 'x') + "\"").find("..."), 200U);
}

TEST(SetOption, LeavesTheConfigurationAloneWhereItThrows) {
  RunConfig config;
  const std::string before = to_json(config);

  EXPECT_THROW(set_option(config, "dropout=2"), InputError);

  EXPECT_EQ(to_json(config), before);
}

TEST(ReadConfig, NamesAFileThatIsMissingOrADirectory) {
  const auto missing = input_error([] { (void)read_config("does/not/exist.json"); });
  EXPECT_EQ(missing, "config does/not/exist.json cannot be read: No such file or directory");
  const auto folder = input_error([] { (void)read_config(std::filesystem::temp_directory_path()); });
  EXPECT_NE(folder.find("is a directory, not a file"), std::string::npos);
}

TEST(ReadConfig, ReadsAFileAndNamesItInErrors) {
  const auto file = std::filesystem::path(testing::TempDir()) / "tandem_config_test.json";
  std::ofstream(file) << R"({"run": {"steps": 12}})";
  EXPECT_EQ(read_config(file).steps, 12);

  std::ofstream(file) << R"({"run": {"steps": -12}})";
  EXPECT_NE(input_error([&] { (void)read_config(file); }).find("run.steps is -12 in " + file.string()), std::string::npos);

  std::filesystem::remove(file);
}

TEST(DescribeOptions, HasOneLineForEachKeyWithItsDefault) {
  const std::vector<std::string> lines = describe_options();

  ASSERT_EQ(lines.size(), config_fields().size());
  std::istringstream words(lines[2]);  // a type may hold blanks: "integer >= 1"
  const std::vector<std::string> found{std::istream_iterator<std::string>(words), {}};
  EXPECT_EQ(found, (std::vector<std::string>{"model.layers", "integer", ">=", "1", "2", "transformer", "blocks"})) << lines[2];
}

}  // namespace
}  // namespace tandem
