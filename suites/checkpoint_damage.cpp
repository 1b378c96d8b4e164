// SPDX-License-Identifier: Apache-2.0
// What has happened to files since they were written: each kind is refused, and the checkpoint before it is found.
#include <fstream>
#include <functional>
#include <optional>

#include <fmt/format.h>

#include "core/io/atomic_file.h"
#include "core/io/hash.h"
#include "optimized/checkpoint/catalogue.h"
#include "suites/checkpoint_cases.h"
#include "suites/scratch_folder.h"

namespace tandem {
namespace {

namespace fs = std::filesystem;

constexpr const char* kShard0 = "shard-00000.safetensors";
constexpr const char* kShard1 = "shard-00001.safetensors";
constexpr const char* kManifest = "manifest.json";

/// One thing that is done to a good step folder.
struct Damage {
  std::string name;
  std::string named;  ///< what the refusal must name
  std::function<void(const fs::path& step_folder)> apply;
};

void write_text(const fs::path& file, const std::string& text) {
  std::ofstream stream(file, std::ios::binary | std::ios::trunc);
  stream << text;
}

// `change` gets the content of a file of the step.
Damage changed(const std::string& name, const std::string& file, const std::function<void(std::string&)>& change) {
  return {name, file, [=](const fs::path& folder) {
            std::string content = read_text_file(folder / file);
            change(content);
            write_text(folder / file, content);
          }};
}

Damage truncated(const std::string& name, const std::string& file, double share, std::size_t less) {
  return changed(name, file, [=](std::string& content) {
    content.resize(static_cast<std::size_t>(share * static_cast<double>(content.size())) - less);
  });
}

// One bit at a place between 0 (first byte) and 1 (last).
Damage flipped(const std::string& name, const std::string& file, double place) {
  return changed(name, file, [=](std::string& content) {
    char& byte = content[static_cast<std::size_t>(place * static_cast<double>(content.size() - 1))];
    byte = static_cast<char>(byte ^ 0x10);
  });
}

// The manifest says something else, and its own hash is right: what a program, not a disk, does to it.
Damage restated(const std::string& name, const std::string& named, const std::string& from, const std::string& to) {
  Damage damage = changed(name, kManifest, [=](std::string& text) {
    constexpr const char* kField = "\"manifest_xxh128\"";
    text.resize(text.rfind(kField));
    const std::size_t at = text.find(from);
    TANDEM_CHECK(at != std::string::npos, fmt::format("the manifest has no '{}'", from));
    text.replace(at, from.size(), to);
    text += fmt::format("{}: \"{}\"\n}}\n", kField, to_hex(hash128(std::as_bytes(std::span(text)))));
  });
  damage.named = named;
  return damage;
}

// Without the digest of shard 0, one of whose bits is flipped too, or the manifest's own, one of whose digits is another.
Damage file_digest_stripped() {
  Damage damage = changed("digest of a file stripped", kManifest, [](std::string& text) {
    const std::size_t begin = text.find(",\"xxh128\":");
    TANDEM_CHECK(begin != std::string::npos, "the manifest has no digest of a file");
    text.erase(begin, text.find('}', begin) - begin);
    constexpr const char* kField = "\"manifest_xxh128\"";
    text.resize(text.rfind(kField));
    text += fmt::format("{}: \"{}\"\n}}\n", kField, to_hex(hash128(std::as_bytes(std::span(text)))));
  });
  const auto strip = damage.apply;
  damage.apply = [strip](const fs::path& folder) {
    strip(folder);
    flipped("", kShard0, 0.9).apply(folder);
  };
  damage.named = "xxh128";
  return damage;
}

Damage manifest_digest_stripped() {
  Damage damage = changed("digest of the manifest stripped", kManifest, [](std::string& text) {
    text.resize(text.rfind(",\n\"manifest_xxh128\""));
    text += "\n}\n";
  });
  damage.named = "manifest_xxh128";
  return damage;
}

std::vector<Damage> damages() {
  const auto rename = [](const char* from, const char* to) {
    return [from, to](const fs::path& folder) { fs::rename(folder / from, folder / to); };
  };
  return {truncated("last byte cut", kShard1, 1, 1),
          truncated("half cut", kShard0, 0.5, 0),
          truncated("empty", kShard0, 0, 0),
          truncated("manifest half cut", kManifest, 0.5, 0),
          truncated("manifest empty", kManifest, 0, 0),
          flipped("bit of the header's length", kShard0, 0),
          changed("bit of the header's names", kShard0, [](std::string& content) { content[content.find("wte")] ^= 0x10; }),
          changed("bit of the header's padding", kShard0, [](std::string& content) { content[content.find('}')] ^= 0x10; }),
          flipped("bit in the middle", kShard1, 0.5),
          flipped("bit of the last byte", kShard1, 1),
          flipped("bit of the manifest's first byte", kManifest, 0),
          flipped("bit in the manifest's middle", kManifest, 0.5),
          changed("digit of a digest", kManifest,
                  [](std::string& text) {
                    char& digit = text[text.find("xxh128\":\"") + 9];
                    digit = digit == '0' ? '1' : '0';
                  }),
          changed("digit of the manifest's digest", kManifest,
                  [](std::string& text) { text[text.size() - 5] = text[text.size() - 5] == '0' ? '1' : '0'; }),
          {"missing", kShard1, [](const fs::path& folder) { fs::remove(folder / kShard1); }},
          {"manifest missing", kManifest, [](const fs::path& folder) { fs::remove(folder / kManifest); }},
          {"renamed", kShard1, rename(kShard1, "shard-00002.safetensors")},
          {"swapped", kShard0,
           [](const fs::path& folder) {
             fs::rename(folder / kShard0, folder / "aside");
             fs::rename(folder / kShard1, folder / kShard0);
             fs::rename(folder / "aside", folder / kShard1);
           }},
          {"extra file", "shard-00009.safetensors",
           [](const fs::path& folder) { fs::copy(folder / kShard0, folder / "shard-00009.safetensors"); }},
          restated("later version", "version", "\"version\": 2", "\"version\": 3"),
          restated("other format", "format", "\"tandem-checkpoint\"", "\"tandem-chequepoint\""),
          restated("other step", "step", "\"next_step\": 2", "\"next_step\": 1"),
          restated("other shape", "wpe.weight", R"("name":"wpe.weight","pieces":[{)",
                   R"("name":"wpe.weight","pieces":[{"elements":[0,5],)"),
          restated("other type", "", R"("dtype":"fp32")", R"("dtype":"fp64")"),
          file_digest_stripped(),
          manifest_digest_stripped()};
}

struct GoodFolder {
  ScratchFolder scratch{"checkpoint-good"};
  CheckpointRun run;
};

// Two checkpoints, after steps 1 and 2.
void make_good(GoodFolder& good, const ParallelVariant& variant, const RunContext& context) {
  good.run = run_checkpoints(saving_script(inputs_of(variant, context), good.scratch.path(), 3, {1, 2}), context);
}

// How the damaged newest checkpoint is taken; empty: refused as it must be.
std::string accepted(const Damage& damage, const fs::path& good, const RunContext& context) {
  const ScratchFolder scratch("checkpoint-damaged");
  fs::copy(good, scratch.path(), fs::copy_options::recursive);
  damage.apply(step_folder(scratch.path(), 2));
  std::vector<std::string> notes;
  const fs::path found = find_checkpoint(
      scratch.path(), [&](const std::string& note) { notes.push_back(note); }, context.pitfalls);
  if (found != step_folder(scratch.path(), 1)) return fmt::format("{}: {} is taken", damage.name, found.filename().string());
  if (notes.size() != 1 || notes.front().find(damage.named) == std::string::npos) {
    return fmt::format("{}: the note does not name {}: {}", damage.name, damage.named, notes.empty() ? "none" : notes.front());
  }
  try {
    static_cast<void>(find_checkpoint(step_folder(scratch.path(), 2), {}, context.pitfalls));
    return fmt::format("{}: taken where it is named itself", damage.name);
  } catch (const InputError&) {
    return {};
  }
}

Property none_accepted(const std::vector<std::string>& accepted, std::size_t tried, const std::string& what) {
  return {"damages_accepted",
          static_cast<double>(accepted.size()),
          Relation::equal,
          0.0,
          fmt::format("each of {} {} is refused with a line that names it", tried, what),
          -1,
          accepted.empty() ? "" : accepted.front()};
}

Case table_case(const ParallelVariant& variant) {
  Case result = checkpoint_case("damage/files", "every damaged checkpoint is passed over, with a note that says why", variant);
  result.execute = [variant](const RunContext& context) {
    GoodFolder good;
    make_good(good, variant, context);
    std::vector<std::string> bad;
    const std::vector<Damage> all = damages();
    for (const Damage& damage : all) {
      std::string how = accepted(damage, good.scratch.path(), context);
      if (!how.empty()) bad.push_back(std::move(how));
    }
    CaseEvidence evidence;
    evidence.properties = {none_accepted(bad, all.size(), "kinds of damage"),
                           equal_on_disk("fields_and_tensors_that_differ (undamaged)", good.run.states.at(2),
                                         find_checkpoint(good.scratch.path(), {}, context.pitfalls),
                                         "what is whole is found, and is the newest", 1)};
    return evidence;
  };
  return result;
}

// A manifest whose index is whole in itself, but not what the model needs: no hash tells.
std::optional<std::string> message_of_load(const fs::path& folder, const ParallelVariant& variant, const RunContext& context) {
  CheckpointScript script = saving_script(inputs_of(variant, context), {}, 3, {});
  script.load = folder;
  script.verifies = false;
  script.first_step = script.end = 2;
  try {
    static_cast<void>(run_checkpoints(script, context));
    return std::nullopt;
  } catch (const InputError& error) {
    return error.what();
  }
}

// Without the index entry of `name`.
void remove_tensor(std::string& text, const std::string& name) {
  const std::size_t at = text.find(fmt::format(R"("name":"{}")", name));
  TANDEM_CHECK(at != std::string::npos, fmt::format("the manifest has no '{}'", name));
  const std::size_t begin = text.rfind('\n', at);
  const std::size_t end = text.find('\n', at);
  text.erase(begin, end - begin);
}

Case missing_case(const ParallelVariant& variant) {
  Case result = checkpoint_case("damage/tensors",
                                "a tensor that is missing, renamed or of another shape is named, not left as it was", variant);
  result.execute = [variant](const RunContext& context) {
    GoodFolder good;
    make_good(good, variant, context);
    const std::string bias = "h.0.attn.c_attn.bias";
    std::vector<std::string> bad;
    const auto refused = [&](const std::string& label, const ParallelVariant& loading, const Damage& damage) {
      const ScratchFolder scratch("checkpoint-tensor");
      fs::copy(good.scratch.path(), scratch.path(), fs::copy_options::recursive);
      damage.apply(step_folder(scratch.path(), 2));
      const auto message = message_of_load(step_folder(scratch.path(), 2), loading, context);
      if (!message || message->find(damage.named) == std::string::npos) {
        bad.push_back(fmt::format("{}: {}", label, message.value_or("loaded")));
      }
    };
    const auto without = [&](const std::string& name) {
      Damage damage = restated("", name, "\"tensors\":", "\"tensors\":");
      const auto rehash = damage.apply;
      damage.apply = [name, rehash](const fs::path& folder) {
        changed("", kManifest, [&](std::string& text) { remove_tensor(text, name); }).apply(folder);
        rehash(folder);
      };
      return damage;
    };
    for (const std::string prefix : {"", "m.", "v."}) refused(prefix + bias + " missing", variant, without(prefix + bias));
    refused("renamed", variant, restated("", bias, fmt::format(R"("name":"{}")", bias), fmt::format(R"("name":"{}.old")", bias)));
    refused("another learning rate", variant, restated("", "learning_rate", "\"learning_rate\": ", "\"learning_rate\": 1"));
    ParallelVariant wider = variant;
    wider.hidden = 48;
    refused("another width", wider, Damage{"", "", [](const fs::path&) {}});
    ParallelVariant deeper = variant;
    deeper.layers = 3;
    refused("another depth", deeper, Damage{"", "h.2.", [](const fs::path&) {}});
    CaseEvidence evidence;
    evidence.properties = {none_accepted(bad, 7, "mismatches")};
    return evidence;
  };
  return result;
}

}  // namespace

void add_checkpoint_damage_cases(CaseList& cases) {
  cases.push_back(table_case(accumulating({.degrees = {.data = 2}})));
  cases.push_back(missing_case(accumulating({.degrees = {.data = 2}})));
}

}  // namespace tandem
